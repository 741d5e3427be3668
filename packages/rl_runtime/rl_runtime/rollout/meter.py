"""Metrics of a rollout from the counters of servers and client."""

import time

from rollout_vllm import RolloutClient

_COUNTERS = {"rollout/num_preemptions": "num_preemptions", "rollout/num_retries": "client/num_retries"}


class RolloutMeter:
    """Metrics of a rollout from the counters of servers and client: their increase since the last reading.

    The counters of a restarted server start at zero; a decrease counts as zero. Metrics that the servers do not have
    are left out.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._last: dict[str, float] = {}
        self._read_at = time.perf_counter()

    async def read(self, gen_s: float | None = None) -> dict[str, float]:
        """The metrics of the rollout that has just ended and took `gen_s` seconds; default: since the last reading."""
        last, now = self._last, await self._client.fetch_metrics()
        self._last, before, self._read_at = now, self._read_at, time.perf_counter()
        gen_s = self._read_at - before if gen_s is None else gen_s

        def increase(name: str) -> float:
            return max(0.0, now[name] - last.get(name, 0.0))

        metrics = {"rollout/tokens_per_s": increase("client/response_tokens") / gen_s}
        metrics |= {ours: increase(name) for ours, name in _COUNTERS.items() if name in now}
        metrics |= {f"rollout/{name}": now[name] for name in ("num_running", "num_waiting") if name in now}
        if queries := increase("prefix_cache_queries") if "prefix_cache_queries" in now else 0.0:
            metrics["rollout/prefix_cache_hit_rate"] = min(1.0, increase("prefix_cache_hits") / queries)
        if "draft_tokens" in now:  # rollout.speculative
            tokens, drafted, accepted = map(increase, ("generation_tokens", "draft_tokens", "accepted_tokens"))
            metrics["rollout/draft_acceptance"] = accepted / max(1.0, drafted)
            metrics["rollout/tokens_per_step"] = tokens / max(1.0, tokens - accepted)
            metrics["rollout/drafts_per_step"] = drafted / max(1.0, tokens - accepted)
        return metrics
