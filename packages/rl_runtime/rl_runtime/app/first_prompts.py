"""Tries the user's functions and environments before anything starts, on the first prompts of the run."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from plinth_base.errors import prefix_fields
from rl_data import Prompt, reward_for
from rollout_vllm import EnvironmentFailedError

from ..errors import InputError
from ..job_config import InputsConfig
from ..launch.cluster import why_unreachable
from ..rollout.config import EpisodeConfig
from ..rollout.episodes import load_agent, load_environment, load_rollout, reset_once
from ..rollout.reward_trial import has_functions, try_rewards
from ..rollout.scoring import load_answer, load_functions, prepare_rewards, rewards_of_rows
from ..rollout.scoring_config import ScoringConfig
from ..training.supervised_config import SupervisedConfig
from .inputs import Inputs, load_inputs, policy_tokenizer

_NUM_READ = 100
"""Demonstrations that are read for the formats that a reward needs."""


def check_functions(episode: EpisodeConfig, reward: ScoringConfig) -> None:
    """Raises InputError if a user's function cannot be imported or called, or if no scoring service answers."""
    if episode.function is not None:
        load_rollout(episode.function)
    if episode.environment is not None:
        load_environment(episode)
    if episode.agent is not None:
        load_agent(episode)
    prepare_rewards(load_functions(reward).values())
    load_answer(reward)
    if reward.url is not None:
        with prefix_fields("reward"):
            reward.read_api_key()
        parts = urlsplit(reward.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if why := why_unreachable(parts.hostname or "", port):
            problem = f"no service answers there ({why})"
            raise InputError(problem, field="reward.url", value=reward.url, remedy="start it first")


def first_prompts(inputs: Inputs | None, config: InputsConfig, *, seed: int) -> dict[str, Prompt]:
    """The first prompts of training and of validation, where there are some; `inputs`: None for the built-in ones."""
    if inputs is None:
        with TemporaryDirectory() as folder:
            nothing = SupervisedConfig(steps=0)
            inputs = load_inputs(config, nothing, folder=Path(folder), seed=seed, max_prompts=1)
    datasets = {"training": inputs.train_prompts, "validation": inputs.val_prompts}
    return {name: prompts[0] for name, prompts in datasets.items() if prompts}


def check_environment(episode: EpisodeConfig, prompts: Mapping[str, Prompt]) -> None:
    """Starts the environment or agent once for each of `first_prompts`, and resets it.

    Raises InputError if a start or a reset fails, for example because the rows lack a column.
    """
    for dataset, prompt in prompts.items():
        try:
            asyncio.run(reset_once(episode, prompt))
        except EnvironmentFailedError as error:
            columns = ", ".join(prompt.extra) or "none"
            raise InputError(
                f"it fails at the first prompt of {dataset} ({prompt.id}): {error}; its columns in prompt.extra: "
                f"{columns}",
                field=f"episode.{'agent' if episode.agent else 'environment'}",
                value=episode.agent or episode.environment,
            ) from error


def check_first_prompts(
    inputs: Inputs | None, config: InputsConfig, *, episode: EpisodeConfig, reward: ScoringConfig, seed: int
) -> list[str]:
    """Tries the environment and the user's reward functions on the first prompts; returns warnings.

    The prompt of validation is scored if its data source differs from that of training. A warning also names the format
    that a reward needs, if nothing tells the model of it.

    Args:
        inputs: what is loaded; None for the built-in model.

    Raises InputError.
    """
    if not episode.has_process and not has_functions(reward) and inputs is None:
        return []
    prompts = first_prompts(inputs, config, seed=seed)
    if episode.has_process:
        check_environment(episode, prompts)
    # An episode that scores itself leaves out all rewards but terms.
    scores_itself = (episode.has_process or episode.function is not None) and not reward.adds_up
    known = prompts.get("training")
    scored = {
        name: prompt
        for name, prompt in prompts.items()
        if prompt is known or known is None or prompt.data_source != known.data_source
    }
    tokenizer = policy_tokenizer(config.model) if inputs is None else inputs.tokenizer
    lines: list[str] = []
    if inputs is not None and not scores_itself:
        lines = _unasked_formats(inputs, episode, reward, scored)
    return lines + try_rewards(reward, scored, tokenizer=tokenizer, refuses=not scores_itself)


def _unasked_formats(
    inputs: Inputs, episode: EpisodeConfig, reward: ScoringConfig, prompts: Mapping[str, Prompt]
) -> list[str]:
    """A warning about texts that a reward needs for a score and that neither a prompt, the chat template nor a
    demonstration has."""
    shown = [inputs.tokenizer.decode(one.response_ids) for one in inputs.demonstrations[:_NUM_READ]]
    known, rewards = "\n".join([*shown, str(inputs.tokenizer.chat_template)]), rewards_of_rows(reward, episode)
    key, reads = ("reward.terms", "") if reward.terms else ("reward.method", ", or set reward.method=flexible")
    for dataset, prompt in prompts.items():
        of_prompt = [reward_for(prompt.data_source, reward)] if rewards is None else rewards
        markers = [marker for one in of_prompt for marker in one.markers]
        if absent := [marker for marker in markers if marker not in prompt.text and marker not in known]:
            return [
                f"warning: {key}: a response without {' and '.join(absent)} scores 0, and neither the first prompt of "
                f"{dataset} ({prompt.id}) nor the chat template or a demonstration has it. Ask for it in "
                f"data.instruction or data.system_prompt{reads}"
            ]
    return []
