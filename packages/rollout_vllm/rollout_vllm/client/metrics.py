"""Rollout metrics: the client's counters and the servers' /metrics, as one flat dict."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ..samples import Group

# our name -> vLLM's name (in the text format, counters end in _total)
_SERVER_METRICS = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


def server_metrics(text: str) -> dict[str, float]:
    """The metrics of one server, from the text of its /metrics, summed over labels. Missing metrics are left out.

    Raises ValueError if one of their lines is not in Prometheus format.
    """
    totals: dict[str, float] = {}
    # Most of the text is histograms that are not used; parsing them would block the event loop for tens of ms.
    wanted = "".join(
        line for line in text.splitlines(keepends=True) if line.startswith(tuple(_SERVER_METRICS.values()))
    )
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return {ours: totals[name] for ours, name in _SERVER_METRICS.items() if name in totals}


@dataclass
class ClientCounters:
    """Totals since the client was created."""

    num_groups: int = 0
    num_samples: int = 0
    num_failures: int = 0
    num_retries: int = 0
    response_tokens: int = 0
    busy_s: float = 0.0  # wall time during which at least one generate() was running

    def count_group(self, group: Group) -> None:
        self.num_groups += 1
        self.num_samples += len(group.samples)
        self.num_failures += len(group.failures)

    def as_dict(self) -> dict[str, float]:
        names = ("num_groups", "num_samples", "num_failures", "num_retries", "response_tokens")
        return {f"client/{name}": float(getattr(self, name)) for name in names}
