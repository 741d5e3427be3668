"""The package, its errors and its configuration."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_vllm import errors
from rollout_vllm.config import RolloutConfig, SamplingConfig
from rollout_vllm.samples import Endpoint, request_seed

QUICK = settings(deadline=None, derandomize=True)


def test_import_is_cheap_and_exports_exist() -> None:
    code = (
        "import sys, rollout_vllm; from rollout_vllm import RolloutConfig, SamplingConfig, ServerGroup;"
        "bad = [m for m in ('torch', 'vllm', 'transformers', 'aiohttp', 'numpy', 'ray') if m in sys.modules];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "error",
    [
        errors.ServerStartError("out of memory", 3, Path("a/b.log")),
        errors.ServerDiedError("killed", 0, None),
        errors.PortInUseError("port=1"),
    ],
)
def test_errors_pickle(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_config_errors_are_value_errors() -> None:
    for name in ("PortInUseError", "KVCacheTooSmallError", "RequestTooLongError"):
        assert issubclass(getattr(errors, name), ValueError)
        assert issubclass(getattr(errors, name), errors.RolloutError)


def test_repr_hides_the_api_key() -> None:
    assert "hush" not in repr(Endpoint("http://a:1", "hush"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_servers", 0),
        ("max_num_seqs", -1),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_gib", 0.0),
        ("max_model_len", 0),
        ("port", 70000),
        ("urls", ("localhost:8000",)),
        ("max_retries", -1),
        ("host", "0.0.0.0"),
        ("extra_args", ("--seed", "1", "--port=80")),
        ("request_timeout_s", 0.0),
    ],
)
def test_rollout_config_rejects(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        RolloutConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", 0),
        ("max_tokens", 0),
        ("min_tokens", 999),
        ("min_p", 2.0),
    ],
)
def test_sampling_config_rejects(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingConfig(**{field: value})  # type: ignore[arg-type]


def test_greedy_groups_are_rejected() -> None:
    with pytest.raises(ValueError, match="greedy"):
        SamplingConfig(temperature=0.0, n=2)
    assert SamplingConfig(temperature=0.0, n=1).n == 1


@QUICK
@given(st.integers(), st.integers(0, 10**6), st.text())
def test_request_seed_is_reproducible_and_fits_an_int64(run_seed: int, step: int, prompt_id: str) -> None:
    seed = request_seed(run_seed, step, prompt_id)
    assert 0 <= seed < 2**62
    assert seed == request_seed(run_seed, step, prompt_id)
    assert seed != request_seed(run_seed, step + 1, prompt_id)
