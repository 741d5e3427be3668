"""A sample as a multi-turn episode, from a rollout function, an environment or an agent of the user."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsFloat

from rl_data import ImageFiles, Prompt
from rl_data.images import image_folder
from rollout_vllm import AgentRollout, ChatFormat, EnvironmentRollout, EnvironmentSpec, Episode, agent_spec
from rollout_vllm.episodes.environment_process import EnvironmentProcess

from ..errors import InputError
from .config import EpisodeConfig
from .user_functions import load_attribute, load_function

RolloutFunction = Callable[[Episode, Prompt, Any], Awaitable[SupportsFloat | None]]
PlayEpisode = Callable[[Episode, Prompt], Awaitable[SupportsFloat | None]]


def episode_player(
    config: EpisodeConfig,
    tokenizer: Any,
    chat: ChatFormat | None = None,
    max_prompt_tokens: int | None = None,
    images: ImageFiles | None = None,
) -> PlayEpisode | None:
    """The coroutine function that plays the episode of a sample; None for single-turn responses.

    `chat`: the format of the conversation with an environment or agent; default: that of the tokenizer.
    `max_prompt_tokens`: see `AgentRollout`. `images`: the files of observations with images.

    Raises:
        InputError: `episode.function`, `episode.environment` or `episode.agent` cannot be imported or called.
    """
    if config.agent is not None:
        load_agent(config)
        return AgentRollout(
            spec=process_spec(config),
            chat=chat or ChatFormat(tokenizer),
            max_turns=config.max_turns,
            call_format=config.call_format,
            max_prompt_tokens=max_prompt_tokens,
        )
    if config.environment is not None:
        load_environment(config)
        return EnvironmentRollout(
            spec=process_spec(config),
            chat=chat or ChatFormat(tokenizer),
            max_turns=config.max_turns,
            image_file=images,
        )
    if config.function is None:
        return None
    function = load_rollout(config.function)
    return lambda episode, prompt: function(episode, prompt, tokenizer)


def process_spec(config: EpisodeConfig) -> EnvironmentSpec:
    """The process of the environment or agent that `episode` names."""
    limits: dict[str, Any] = {"start_timeout_s": config.start_timeout_s, "isolated": config.isolated}
    limits["memory_bytes"] = config.memory_bytes
    if config.agent is not None:
        return agent_spec(config.agent, config.options, **limits)
    limits |= {"step_timeout_s": config.step_timeout_s, "image_folder": str(image_folder())}
    return EnvironmentSpec(path=config.environment or "", options=config.options, **limits)


async def reset_once(config: EpisodeConfig, prompt: Prompt) -> None:
    """Starts the environment or agent in its own process, resets it and ends it. An agent does not run.

    Raises:
        rollout_vllm.EnvironmentFailedError: as in an episode.
    """
    async with EnvironmentProcess(process_spec(config), prompt) as environment:
        await environment.reset()


def load_rollout(name: str) -> RolloutFunction:
    """Imports the coroutine function `episode.function`.

    Raises:
        InputError: it cannot be imported or called.
    """
    return load_function(name, key="episode.function", arguments=("episode", "prompt", "tokenizer"), is_coroutine=True)


def load_agent(config: EpisodeConfig) -> None:
    """Imports the function or class `episode.agent` and checks that it takes `episode.options`.

    Raises:
        InputError: it cannot be imported or called.
    """
    agent = load_attribute(config.agent or "", key="episode.agent")
    if inspect.isclass(agent):
        if not any("__call__" in vars(base) for base in agent.__mro__):  # not that of its own type, which makes objects
            problem = "its objects have no method __call__(base_url, api_key, prompt)"
            raise InputError(problem, field="episode.agent", value=config.agent)
        _load_class(config.agent or "", "episode.agent", config, {"__call__": ("base_url", "api_key", "prompt")})
        return
    load_function(
        config.agent or "",
        key="episode.agent",
        arguments=("base_url", "api_key", "prompt"),
        keywords=tuple(config.options),
        is_coroutine=None,
    )


def load_environment(config: EpisodeConfig) -> Callable[..., Any]:
    """Imports the class `episode.environment` and checks its methods and that it takes `episode.options`.

    Raises:
        InputError: it cannot be imported, or lacks something; says what.
    """
    methods = {"reset": ("prompt",), "step": ("action",)}
    return _load_class(config.environment or "", "episode.environment", config, methods)


def _load_class(
    name: str, key: str, config: EpisodeConfig, methods: Mapping[str, tuple[str, ...]]
) -> Callable[..., Any]:
    environment = load_attribute(name, key=key, form="package.module:Class")
    for method, arguments in methods.items():
        try:
            inspect.signature(getattr(environment, method)).bind(environment, *arguments)
        except (AttributeError, TypeError) as error:
            problem = f"it has no method {method}({', '.join(arguments)}): {error}"
            raise InputError(problem, field=key, value=name) from error
    try:
        inspect.signature(environment).bind(**config.options)
    except TypeError as error:
        problem = f"{name} does not take them: {error}"
        raise InputError(problem, field="episode.options", value=dict(config.options)) from error
    return environment
