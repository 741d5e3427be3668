"""The rollout servers of a run: checks of their settings against the model, the devices and the hosts."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ds_engine import EngineConfig
from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_data import DataConfig, build_tiny_model
from rollout_vllm import (
    Endpoint,
    RequestTooLongError,
    RolloutConfig,
    SamplingConfig,
    check_launch,
    check_running,
)
from rollout_vllm.config import check_request_length
from weight_sync import SyncConfig, check_server, choose_transports, plan_transports

from ..config import BUILTIN_MODEL, ModelConfig, TrainerConfig
from ..errors import InputError
from .cluster import cluster_nodes
from .placement import Placement


def check_lengths(rollout: RolloutConfig, data: DataConfig, samplings: Sequence[SamplingConfig]) -> None:
    """Raises InputError if the longest prompt and response exceed the servers' context."""
    try:
        check_request_length(data.max_prompt_length, max(s.max_tokens for s in samplings), rollout.max_model_len)
    except RequestTooLongError as error:
        keys = "data.max_prompt_length, sampling.max_tokens, validation.max_tokens and rollout.max_model_len"
        raise InputError(f"{keys} do not fit: {error}") from error


def check_servers(
    model: ModelConfig, rollout: RolloutConfig, sync: SyncConfig, trainer: TrainerConfig, placement: Placement
) -> None:
    """Checks server settings against model, devices and hosts, and existing servers against the settings.

    Raises:
        InputError: the placement lacks the device, vLLM is built
            for another device, a port is in use, the KV cache does not fit into memory, or an existing server cannot be
            used.
        rollout_vllm.RolloutConfigError: vLLM cannot serve the folder.
        weight_sync.SyncConfigError: the transport does not reach the servers, or one cannot receive weights.
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
    """Raises SyncConfigError if `sync.transport` needs a GPU, or does not reach a server from rank 0's host."""
    home = placement.ranks[0].node
    started = {f"rollout server {index}": slot.node == home for index, slot in enumerate(placement.servers)}
    # Where existing servers are can be told on rank 0's host only; elsewhere the first push refuses what cannot work.
    existing = rollout.urls if not home or home == cluster_nodes()[0].node_id else ()
    with prefix_fields("sync"):
        plan_transports(sync.transport, started, on_gpu=placement.on_gpu)
        choose_transports(sync, existing, on_gpu=placement.on_gpu)


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
