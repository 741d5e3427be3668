"""Checks of the configuration, the inputs and the hosts before any process starts.

Apps call them from their own `check`, so a run folder, a Ray cluster and servers only exist for a job that can run.
The errors tell the user how to fix the configuration.
"""

import asyncio
import glob
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import urlsplit

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    ModelError,
    OptimConfig,
    UntriedModelError,
    check_deepspeed,
    check_model,
)
from ds_engine.config import check_schedule
from plinth_base.errors import prefix_fields
from plinth_base.model_folder import ModelFolderError, check_model_folder, find_model_folder
from rl_data import (
    DataConfig,
    DataError,
    Prompt,
    Reward,
    build_tiny_model,
    check_demonstrations,
    check_files,
    check_preferences,
    check_same_vocabulary,
    load_tokenizer,
)
from rl_data.tasks.tiny_model import build_tiny_tokenizer
from rollout_vllm import (
    Endpoint,
    EnvironmentFailedError,
    RequestTooLongError,
    RolloutConfig,
    SamplingConfig,
    check_launch,
    check_running,
)
from rollout_vllm.servers.checks import check_request_length
from weight_sync import SyncConfig, SyncConfigError, check_server, choose_transports, plan_transports

from ..config import BUILTIN_MODEL, ModelConfig, TrainerConfig, TrainingConfig
from ..errors import InputError
from ..launch.cluster import check_nodes, cluster_nodes, read_nodes
from ..launch.placement import Placement
from ..launch.reachability import why_unreachable
from ..rollout.config import EpisodeConfig
from ..rollout.episodes import load_environment, load_rollout, reset_once
from ..rollout.reward_trial import has_functions, try_rewards
from ..rollout.scoring import load_answer, load_functions, prepare_rewards
from ..rollout.scoring_config import ScoringConfig
from ..training.local_disks import check_storage
from ..training.supervised_config import SupervisedConfig
from .inputs import Inputs, load_inputs
from .supervised_job_config import ExampleKind
from .task_config import TaskSize


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Errors about a file or folder name the configuration key that gave it.

    Raises InputError for rl_data.DataError, ModelFolderError and OSError.
    """
    try:
        yield
    except (DataError, ModelFolderError) as error:
        raise InputError(f"{key}: {error}") from error
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise InputError(f"{key}: {error.strerror or error}: {str(error.filename)[:200]!r}; give another") from error


@contextmanager
def naming_engine(section: str, *, key: str = "model.path", path: str = "") -> Iterator[None]:
    """Errors in an engine's settings name its configuration section; those of another model, the key that gave it.

    Args:
        key: the configuration key that names the model.
        path: the value of `key`.

    Raises InputError for ds_engine.EngineConfigError.
    """
    try:
        yield
    except EngineConfigError as error:
        as_actor = f"{key} is {path}, whose engine is set up as the actor's: {error}"
        raise InputError(f"{section}.{error}" if key == "model.path" else as_actor) from error


def policy_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of the policy, before a run has written the built-in one. Raises InputError."""
    if model.path == BUILTIN_MODEL:
        return build_tiny_tokenizer()
    with naming_key("model.path"):
        return load_tokenizer(find_model_folder(model.path))


def load_scoring_model(
    key: str, name: str, policy: ModelConfig, *, need_weights: bool, remedy: str
) -> tuple[Path, Any]:
    """The folder and the tokenizer of a model that scores the token ids of the policy; `key` names it.

    Raises InputError, with `remedy` at its end if the vocabulary is another one.
    """
    folder = find_model_folder(name)
    with naming_key(key):
        check_model_folder(folder, need_weights=need_weights)
        theirs = load_tokenizer(folder)
    try:
        check_same_vocabulary(policy_tokenizer(policy), theirs)
    except DataError as error:
        raise InputError(
            f"{key} is {name}, which cannot score the token ids of model.path ({policy.path}): {error} {remedy}"
        ) from error
    return folder, theirs


def read_model_config(folder: Path, *, key: str = "model.path") -> dict[str, Any]:
    """The config.json of a model folder. Raises InputError."""
    with naming_key(key):
        try:
            settings: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{key}: {folder / 'config.json'} is no JSON: {error}") from error
    return settings


def check_functions(episode: EpisodeConfig, reward: ScoringConfig) -> None:
    """Raises InputError if a user's function cannot be imported or called, or if no scoring service answers."""
    if episode.function is not None:
        load_rollout(episode.function)
    if episode.environment is not None:
        load_environment(episode)
    prepare_rewards(load_functions(reward).values())
    load_answer(reward)
    if reward.url is not None:
        with prefix_fields("reward"):
            reward.read_api_key()
        parts = urlsplit(reward.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if why := why_unreachable(parts.hostname or "", port):
            raise InputError(f"reward.url is {reward.url}: no service answers there ({why}); start it first")


def check_prompt_files(model: ModelConfig, data: DataConfig, *, rewards: Sequence[Reward] | None = None) -> None:
    """Checks the model folder and every row of the prompt files, with `rewards` as `rl_data.check_files` takes them.

    Raises InputError, naming the key and the file or folder.
    """
    if model.path != BUILTIN_MODEL:
        with naming_key("model.path"):
            check_model_folder(find_model_folder(model.path))
    elif data.train or data.val:
        raise InputError(
            f"model.path is {BUILTIN_MODEL}, whose vocabulary knows the built-in task only; "
            "give model.path=<Hugging Face folder> with data.train and data.val"
        )
    for key, files in (("data.train", data.train), ("data.val", data.val)):
        with naming_key(key):
            check_files(files, data, rewards=rewards)


def check_train_prompts(model: ModelConfig, data: DataConfig) -> None:
    """Raises InputError for a model of the user without training prompts: those of the built-in task are not for it."""
    if model.path != BUILTIN_MODEL and not data.train:
        raise InputError(
            "data.train is empty: the built-in task belongs to the built-in model; give data.train=<parquet, JSON "
            f"lines or CSV>, or train the built-in model: model.path={BUILTIN_MODEL}"
        )


def first_prompts(
    inputs: Inputs | None, model: ModelConfig, data: DataConfig, task: TaskSize, *, seed: int
) -> dict[str, Prompt]:
    """The first prompts of training and of validation, where there are some; `inputs`: None for the built-in ones."""
    if inputs is None:
        with TemporaryDirectory() as folder:
            nothing = SupervisedConfig(steps=0)
            inputs = load_inputs(model, data, nothing, task, folder=Path(folder), seed=seed, max_prompts=1)
    of = {"training": inputs.train_prompts, "validation": inputs.val_prompts}
    return {what: prompts[0] for what, prompts in of.items() if prompts}


def check_environment(episode: EpisodeConfig, prompts: Mapping[str, Prompt]) -> None:
    """Starts the environment once for each of `first_prompts`, and resets it.

    Raises InputError if a start or a reset fails, for example because the rows lack a column.
    """
    for what, prompt in prompts.items():
        try:
            asyncio.run(reset_once(episode, prompt))
        except EnvironmentFailedError as error:
            columns = ", ".join(prompt.extra) or "none"
            raise InputError(
                f"episode.environment fails at the first prompt of {what} ({prompt.id}): {error}; its columns in "
                f"prompt.extra: {columns}"
            ) from error


def check_first_prompts(
    inputs: Inputs | None,
    model: ModelConfig,
    data: DataConfig,
    task: TaskSize,
    *,
    episode: EpisodeConfig,
    reward: ScoringConfig,
    seed: int,
) -> list[str]:
    """Tries the environment and the user's reward functions on the first prompts; returns warnings.

    The prompt of validation is scored if its data source differs from that of training.

    Args:
        inputs: what is loaded; None for the built-in model.

    Raises InputError.
    """
    if episode.environment is None and not has_functions(reward):
        return []
    prompts = first_prompts(inputs, model, data, task, seed=seed)
    if episode.environment is not None:
        check_environment(episode, prompts)
    # An episode that scores itself leaves out all rewards but terms.
    scores_itself = (episode.environment is not None or episode.function is not None) and not reward.adds_up
    known = prompts.get("training")
    scored = {
        what: one
        for what, one in prompts.items()
        if one is known or known is None or one.data_source != known.data_source
    }
    return try_rewards(reward, scored, tokenizer=policy_tokenizer(model), refuses=not scores_itself)


def check_architectures(
    model: ModelConfig,
    engines: Mapping[str, EngineConfig],
    *,
    on_gpu: bool,
    value_heads: Collection[str] = ("critic",),
    key: str = "model.path",
) -> list[str]:
    """Checks that the engines compute the model exactly, on a small random copy; returns a line for each way.

    Args:
        engines: configuration section -> engine.
        value_heads: sections whose engines have a value head.
        on_gpu: the ranks have GPUs; they try a model whose kernels need one.
        key: the configuration key that names the model.

    Raises InputError.
    """
    for section, engine in engines.items():
        if not on_gpu and engine.attention not in ("auto", "sdpa"):
            raise InputError(
                f"{section}.attention is {engine.attention}, which needs a GPU, but the ranks run on the CPU; "
                "allowed: auto, sdpa"
            )
    if model.path == BUILTIN_MODEL:
        return []
    folder = str(find_model_folder(model.path))
    lines = []
    for section, engine in engines.items():
        try:
            with naming_engine(section, key=key, path=model.path):
                lines.append(str(check_model(folder, engine, head="value" if section in value_heads else "lm")))
        except ModelError as error:
            if not (on_gpu and isinstance(error, UntriedModelError)):
                raise InputError(f"{key} is {model.path}: {error}") from error
            lines.append(f"{error}; the ranks try it before the first step")
    return list(dict.fromkeys(lines))


def check_supervised(
    model: ModelConfig,
    data: DataConfig,
    supervised: SupervisedConfig,
    *,
    section: str,
    examples: ExampleKind = "demonstrations",
) -> None:
    """Checks the examples and the schedule of supervised steps; `section` is their configuration section.

    Raises InputError.
    """
    if not supervised.trains:
        return
    if not supervised.files and (data.train or model.path != BUILTIN_MODEL):
        what = "demonstrations" if examples == "demonstrations" else "preferences"
        raise InputError(
            f"{section}.files is empty: the built-in {what} belong to the built-in model; give "
            f"{section}.files=<parquet, JSON lines or CSV>, or train the built-in model: model.path={BUILTIN_MODEL}"
        )
    for key in ("files", "val_files"):
        files = getattr(supervised, key, ())
        if files and model.path == BUILTIN_MODEL:
            raise InputError(
                f"{section}.{key} is given, but model.path is {BUILTIN_MODEL}, whose vocabulary knows its own task "
                "only; give model.path=<Hugging Face folder>"
            )
        with naming_key(f"{section}.{key}"):
            if examples == "demonstrations":
                check_demonstrations(files)
            else:
                check_preferences(files, examples)
    if supervised.steps:
        check_optimizer_steps(supervised.optim, supervised.steps, section=section)


def check_engine(engine: EngineConfig, *, section: str, num_updates: int, is_saved: bool = False) -> None:
    """Checks the engine of a policy or critic, and its schedule over the run's `num_updates` optimizer steps.

    Raises InputError.
    """
    if engine.dropout:
        raise InputError(
            f"{section}.dropout is true, but policy and value updates compare outputs of training with outputs "
            "computed without noise; allowed: false"
        )
    check_states(engine, section=section, is_saved=is_saved)
    if engine.optim.total_steps is not None:
        raise InputError(
            f"{section}.optim.total_steps is {engine.optim.total_steps}, but the run sets it ({num_updates}); remove it"
        )
    check_optimizer_steps(engine.optim, num_updates, section=section)


def check_optimizer_steps(optim: OptimConfig, num_steps: int, *, section: str) -> None:
    """Raises InputError for a learning rate schedule that does not suit the number of optimizer steps."""
    with naming_engine(section):
        check_schedule(optim, num_steps)


def check_states(engine: EngineConfig, *, section: str, is_saved: bool) -> None:
    """Raises InputError unless the engine's states have their place and can be saved if needed, or for unknown keys of
    DeepSpeed."""
    with naming_engine(section):
        check_deepspeed(engine)
    if is_saved and engine.zero.offload.optimizer == "nvme":
        raise InputError(
            f"{section}.zero.offload.optimizer is nvme, whose files no checkpoint holds; "
            "use cpu, or trainer.save_freq=0"
        )
    if (folder := engine.zero.offload.nvme_path) is not None and not os.path.isdir(folder):
        raise InputError(
            f"{section}.zero.offload.nvme_path is {folder!r}; allowed: an existing folder, on a local NVMe drive"
        )


def check_sequence_parallel(engine: EngineConfig, *, section: str, num_ranks: int) -> None:
    """Raises InputError unless the number of ranks is a multiple of sequence_parallel."""
    if num_ranks % engine.sequence_parallel:
        fits = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InputError(
            f"{section}.sequence_parallel is {engine.sequence_parallel}, which does not divide trainer.num_ranks "
            f"({num_ranks}); allowed: {fits}"
        )


def check_lengths(rollout: RolloutConfig, data: DataConfig, samplings: Sequence[SamplingConfig]) -> None:
    """Raises InputError if the longest prompt and response exceed the servers' context."""
    try:
        check_request_length(data.max_prompt_length, max(s.max_tokens for s in samplings), rollout.max_model_len)
    except RequestTooLongError as error:
        keys = "data.max_prompt_length, sampling.max_tokens, validation.max_tokens and rollout.max_model_len"
        raise InputError(f"{keys} do not fit: {error}") from error


def check_context(model: ModelConfig, samplings: Mapping[str, SamplingConfig]) -> None:
    """Raises InputError if a response could fill the whole context of the model, so that no prompt fits.

    Args:
        samplings: configuration section -> sampling. Models whose positions are scaled (YaRN) are left to vLLM.
    """
    if model.path == BUILTIN_MODEL:
        return
    settings = read_model_config(find_model_folder(model.path))
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    most = settings.get("max_position_embeddings")
    if not isinstance(most, int) or not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        return
    for section, sampling in samplings.items():
        if sampling.max_tokens >= most:
            raise InputError(
                f"{section}.max_tokens is {sampling.max_tokens}, but the model at {model.path} has {most} positions "
                f"(max_position_embeddings) for prompt and response; allowed: at most {most - 1}"
            )


def check_adapters(actor: EngineConfig, rollout: RolloutConfig, sync: SyncConfig) -> None:
    """Raises InputError if `rollout.max_lora_rank` does not fit the actor's adapters or the weight sync."""
    if rollout.max_lora_rank is None:
        return
    if actor.lora is None:
        raise InputError(
            f"rollout.max_lora_rank is {rollout.max_lora_rank}, but actor.lora.rank is not given: there are no "
            "adapters to serve; give it, or rollout.max_lora_rank=null"
        )
    if actor.lora.rank > rollout.max_lora_rank:
        raise InputError(
            f"actor.lora.rank is {actor.lora.rank}, above rollout.max_lora_rank={rollout.max_lora_rank}; raise that, "
            "or merge adapters into the weights that are pushed: rollout.max_lora_rank=null"
        )
    if sync.quantize != "none":
        raise InputError(f"sync.quantize is {sync.quantize}, but adapters (rollout.max_lora_rank) cannot be quantized")


def check_servers(
    model: ModelConfig, rollout: RolloutConfig, sync: SyncConfig, trainer: TrainerConfig, placement: Placement
) -> None:
    """Checks server settings against model, devices and hosts, and existing servers against the settings.

    Raises:
        InputError: the placement lacks the device or transport, the transport does not reach the servers, vLLM is built
            for another device, a port is in use, the KV cache does not fit into memory, or an existing server cannot be
            used.
        rollout_vllm.RolloutConfigError: vLLM cannot serve the folder.
        weight_sync.SyncConfigError: an existing server cannot receive weights.
    """
    device: Literal["cpu", "cuda"] = "cuda" if placement.on_gpu else "cpu"
    if rollout.device not in ("auto", device):
        raise InputError(f"rollout.device is {rollout.device}, but the ranks run on {device}; leave it at auto")
    if trainer.takes_turns and (rollout.urls or not placement.on_gpu):
        why = "rollout.urls names servers that others may use" if rollout.urls else "the ranks run on the CPU"
        raise InputError(f"trainer.take_turns is {trainer.take_turns}, but {why}; allowed: never, or null")
    check_transport(sync, rollout, placement)
    with prefix_fields("rollout"):
        api_key = rollout.read_api_key()
        if rollout.urls:
            check_running(replace(rollout, control_routes=True))
    if rollout.urls:
        for url in rollout.urls:
            check_server(Endpoint(url, api_key))
        return
    elsewhere = trainer.ray_address is not None
    builtin = model.path == BUILTIN_MODEL
    model_folder = str(Path(trainer.output_dir).absolute() if builtin else find_model_folder(model.path))
    check_folder_name("trainer.output_dir" if builtin else "model.path", model_folder)
    rollout = replace(rollout, device=device)
    with prefix_fields("rollout"), TemporaryDirectory() as folder:
        served = build_tiny_model(folder) if builtin else model_folder
        check_launch(served, rollout, elsewhere=elsewhere, device_key="trainer.device")


def check_folder_name(key: str, folder: str) -> None:
    """Raises InputError for a folder in which vLLM would find no weights."""
    if glob.escape(folder) != folder:
        raise InputError(
            f"{key} is {folder!r}, where vLLM finds no weights: it reads the name as a pattern; allowed: a folder "
            "whose path has none of * ? ["
        )


def check_transport(sync: SyncConfig, rollout: RolloutConfig, placement: Placement) -> None:
    """Raises InputError if `sync.transport` needs a GPU, or does not reach a server from rank 0's host."""
    home = placement.ranks[0].node
    started = {f"rollout server {index}": slot.node == home for index, slot in enumerate(placement.servers)}
    # Where existing servers are can be told on rank 0's host only; elsewhere the first push refuses what cannot work.
    existing = rollout.urls if not home or home == cluster_nodes()[0].node_id else ()
    try:
        plan_transports(sync.transport, started, on_gpu=placement.on_gpu)
        choose_transports(sync, existing, on_gpu=placement.on_gpu)
    except SyncConfigError as error:
        raise InputError(f"sync.{error}") from error


def check_cluster(
    model: ModelConfig, trainer: TrainingConfig, placement: Placement, *, key: str = "model.path"
) -> None:
    """Looks at every node of the cluster that the placement uses; does nothing without a cluster. `key`: the model's.

    Raises:
        InputError: a node does not answer, has other packages or another model folder, or does not share
            `trainer.output_dir`; with `trainer.local_disks`: it does not reach the storage, or rank 0 is not here.
    """
    if trainer.ray_address is None:
        return
    folder = None if model.path == BUILTIN_MODEL else str(find_model_folder(model.path))
    shared = None if trainer.local_disks else Path(trainer.output_dir).absolute()
    nodes = [node for node in cluster_nodes() if node.node_id in placement.nodes]
    reports = read_nodes(nodes, model_folder=folder, shared_folder=shared)
    check_nodes(list(reports.values()), model_folder=folder, shared_folder=shared, key=key)
    if trainer.local_disks:
        if placement.ranks[0].node != cluster_nodes()[0].node_id:
            address = reports[placement.ranks[0].node].address
            raise InputError(
                f"trainer.local_disks is true, but rank 0 would be on Ray node {address}: it writes the model, which "
                "then is not on this host; start the run on a node that has ranks"
            )
        check_storage(trainer, placement.nodes)
