"""Checks of a configuration before anything starts, and the server that it describes."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from plinth_base import Endpoint

from ..config import RolloutConfig
from ..errors import RolloutConfigError
from .command import SERVED_MODEL_NAME, has_multicast, is_recurrent, server_arguments, server_environment
from .device import Device, check_build, check_device_features, detect_device
from .memory import available_memory_bytes, check_kv_cache, check_memory
from .model_folder import check_context, check_folder, check_match
from .patch import untested_vllm
from .process import ServerProcess, reserve_port


def check_launch(
    model_path: str | Path, config: RolloutConfig, *, elsewhere: bool = False, device_key: str = "device"
) -> Device:
    """Check the configuration without starting a process; takes milliseconds. Returns the device of the servers.

    elsewhere: the servers will run on other hosts, so this host's vLLM, memory and ports are not checked.
    device_key: the caller's setting that decides `config.device`, named by the error about vLLM's build.

    Raises RolloutConfigError or a subclass: vLLM is not installed or built for another device, the model folder is not
    usable, max_model_len exceeds the model's context, the KV cache is too small for one sequence or too large for the
    machine, a configured port is in use, vLLM's cache folder cannot be written.
    """
    if config.urls:
        return "cpu"
    device = detect_device()[0] if config.device == "auto" else config.device
    check_device_features(config, device)
    model_config = check_folder(str(model_path), load_format=config.load_format)
    check_context(config, model_config)
    check_kv_cache(config, model_config, device)
    check_match(config, model_config or {})
    if config.speculates and is_recurrent(str(model_path)):
        problem = "the states of its model's recurrent layers cannot go back behind a draft"
        raise RolloutConfigError(problem, field="speculative", value=config.speculative, allowed="none")
    if elsewhere:
        return device
    check_build(device, device_key=device_key)
    _check_tested(config, device)
    _check_cache_folder()
    check_memory(config, device, _free_memory())
    for index in range(config.server_count):
        reserve_port(config.host, None if config.port is None else config.port + index).close()
    return device


def _check_tested(config: RolloutConfig, device: Device) -> None:
    """Refuse what stock vLLM does not do where ours cannot replace its parts."""
    untested = untested_vllm()
    for name, is_ours in (
        ("match_trainer", config.match_trainer),
        ("routes", config.routes and device == "cpu"),
        ("speculative", config.speculates),
    ):
        if is_ours and untested:
            value = getattr(config, name)
            raise RolloutConfigError(f"it replaces parts of vLLM, and {untested}", field=name, value=value)


def _free_memory() -> int | None:
    try:
        return available_memory_bytes(Path("/proc/meminfo").read_text())
    except OSError:
        return None


def build_server(
    index: int,
    model_path: str | Path,
    config: RolloutConfig,
    *,
    device: Device,
    api_key: str,
    log_dir: Path,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    gpu_ids: Sequence[int | str] | None = None,
) -> ServerProcess:
    """Server `index` of a group on this host, with a reserved port, not started yet. Raises RolloutConfigError."""
    held = reserve_port(config.host, None if config.port is None else config.port + index)
    port = held.getsockname()[1]
    num_cores = len(os.sched_getaffinity(0))
    variables = server_environment(
        os.environ, config, device=device, api_key=api_key, num_cores=num_cores, gpu_ids=gpu_ids, extra=env
    )
    multicast = has_multicast(variables)
    arguments = server_arguments(
        config, str(model_path), port=port, device=device, multicast=multicast, extra_args=extra_args
    )
    host = f"[{config.host}]" if ":" in config.host else config.host
    endpoint = Endpoint(f"http://{host}:{port}", api_key, SERVED_MODEL_NAME)
    log_path = Path(log_dir) / f"server_{index}.log"
    return ServerProcess(index, endpoint, arguments, variables, log_path, held, stop_grace_s=config.stop_grace_s)


def _check_cache_folder() -> None:
    """Check that vLLM can write its cache (compiled layers, facts about models). Raises RolloutConfigError."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or os.path.join(cache, "vllm"))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RolloutConfigError(
            f"vLLM's cache folder cannot be written: {error.strerror or error}",
            value=folder,
            remedy="set HOME, XDG_CACHE_HOME or VLLM_CACHE_ROOT to a folder that can",
        ) from None
