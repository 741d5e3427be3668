"""Retry policy: which failed attempts are retried, and after which delay. Pure functions."""

from dataclasses import dataclass

from ..samples import FailureKind


@dataclass(frozen=True)
class RetryDecision:
    """retry: another attempt is useful. blame_server: the server caused the failure, so use another one."""

    kind: FailureKind
    retry: bool
    blame_server: bool


CONNECTION_LOST = RetryDecision("connection", retry=True, blame_server=True)
TIMED_OUT = RetryDecision("timeout", retry=True, blame_server=True)
MALFORMED = RetryDecision("malformed", retry=True, blame_server=True)
ABORTED = RetryDecision("aborted", retry=True, blame_server=False)

_FIRST_S, _LONGEST_S = 0.2, 10.0
"""Longest delays before the first retry and before any."""
_TOO_LONG_MESSAGES = ("maximum context length", "max_model_len", "maximum model length", "too long", "longer than")


def classify_status(status: int, message: str) -> RetryDecision:
    """Classify an HTTP error: 408, 425, 429 and 5xx are transient, any other 4xx is an error in the request."""
    if status == 429:
        return RetryDecision("server", retry=True, blame_server=False)
    if status in (408, 425) or status >= 500:
        return RetryDecision("server", retry=True, blame_server=True)
    lowered = message.lower()
    if status in (400, 413, 422) and any(text in lowered for text in _TOO_LONG_MESSAGES):
        return RetryDecision("too_long", retry=False, blame_server=False)
    return RetryDecision("refused", retry=False, blame_server=False)


def backoff_s(attempt: int, *, jitter: float, retry_after_s: float | None = None) -> float:
    """Delay after attempt number `attempt` (1, 2, ...): exponential backoff with full jitter.

    jitter: a uniform random number in [0, 1). A server's Retry-After is a lower bound, within the longest delay.
    """
    window = min(_LONGEST_S, _FIRST_S * 2.0 ** min(attempt - 1, 60))
    floor = min(max(retry_after_s or 0.0, 0.0), _LONGEST_S)
    return max(window * jitter, floor)
