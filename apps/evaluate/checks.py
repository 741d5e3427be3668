"""Checks of an evaluation before any process starts."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.evaluator import resolve_servers, usable_gpus
from apps.evaluate.targets import Target, find_targets
from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_data import build_tiny_model
from rl_runtime import InputError, Inputs, SupervisedConfig, check_lengths, check_prompt_files
from rl_runtime.app.first_prompts import check_first_prompts, check_functions
from rl_runtime.app.inputs import load_ahead
from rl_runtime.app.reward_model import check_reward_model
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.launch.servers import check_folder_name
from rl_runtime.ranks.environment import why_cpu
from rl_runtime.resolve.instruction import resolve_instruction
from rl_runtime.resolve.resolved import with_fetched_files
from rl_runtime.rollout.scoring import rewards_of_rows
from rl_runtime.rules import check_value
from rollout_vllm import RequestTooLongError, check_launch, check_running


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The models to evaluate, and a configuration without open settings."""

    config: EvaluateConfig
    targets: tuple[Target, ...]
    notes: list[str]
    inputs: Inputs | None
    """None: those of the built-in model, which the evaluation writes into its folder."""


def check(config: EvaluateConfig) -> Plan:
    """Refuses settings that cannot work before any process starts; finds the models."""
    config, targets, notes = find_targets(with_fetched_files(config))
    resolved = resolve_instruction(resolve_servers(config, num_gpus=len(usable_gpus(config))))
    if not config.rollout.urls:
        resolved = replace(resolved, warning=why_cpu(config.rollout.device))
    config = resolved.config
    _check_inputs(config)
    _check_servers(config)
    inputs = load_ahead(config, SupervisedConfig(), seed=config.seed)
    if inputs is not None and config.rollout.urls:
        check_value(config, "rollout.urls", not inputs.images_in, "none for prompts with images")
    has_prompts = inputs is None or bool(inputs.val_prompts)
    check_value(config, "data.val", has_prompts, "a prompt within data.max_prompt_length")
    warnings = check_first_prompts(inputs, config, episode=config.episode, reward=config.reward, seed=config.seed)
    notes = [*notes, *resolved.lines(), *warnings, *(inputs.lines if inputs is not None else ())]
    return Plan(config=config, targets=targets, notes=notes, inputs=inputs)


def _check_inputs(config: EvaluateConfig) -> None:
    """Raises InputError, with the key, for functions, prompts or a reward model that cannot be used."""
    is_builtin, has_servers = config.model.path == BUILTIN_MODEL, bool(config.rollout.urls)
    check_value(config, "model.path", not (is_builtin and has_servers), "with rollout.urls: the servers' model folder")
    has_prompts = is_builtin or bool(config.data.val)
    check_value(config, "data.val", has_prompts, "files with the prompts to evaluate on")
    check_functions(config.episode, config.reward)
    check_prompt_files(config.model, config.data, rewards=rewards_of_rows(config.reward, config.episode))
    served = f"reward.url=URL of `vllm serve {config.reward.model} --runner pooling`"
    allowed = f"without a trainer's ranks: reward.service=reward_model and {served}"
    check_value(config, "reward.model", not config.reward.model_on_ranks, allowed)
    longest = config.data.max_prompt_length + config.sampling.response_tokens
    check_reward_model(config.model, config.reward, longest=longest)


def _check_servers(config: EvaluateConfig) -> None:
    """Raises InputError or rollout_vllm.RolloutConfigError for a model or settings that vLLM cannot serve."""
    check_lengths(config.rollout, config.data, [config.sampling])
    if config.rollout.urls:
        with prefix_fields("rollout"):
            check_running(config.rollout)
        return
    with prefix_fields("rollout"):
        config.rollout.read_api_key()
    folder = str(find_model_folder(config.model.path))
    check_folder_name("model.path", folder)
    check_folder_name("output_dir", str(Path(config.output_dir).absolute()))  # exports are there
    rollout = replace(config.rollout, load_format="dummy")  # a base model may be without weights
    try:
        with prefix_fields("rollout"), TemporaryDirectory() as temporary:
            served = build_tiny_model(temporary) if config.model.path == BUILTIN_MODEL else folder
            check_launch(served, rollout, device_key="rollout.device")
    except RequestTooLongError as error:
        lengths = (config.data.max_prompt_length, config.sampling.response_tokens)
        keys = "data.max_prompt_length, sampling.max_tokens"
        raise InputError(f"do not fit the model: {error}", field=keys, value=lengths) from error
