"""Checks of an evaluation before any process starts, and its folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.evaluator import resolve_servers, usable_gpus
from apps.evaluate.results import Evaluation, check_same_settings, load_compared
from apps.evaluate.targets import Target, find_targets
from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_runtime import InputError, Inputs, SupervisedConfig, check_lengths, check_prompt_files
from rl_runtime.app.first_prompts import check_first_prompts, check_functions
from rl_runtime.app.inputs import load_ahead
from rl_runtime.app.resume import earlier_folder
from rl_runtime.app.reward_model import check_reward_model
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.launch.servers import check_folder_name
from rl_runtime.ranks.environment import why_cpu
from rl_runtime.rollout.scoring import rewards_of_rows
from rollout_vllm import RequestTooLongError, check_launch, check_running
from rollout_vllm.servers.device import Device, check_build
from run_kit import RunFolder
from run_kit.cli import INVOKED_AS
from run_kit.tracking.run_state import StateFile


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The models to evaluate and to compare, and a configuration without open settings."""

    config: EvaluateConfig
    targets: tuple[Target, ...]
    compared: dict[str, Evaluation]
    folder: Path | None
    """The folder to continue; None: a new one."""
    notes: tuple[str, ...]
    inputs: Inputs | None
    """None: those of the built-in model, which the evaluation writes into its folder."""


def check(config: EvaluateConfig) -> Plan:
    """Refuses settings that cannot work before any process starts; finds the models."""
    targets = find_targets(config)
    compared = load_compared(config)
    resolved = resolve_servers(targets.config, num_gpus=len(usable_gpus(config)) if targets.targets else 0)
    if targets.targets and not config.rollout.urls:
        resolved = replace(resolved, warning=why_cpu(config.rollout.device))
    inputs, warnings = check_inputs(resolved.config) if targets.targets else (None, [])
    notes = (*targets.notes, *resolved.lines(), *warnings, *(inputs.lines if inputs is not None else ()))
    folder = earlier_folder(config, config.experiment, noun="an evaluation")
    if folder is not None:
        check_same_settings(resolved.config, folder)
    settled = resolved.config
    return Plan(config=settled, targets=targets.targets, compared=compared, folder=folder, notes=notes, inputs=inputs)


def check_inputs(config: EvaluateConfig) -> tuple[Inputs | None, list[str]]:
    """Checks functions, prompts, lengths and servers; returns the inputs (None: the built-in ones) and warnings.

    Raises:
        InputError: the configuration or a file cannot be used; names the key.
        rollout_vllm.RolloutConfigError: vLLM cannot serve the model.
    """
    if config.model.path == BUILTIN_MODEL and config.rollout.urls:
        raise InputError(
            field="model.path", value=BUILTIN_MODEL, allowed="with rollout.urls: the servers' model folder"
        )
    if config.model.path != BUILTIN_MODEL and not config.data.val:
        raise InputError(field="data.val", value=[], allowed="files with the prompts to evaluate on")
    check_functions(config.episode, config.reward)
    check_prompt_files(config.model, config.data, rewards=rewards_of_rows(config.reward, config.episode))
    check_lengths(config.rollout, config.data, [config.sampling])
    if config.reward.model_on_ranks:
        served = (
            f"reward.service=reward_model and reward.url=URL of `vllm serve {config.reward.model} --runner pooling`"
        )
        allowed = f"without a trainer's ranks: {served}"
        raise InputError(field="reward.model", value=config.reward.model, allowed=allowed)
    longest = config.data.max_prompt_length + config.sampling.max_tokens
    check_reward_model(config.model, config.reward, longest=longest)
    _check_servers(config)
    inputs = load_ahead(config.model, config.data, SupervisedConfig(), config.task, seed=config.seed)
    if inputs is not None and not inputs.val_prompts:
        raise InputError(field="data.val", value=config.data.val, allowed="a prompt within data.max_prompt_length")
    warnings = check_first_prompts(
        inputs, config.model, config.data, config.task, episode=config.episode, reward=config.reward, seed=config.seed
    )
    return inputs, warnings


def _check_servers(config: EvaluateConfig) -> None:
    with prefix_fields("rollout"):
        if config.rollout.urls:
            check_running(config.rollout)
            return
        config.rollout.read_api_key()
        device: Device = "cuda" if usable_gpus(config) else "cpu"
        check_build(device, device_key="rollout.device")
    check_folder_name("output_dir", str(Path(config.output_dir).absolute()))  # exports are there
    if config.model.path == BUILTIN_MODEL:
        return
    folder = str(find_model_folder(config.model.path))
    check_folder_name("model.path", folder)
    rollout = replace(config.rollout, device=device, load_format="dummy")  # a base model may be without weights
    try:
        with prefix_fields("rollout"):
            check_launch(folder, rollout, device_key="rollout.device")
    except RequestTooLongError as error:
        lengths = (config.data.max_prompt_length, config.sampling.max_tokens)
        keys = "data.max_prompt_length, sampling.max_tokens"
        raise InputError(f"do not fit the model: {error}", field=keys, value=lengths) from error


@contextmanager
def open_run(config: EvaluateConfig, folder: Path | None, *, num_models: int) -> Iterator[RunFolder]:
    """The folder of the evaluation, with its log and its state for `plinth runs`. `folder`: the one to continue."""
    run = RunFolder.open(folder) if folder is not None else None
    run = run or RunFolder.create(config.output_dir, config.experiment, private=config.private_output)
    run.write_config(config)
    state = StateFile(run.state_file, app=INVOKED_AS.get(), num_steps=num_models)
    try:
        with run:
            yield run
    except BaseException as error:
        state.close(error)
        raise
    state.close(None)
