"""Rollout metrics: the client's counters and the servers' /metrics, as one flat dict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from ..samples import Group

# our name -> vLLM's names, newest first (in the text format, counters end in _total)
_SERVER_METRICS: Mapping[str, Sequence[str]] = {
    "num_running": ("vllm:num_requests_running",),
    "num_waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "num_preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total",),
}
_VLLM_NAMES = tuple(name for names in _SERVER_METRICS.values() for name in names)
_MEANS = ("kv_cache_usage",)  # averaged over the servers; the others are summed
_RATES = {"generation_tokens_per_s": "generation_tokens", "prompt_tokens_per_s": "prompt_tokens"}


def server_metrics(text: str) -> dict[str, float]:
    """The metrics of one server, from the text of its /metrics, summed over labels. Missing metrics are left out.

    Raises ValueError if one of their lines is not in Prometheus format.
    """
    totals: dict[str, float] = {}
    # Most of the text is histograms that are not used; parsing them would block the event loop for tens of ms.
    wanted = "".join(line for line in text.splitlines(keepends=True) if line.startswith(_VLLM_NAMES))
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    newest = {ours: [name for name in names if name in totals] for ours, names in _SERVER_METRICS.items()}
    return {ours: totals[present[0]] for ours, present in newest.items() if present}


class Rates:
    """Tokens per second of each server, from two readings of its counters."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, Mapping[str, float]]] = {}

    def update(self, server: int, figures: Mapping[str, float], now: float) -> dict[str, float]:
        """Rates since the previous reading; empty at the first one. A restarted server's counters start at 0 again."""
        before = self._last.get(server)
        self._last[server] = (now, dict(figures))
        if before is None or now <= before[0]:
            return {}
        rates = {}
        for rate, counter in _RATES.items():
            if counter in figures and counter in before[1]:
                new = figures[counter] - before[1][counter]
                rates[rate] = (new if new >= 0 else figures[counter]) / (now - before[0])
        return rates


def _with_hit_rate(figures: Mapping[str, float]) -> dict[str, float]:
    queries = figures.get("prefix_cache_queries")
    rate = {"prefix_cache_hit_rate": figures.get("prefix_cache_hits", 0.0) / queries} if queries else {}
    return dict(figures) | rate


def combine(per_server: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Totals over the servers and each server's own metrics under server_<i>/, with prefix-cache hit rates."""
    totals: dict[str, float] = {}
    for name in dict.fromkeys(name for server in per_server for name in server):
        values = [server[name] for server in per_server if name in server]
        totals[name] = sum(values) / (len(values) if name in _MEANS else 1)
    out = _with_hit_rate(totals)
    for index, server in enumerate(per_server):
        out |= {f"server_{index}/{name}": value for name, value in _with_hit_rate(server).items()}
    return out


@dataclass
class ClientCounters:
    """Totals since the client was created."""

    num_groups: int = 0
    num_samples: int = 0
    num_failures: int = 0
    num_retries: int = 0
    response_tokens: int = 0
    busy_s: float = 0.0  # wall time during which at least one generate() was running
    failures_by_kind: Counter[str] = field(default_factory=Counter)
    retries_by_server: Counter[int] = field(default_factory=Counter)

    def count_retry(self, server: int) -> None:
        self.num_retries += 1
        self.retries_by_server[server] += 1

    def count_group(self, group: Group) -> None:
        self.num_groups += 1
        self.num_samples += len(group.samples)
        self.num_failures += len(group.failures)
        self.failures_by_kind.update(failure.kind for failure in group.failures)

    def as_dict(self) -> dict[str, float]:
        names = ("num_groups", "num_samples", "num_failures", "num_retries", "response_tokens")
        out = {f"client/{name}": float(getattr(self, name)) for name in names}
        out["client/tokens_per_s"] = self.response_tokens / self.busy_s if self.busy_s > 0 else 0.0
        return out | {f"client/failures/{kind}": float(count) for kind, count in self.failures_by_kind.items()}
