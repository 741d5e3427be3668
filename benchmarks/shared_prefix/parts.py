"""Milliseconds of the GPU in each part of a call, from torch's profiler.

A kernel belongs to the operator of the host that launched it, where that one has a part of its own, else to its name.
"""

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

OPERATORS = (("head", "LinearLogProb"), ("paths", "ds_engine::flash4"))
"""Part, and what the operator's name contains."""
KERNELS = (
    ("attention", ("flash_attn", "flashattention", "flash_fwd", "flash_bwd")),
    ("fills", ("fillfunctor", "memset")),
    ("AdamW", ("adam",)),
    ("products", ("gemm", "nvjet", "cutlass", "splitk", "gemv")),
    ("fused", ("triton_",)),
    ("copies", ("memcpy", "copy")),
)
"""Part, and what a kernel's name contains; the first that fits. `paths` is what attention launches but its kernels and
the zeros that these need."""
PARTS = ("attention", "paths", "head", "products", "fused", "copies", "fills", "AdamW", "other", "idle", "wall")


def part_of(kernel: str, operators: Sequence[str]) -> str:
    """The part of a kernel that was launched inside of these operators."""
    by_name = next((part for part, names in KERNELS if any(name in kernel.lower() for name in names)), "other")
    by_operator = next((part for part, name in OPERATORS if any(name in operator for operator in operators)), None)
    if by_operator == "paths" and by_name in ("attention", "fills"):
        return "attention"
    return by_operator or by_name


def split(events: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Milliseconds of each part, and of each part's kernels, from the events of a chrome trace."""
    spans = defaultdict(list)  # of a thread: start, end and name of the operators that have a part
    launches, kernels = dict[int, tuple[Any, float]](), list[dict[str, Any]]()
    for event in events:
        category = event.get("cat", "")
        if category == "cpu_op" and any(name in event["name"] for _, name in OPERATORS):
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[event["args"].get("correlation", -1)] = (event["tid"], event["ts"])
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    for each in spans.values():
        each.sort()
    by_kernel: dict[tuple[str, str], float] = defaultdict(float)
    busy = end = 0.0
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        tid, at = launches.get(kernel["args"].get("correlation", -2), (None, 0.0))
        near = spans[tid][: bisect_right(spans[tid], (at, float("inf"), ""))][-4:]
        inside = [name for start, stop, name in near if start <= at <= stop]
        by_kernel[part_of(kernel["name"], inside), kernel["name"]] += kernel["dur"] / 1000
        busy += max(0.0, kernel["ts"] + kernel["dur"] - max(end, kernel["ts"]))
        end = max(end, kernel["ts"] + kernel["dur"])
    parts = dict.fromkeys(PARTS, 0.0)
    for (part, _), milliseconds in by_kernel.items():
        parts[part] += milliseconds
    if kernels:
        parts["wall"] = (end - min(event["ts"] for event in kernels)) / 1000
        parts["idle"] = parts["wall"] - busy / 1000
    return parts, dict(by_kernel)


def profiled(call: Callable[[], object]) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Milliseconds of each part of the call, from its first kernel to the end of its last, and its longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        parts, by_kernel = split(json.loads(path.read_text())["traceEvents"])
    longest = sorted(by_kernel.items(), key=lambda item: -item[1])[:40]
    return parts, [(part, name[:160], milliseconds) for (part, name), milliseconds in longest]
