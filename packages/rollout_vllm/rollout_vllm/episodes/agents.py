"""Episodes of agents that send requests to the policy themselves: any function with any client."""

import importlib
import inspect
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .agent_endpoint import AgentEndpoint
from .chat import ChatFormat
from .environment_process import (
    EnvironmentFailedError,
    EnvironmentProcess,
    EnvironmentSpec,
    Observation,
    modules_of,
)
from .episodes import Episode
from .tools import CALL_FORMATS, check_call_format


def agent_spec(agent: str, options: Mapping[str, Any] | None = None, **limits: Any) -> EnvironmentSpec:
    """The process of an agent. agent: `package.module:function`, or a class. limits: of `EnvironmentSpec`."""
    return EnvironmentSpec(
        path=f"{__name__}:_Agent",
        options={"agent": agent, "options": dict(options or {})},
        step_timeout_s=math.inf,  # episode.timeout_s limits the whole episode
        name=f"agent {agent}",
        preload=tuple(modules_of(agent)),
        **limits,
    )


@dataclass(frozen=True, kw_only=True)
class AgentRollout:
    """Plays one episode of an agent in a process of its own: `await rollout(episode, prompt)`.

    The agent is called as `agent(base_url, api_key, prompt, **options)`; it may be a coroutine function, or a class of
    callable objects, made as `Class(**options)`, whose method `reset(prompt)`, if it has one, checks a row before the
    run. The policy answers its requests to base_url. It returns the score of the episode, rewards of replies by their
    ids (`{reply.id: 1.0}`), or None, which leaves scoring to others.

    spec: see `agent_spec`. call_format: how the policy writes tool calls, a key of `CALL_FORMATS`. max_turns: turns
    that the policy answers. max_prompt_tokens: a prompt and its answer have at most these and the tokens of
    sampling.max_tokens; None: as many as the prompt of the data and those.
    """

    spec: EnvironmentSpec
    chat: ChatFormat
    max_turns: int
    call_format: str = "hermes"
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        check_call_format(self.call_format)

    async def __call__(self, episode: Episode, prompt: Any) -> float | None:
        most = len(episode.prompt_ids) if self.max_prompt_tokens is None else self.max_prompt_tokens
        endpoint = AgentEndpoint(
            episode,
            self.chat,
            CALL_FORMATS[self.call_format],
            max_turns=self.max_turns,
            max_context=most + episode.num_tokens_left,
        )
        async with EnvironmentProcess(self.spec, prompt) as process:
            await process.reset()
            endpoint.listener = process.listener
            async with endpoint:
                try:
                    end = await process.step(json.dumps([endpoint.url, endpoint.key]))
                except EnvironmentFailedError as error:
                    if endpoint.failure is not None:
                        raise endpoint.failure from error
                    raise
        if not episode.tree.turns:
            raise EnvironmentFailedError(f"{self.spec.name}: it ended without an answer of the policy")
        if endpoint.ignored:
            episode.data["ignored_settings"] = sorted(endpoint.ignored)
        for reply_id, reward in end.info.items():
            episode.reward(reward, turn=endpoint.turn_of(reply_id))
        return end.reward


class _Agent:
    """The agent as an environment of one step, whose action is the address and the key of its endpoint."""

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        module, _, name = agent.partition(":")
        target: Any = getattr(importlib.import_module(module), name)
        self._agent: Any = target(**options) if inspect.isclass(target) else partial(target, **options)

    def reset(self, prompt: Any) -> Any:
        """Keeps the row."""
        self._prompt = prompt
        reset = getattr(self._agent, "reset", None)
        return None if reset is None else reset(prompt)

    def step(self, action: str) -> Any:
        """Runs the agent, which may start an event loop of its own."""
        url, key = json.loads(action)
        root = url.removesuffix("/v1")
        os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY=key, ANTHROPIC_BASE_URL=root, ANTHROPIC_API_KEY=key)
        os.environ.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
        return _end(self._agent(url, key, self._prompt))


async def _end(result: Any) -> tuple[Observation, Any, bool, dict[str, Any]]:
    result = await result if inspect.isawaitable(result) else result
    return (None, None, True, dict(result)) if isinstance(result, Mapping) else (None, result, True, {})
