"""The rollout servers of a run: checks of their settings against the model, the devices and the hosts."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_data import DataConfig, build_tiny_model
from rollout_vllm import Endpoint, RolloutConfig, SamplingConfig, check_launch, check_running
from rollout_vllm.config import check_request_length
from weight_sync import SyncConfig, check_server, choose_transports, plan_transports

from ..config import BUILTIN_MODEL, ModelConfig, TrainerConfig
from ..errors import InputError
from .cluster import cluster_nodes
from .placement import Placement


def check_lengths(rollout: RolloutConfig, data: DataConfig, samplings: Sequence[SamplingConfig]) -> None:
    """Raises rollout_vllm.RequestTooLongError if the longest prompt and response exceed the servers' context."""
    with prefix_fields("rollout"):
        check_request_length(data.max_prompt_length, max(s.response_tokens for s in samplings), rollout.max_model_len)


def check_servers(
    model: ModelConfig, rollout: RolloutConfig, sync: SyncConfig, trainer: TrainerConfig, placement: Placement
) -> None:
    """Checks server settings against model, devices and hosts, and existing servers against the settings.

    Raises:
        InputError: the placement lacks the device, vLLM is built for another device, a port is in use, the KV cache
            does not fit into memory, or an existing server cannot be used.
        rollout_vllm.RolloutConfigError: vLLM cannot serve the folder.
        weight_sync.SyncConfigError: the transport does not reach the servers, or one cannot receive weights.
    """
    device = "cuda" if placement.on_gpu else "cpu"
    if rollout.device not in ("auto", device):
        raise InputError(f"the ranks run on {device}", field="rollout.device", value=rollout.device, allowed="auto")
    if trainer.takes_turns and not placement.on_gpu:
        problem, field = "the ranks run on the CPU", "trainer.take_turns"
        raise InputError(problem, field=field, value=trainer.take_turns, allowed="never, or null")
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
    with prefix_fields("rollout"), TemporaryDirectory() as folder:
        served = build_tiny_model(folder) if builtin else model_folder
        check_launch(served, rollout, elsewhere=elsewhere, device_key="trainer.device")


def check_folder_name(key: str, folder: str) -> None:
    """Raises InputError for a folder in which vLLM would find no weights."""
    if glob.escape(folder) != folder:
        problem = "vLLM reads the name as a pattern, and finds no weights"
        raise InputError(problem, field=key, value=folder, allowed="a folder whose path has none of * ? [")


def check_transport(sync: SyncConfig, rollout: RolloutConfig, placement: Placement) -> None:
    """Raises SyncConfigError if `sync.transport` needs a GPU, or does not reach a server from rank 0's host."""
    home = placement.ranks[0].node
    started = {f"rollout server {index}": slot.node == home for index, slot in enumerate(placement.servers)}
    # Where existing servers are can be told on rank 0's host only; elsewhere the first push refuses what cannot work.
    existing = rollout.urls if not home or home == cluster_nodes()[0].node_id else ()
    with prefix_fields("sync"):
        plan_transports(sync.transport, started, on_gpu=placement.on_gpu)
        choose_transports(sync, existing, on_gpu=placement.on_gpu)
