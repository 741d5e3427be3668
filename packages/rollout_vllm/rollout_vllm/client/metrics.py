"""Figures of the rollout: the client's own counters and those vLLM serves at /metrics, in one flat dict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..samples import GroupResult

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")

# our name -> vLLM's names, newest first (counters carry _total in the text format)
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
_MEANS = ("kv_cache_usage",)  # averaged over the servers; the others are summed


def parse_prometheus(text: str) -> dict[str, float]:
    """Metric name -> value, summed over labels. Lines that are no samples are skipped."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.match(line)):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        totals[match[1]] = totals.get(match[1], 0.0) + value
    return totals


def server_metrics(text: str) -> dict[str, float]:
    """What we report of one server, from the text of its /metrics; a metric it does not serve is left out."""
    values = parse_prometheus(text)
    found: dict[str, float] = {}
    for ours, names in _SERVER_METRICS.items():
        for name in names:
            if name in values:
                found[ours] = values[name]
                break
    return found


_RATES = {"generation_tokens_per_s": "generation_tokens", "prompt_tokens_per_s": "prompt_tokens"}


class Rates:
    """Tokens a second of each server, from its counters at two readings."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, Mapping[str, float]]] = {}

    def of(self, server: int, figures: Mapping[str, float], now: float) -> dict[str, float]:
        """Since the reading before; nothing at the first one. A restarted server's counters begin at 0 again."""
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
    """Totals over servers, each server's own under server_<i>/, and the prefix cache's hit rate of both."""
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
    """Since the client was made."""

    num_groups: int = 0
    num_samples: int = 0
    num_failures: int = 0
    num_retries: int = 0
    response_tokens: int = 0
    busy_s: float = 0.0  # wall time during which at least one generate() was running
    failures_by_kind: dict[str, int] = field(default_factory=dict)
    retries_by_server: dict[int, int] = field(default_factory=dict)

    def count_retry(self, server: int) -> None:
        self.num_retries += 1
        self.retries_by_server[server] = self.retries_by_server.get(server, 0) + 1

    def count_group(self, group: GroupResult) -> None:
        self.num_groups += 1
        self.num_samples += len(group.samples)
        self.num_failures += len(group.failures)
        for failure in group.failures:
            self.failures_by_kind[failure.kind] = self.failures_by_kind.get(failure.kind, 0) + 1

    def as_dict(self) -> dict[str, float]:
        out = {
            "client/num_groups": float(self.num_groups),
            "client/num_samples": float(self.num_samples),
            "client/num_failures": float(self.num_failures),
            "client/num_retries": float(self.num_retries),
            "client/response_tokens": float(self.response_tokens),
            "client/tokens_per_s": self.response_tokens / self.busy_s if self.busy_s > 0 else 0.0,
        }
        return out | {f"client/failures/{kind}": float(count) for kind, count in self.failures_by_kind.items()}
