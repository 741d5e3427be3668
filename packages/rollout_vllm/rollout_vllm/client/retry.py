"""What to do after a failed attempt: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

from ..samples import FailureKind


@dataclass(frozen=True)
class Verdict:
    """retry: worth another attempt. blame_server: the server, not the request, is at fault, so try another one."""

    kind: FailureKind
    retry: bool
    blame_server: bool


CONNECTION_LOST = Verdict("connection", retry=True, blame_server=True)
TIMED_OUT = Verdict("timeout", retry=True, blame_server=True)
MALFORMED = Verdict("malformed", retry=True, blame_server=True)
ABORTED = Verdict("aborted", retry=True, blame_server=False)

_TOO_LONG_SIGNS = ("maximum context length", "max_model_len", "maximum model length", "too long", "longer than")


def judge_status(status: int, message: str) -> Verdict:
    """Sort an HTTP error. 408, 425, 429 and 5xx pass with time; any other 4xx is the request's own fault."""
    if status == 429:
        return Verdict("server", retry=True, blame_server=False)
    if status in (408, 425) or status >= 500:
        return Verdict("server", retry=True, blame_server=True)
    lowered = message.lower()
    if status in (400, 413, 422) and any(sign in lowered for sign in _TOO_LONG_SIGNS):
        return Verdict("too_long", retry=False, blame_server=False)
    return Verdict("refused", retry=False, blame_server=False)


def backoff_s(attempt: int, *, base_s: float, max_s: float, jitter: float, retry_after_s: float | None = None) -> float:
    """Delay before the attempt after `attempt` (1, 2, ...): full jitter over an exponentially growing window.

    jitter: a uniform random number in [0, 1). A server's Retry-After is a lower bound, itself capped at max_s.
    """
    window = min(max_s, base_s * 2.0 ** min(attempt - 1, 60))
    floor = min(max(retry_after_s or 0.0, 0.0), max_s)
    return max(window * jitter, floor)
