"""Figures of the rollout: the client's own counters and those vLLM serves at /metrics, in one flat dict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


def combine(per_server: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Totals over servers, each server's own under server_<i>/, and the prefix cache's hit rate."""
    out: dict[str, float] = {}
    for name in _SERVER_METRICS:
        values = [server[name] for server in per_server if name in server]
        if values:
            out[name] = sum(values) / (len(values) if name in _MEANS else 1)
    if out.get("prefix_cache_queries"):
        out["prefix_cache_hit_rate"] = out.get("prefix_cache_hits", 0.0) / out["prefix_cache_queries"]
    if len(per_server) > 1:
        for index, server in enumerate(per_server):
            out |= {f"server_{index}/{name}": value for name, value in server.items()}
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
