"""Checks of an evaluation before any process starts, and its folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.evaluator import usable_gpus
from apps.evaluate.results import check_same_settings
from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_runtime import InputError, Inputs, SupervisedConfig, check_lengths, check_prompt_files
from rl_runtime.app.first_prompts import check_first_prompts, check_functions
from rl_runtime.app.inputs import load_ahead
from rl_runtime.app.resume import earlier_folder
from rl_runtime.app.reward_model import check_reward_model
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.launch.servers import check_folder_name
from rl_runtime.rollout.scoring import rewards_of_rows
from rollout_vllm import RequestTooLongError, check_launch, check_running
from rollout_vllm.servers.device import Device, check_build
from run_kit import RunFolder
from run_kit.cli import INVOKED_AS
from run_kit.tracking.run_state import StateFile


def check_inputs(config: EvaluateConfig) -> tuple[Inputs | None, list[str]]:
    """Checks functions, prompts, lengths and servers; returns the inputs (None: the built-in ones) and warnings.

    Raises:
        InputError: the configuration or a file cannot be used; names the key.
        rollout_vllm.RolloutConfigError: vLLM cannot serve the model.
    """
    if config.model.path == BUILTIN_MODEL and config.rollout.urls:
        raise InputError(f"model.path is {BUILTIN_MODEL}; allowed with rollout.urls: the model folder of the servers")
    if config.model.path != BUILTIN_MODEL and not config.data.val:
        raise InputError("data.val is empty; give the files with the prompts to evaluate on")
    check_functions(config.episode, config.reward)
    check_prompt_files(config.model, config.data, rewards=rewards_of_rows(config.reward, config.episode))
    check_lengths(config.rollout, config.data, [config.sampling])
    if config.reward.model_on_ranks:
        raise InputError(
            f"reward.model is {config.reward.model}; allowed in an evaluation, which has no trainer's ranks: with "
            "reward.service=reward_model and reward.url=http://HOST:PORT of "
            f"`vllm serve {config.reward.model} --runner pooling`"
        )
    longest = config.data.max_prompt_length + config.sampling.max_tokens
    check_reward_model(config.model, config.reward, longest=longest)
    _check_servers(config)
    inputs = load_ahead(config.model, config.data, SupervisedConfig(), config.task, seed=config.seed)
    if inputs is not None and not inputs.val_prompts:
        raise InputError("data.val has no prompt within data.max_prompt_length; allowed: at least one")
    warnings = check_first_prompts(
        inputs, config.model, config.data, config.task, episode=config.episode, reward=config.reward, seed=config.seed
    )
    return inputs, warnings


def _check_servers(config: EvaluateConfig) -> None:
    if config.rollout.urls:
        with prefix_fields("rollout"):
            check_running(config.rollout)
        return
    check_folder_name("output_dir", str(Path(config.output_dir).absolute()))  # exports are there
    device: Device = "cuda" if usable_gpus(config) else "cpu"
    folder = str(find_model_folder(config.model.path))
    check_folder_name("model.path", folder)
    with prefix_fields("rollout"):
        config.rollout.read_api_key()
        check_build(device, device_key="rollout.device")
        if config.model.path != BUILTIN_MODEL:
            _check_launch(folder, config, device)


def _check_launch(folder: str, config: EvaluateConfig, device: Device) -> None:
    rollout = replace(config.rollout, device=device, load_format="dummy")  # a base model may be without weights
    try:
        check_launch(folder, rollout, device_key="rollout.device")
    except RequestTooLongError as error:
        lengths = f"data.max_prompt_length ({config.data.max_prompt_length}) and sampling.max_tokens"
        raise InputError(f"{lengths} ({config.sampling.max_tokens}) do not fit the model: {error}") from error


def find_folder(config: EvaluateConfig) -> Path | None:
    """The folder that `resume=auto` continues; None to start a new one.

    Raises:
        InputError: there is no such folder, or its models were evaluated with other settings.
    """
    folder = earlier_folder(config, config.experiment, noun="an evaluation")
    if folder is not None:
        check_same_settings(config, folder)
    return folder


@contextmanager
def open_run(config: EvaluateConfig, folder: Path | None, *, num_models: int) -> Iterator[RunFolder]:
    """The folder of the evaluation, with its log and its state for `plinth runs`. `folder`: the one to continue."""
    run = (
        RunFolder.create(config.output_dir, config.experiment, private=config.private_output)
        if folder is None
        else RunFolder.open(folder)
    )
    run.write_config(config)
    state = StateFile(run.state_file, app=INVOKED_AS.get(), num_steps=num_models)
    try:
        with run:
            yield run
    except BaseException as error:
        state.close(error)
        raise
    state.close(None)
