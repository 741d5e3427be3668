"""What servers and client did during a rollout: the difference of two readings of their counters."""

from rollout_vllm import RolloutClient

_COUNTERS = {
    "rollout/num_preemptions": "num_preemptions",
    "rollout/num_retries": "client/num_retries",
}


class RolloutMeter:
    """Reads the counters after every rollout; what they gained since the last reading belongs to it.

    A server that was started again begins at zero: what it lost is not subtracted from the others' gain. Metrics that
    the servers do not serve are left out.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._last: dict[str, float] = {}

    async def read(self, gen_s: float) -> dict[str, float]:
        """The metrics of the rollout that took `gen_s` seconds and has just ended."""
        last, now = self._last, await self._client.fetch_metrics()
        self._last = now

        def gained(name: str) -> float:
            return max(0.0, now[name] - last.get(name, 0.0))

        metrics = {"rollout/tokens_per_s": gained("client/response_tokens") / gen_s}
        metrics |= {ours: gained(name) for ours, name in _COUNTERS.items() if name in now}
        metrics |= {f"rollout/{name}": now[name] for name in ("num_running", "num_waiting") if name in now}
        if queries := gained("prefix_cache_queries") if "prefix_cache_queries" in now else 0.0:
            metrics["rollout/prefix_cache_hit_rate"] = min(1.0, gained("prefix_cache_hits") / queries)
        return metrics
