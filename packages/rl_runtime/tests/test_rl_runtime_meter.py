"""Metrics of a rollout from the counters of servers and client."""

import asyncio
from dataclasses import dataclass

from rl_runtime.rollout.meter import RolloutMeter
from rl_runtime.training.metrics import drafts_rarely


@dataclass
class CountingClient:
    readings: list[dict[str, float]]

    async def fetch_metrics(self) -> dict[str, float]:
        return self.readings.pop(0)


async def read_all(readings: list[dict[str, float]]) -> list[dict[str, float]]:
    meter = RolloutMeter(CountingClient(list(readings)))  # type: ignore[arg-type]
    return [await meter.read(2.0) for _ in readings]


def test_metrics_are_the_increase_of_counters_during_a_rollout() -> None:
    base = {"client/num_retries": 1.0, "num_running": 0.0, "num_waiting": 0.0}
    first, second, third = asyncio.run(
        read_all(
            [
                base | {"client/response_tokens": 100.0, "prefix_cache_queries": 10.0, "prefix_cache_hits": 1.0},
                base | {"client/response_tokens": 300.0, "prefix_cache_queries": 30.0, "prefix_cache_hits": 11.0},
                # The server was started again: its counters begin at zero.
                base | {"client/response_tokens": 400.0, "prefix_cache_queries": 4.0, "prefix_cache_hits": 2.0},
            ]
        )
    )
    assert first["rollout/tokens_per_s"] == 50
    assert second["rollout/tokens_per_s"] == 100
    assert second["rollout/prefix_cache_hit_rate"] == 0.5
    assert second["rollout/num_retries"] == 0
    assert "rollout/prefix_cache_hit_rate" not in third
    assert "rollout/draft_acceptance" not in third
    assert "rollout/num_preemptions" not in third


def test_a_step_of_a_sequence_has_its_own_token_and_the_accepted_drafts() -> None:
    base = {"client/response_tokens": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0, "generation_tokens": 0.0}
    readings = [base, base | {"generation_tokens": 100.0, "draft_tokens": 60.0, "accepted_tokens": 20.0}]
    _, drafting, idle = asyncio.run(read_all([*readings, readings[1] | {"generation_tokens": 200.0}]))
    assert drafting["rollout/draft_acceptance"] == 20 / 60
    assert drafting["rollout/tokens_per_step"] == 100 / 80
    assert drafting["rollout/drafts_per_step"] == 60 / 80
    assert not drafts_rarely(drafting)
    assert drafts_rarely(idle)
    assert not drafts_rarely({})
