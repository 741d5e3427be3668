"""The package, its errors and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from rollout_vllm import RolloutConfig, RolloutConfigError, SamplingConfig, ServerDiedError, ServerStartError
from rollout_vllm.samples import request_seed

QUICK = settings(deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", [ServerStartError, ServerDiedError])
@pytest.mark.parametrize("log", [Path("a/b.log"), None])
def test_errors_about_servers_keep_their_fields_when_pickled(kind: type[ServerStartError], log: Path | None) -> None:
    with raises(kind, reason="out of memory", server_index=3, log_path=log):
        raise kind("out of memory", 3, log)


REFUSED: dict[Any, list[dict[str, Any]]] = {
    RolloutConfig: [
        *({"num_servers": 0}, {"max_num_seqs": -1}, {"gpu_memory_utilization": 1.5}, {"kv_cache_gib": 0.0}),
        *({"max_model_len": 0}, {"port": 70000}, {"max_retries": -1}, {"host": "0.0.0.0"}, {"max_lora_rank": 7}),
        *({"request_timeout_s": 0.0}, {"stop_grace_s": -1.0}),
    ],
    SamplingConfig: [
        *({"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_tokens": 0}, {"min_tokens": 999}),
        *({"min_p": 2.0}, {"n": 2, "temperature": 0.0}, {"stop": ("a", "")}),
    ],
}


@pytest.mark.parametrize(
    ("kind", "settings_"), [(kind, each) for kind, all_of_it in REFUSED.items() for each in all_of_it], ids=str
)
def test_bad_settings_are_refused_by_field_and_value(kind: Any, settings_: dict[str, Any]) -> None:
    field, value = next(iter(settings_.items()))
    with raises(RolloutConfigError, field=field, value=value):
        kind(**settings_)


def test_rollout_config_names_the_part_of_a_list_that_it_rejects() -> None:
    with raises(RolloutConfigError, field="urls", value="localhost:8000"):
        RolloutConfig(urls=("http://a:1", "localhost:8000"))
    with raises(RolloutConfigError, field="extra_args", value="--port=80"):
        RolloutConfig(extra_args=("--seed", "1", "--port=80"))


@QUICK
@given(st.integers(), st.integers(0, 10**6), st.text())
def test_request_seed_is_reproducible_and_fits_an_int64(run_seed: int, step: int, prompt_id: str) -> None:
    seed = request_seed(run_seed, step, prompt_id)
    assert 0 <= seed < 2**62
    assert seed == request_seed(run_seed, step, prompt_id)
    assert seed != request_seed(run_seed, step + 1, prompt_id)
