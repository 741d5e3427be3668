"""Exceptions of this package.

WeightSyncError
├── SyncConfigError (ValueError)      a setting is wrong, or the transport cannot work here
├── WeightManifestError (ValueError)  a manifest or a bucket plan is inconsistent
├── SourceError                       a source on the trainer's side cannot produce a tensor
├── ServerError                       a control call to a server failed or got no answer
├── ReceiverError                     a worker inside a server rejected a tensor; names the tensor
└── ChannelError                      the connection between pusher and worker broke

All of them are PlinthErrors: errors about a setting carry `field`, `value`, `allowed` and `remedy`, and all pickle with
their attributes.
"""

from plinth_base.errors import PlinthError


class WeightSyncError(PlinthError):
    """A sync failed. After a failed push the servers stay paused; the next successful push resumes them."""


class SyncConfigError(WeightSyncError, ValueError):
    """A setting is wrong, or the chosen transport cannot work between these processes."""


class WeightManifestError(WeightSyncError, ValueError):
    """A manifest or a bucket plan is inconsistent."""


class SourceError(WeightSyncError):
    """A source on the trainer's side cannot produce a tensor."""


class ServerError(WeightSyncError):
    """A control call to a server failed.

    Attributes: ``url`` of the server, ``step`` (the call), ``status`` (HTTP status, 0 when there was no answer),
    ``detail`` (the server's message).
    """

    def __init__(self, url: str, step: str, status: int, detail: str) -> None:
        super().__init__(detail)
        self.url, self.step, self.status, self.detail = url, step, status, detail

    def __str__(self) -> str:
        answer = f"HTTP {self.status}" if self.status else "no answer"
        return f"{self.step} at {self.url}: {answer}: {self.detail}"


class ReceiverError(WeightSyncError):
    """A worker inside a server rejected the plan or a bucket, or failed to load it.

    Attributes: ``kind`` (one of ``plan``, ``checksum``, ``load``, ``count``, ``verify``, ``owner``, ``protocol``,
    ``internal``), ``tensor`` (name of the parameter, or an empty string), ``detail``, ``where`` (server and worker).
    """

    def __init__(self, kind: str, tensor: str, detail: str, where: str = "") -> None:
        super().__init__(detail)
        self.kind, self.tensor, self.detail, self.where = kind, tensor, detail, where

    def __str__(self) -> str:
        tensor = f" {self.tensor!r}" if self.tensor else ""
        where = f" ({self.where})" if self.where else ""
        return f"{self.kind}{tensor}: {self.detail}{where}"

    @property
    def retryable(self) -> bool:
        """True if a resend can succeed. A worker that rejects a plan rejects it again."""
        return self.kind not in ("plan", "owner", "protocol")


class ChannelError(WeightSyncError):
    """The connection between the pusher and a worker broke or timed out."""
