"""Everything this package raises.

    WeightSyncError
    ├── SyncConfigError (ValueError)   a setting is wrong, or cannot work here
    ├── ManifestError (ValueError)     a manifest or plan breaks its own rules
    ├── SourceError                    the trainer's side could not produce a tensor
    ├── ServerError                    a server answered a control call with an error, or not at all
    ├── ReceiverError                  a worker inside a server refused or lost something; carries the tensor's name
    └── ChannelError                   the connection between pusher and worker broke

All of them pickle, so they cross process borders.
"""


class WeightSyncError(Exception):
    """A sync failed. After a failed push the servers stay paused; the next successful push resumes them."""


class SyncConfigError(WeightSyncError, ValueError):
    """A setting is wrong, or the chosen transport cannot work between these processes."""


class ManifestError(WeightSyncError, ValueError):
    """A manifest or a bucket plan breaks one of its rules."""


class SourceError(WeightSyncError):
    """The trainer's side could not produce a tensor."""


class ServerError(WeightSyncError):
    """A control call to a server failed.

    Attributes: ``url`` of the server, ``step`` (the call), ``status`` (HTTP status, 0 when there was no answer),
    ``detail`` (what the server said).
    """

    def __init__(self, url: str, step: str, status: int, detail: str) -> None:
        super().__init__(url, step, status, detail)
        self.url, self.step, self.status, self.detail = url, step, status, detail

    def __str__(self) -> str:
        answer = f"HTTP {self.status}" if self.status else "no answer"
        return f"{self.step} at {self.url}: {answer}: {self.detail}"


class ReceiverError(WeightSyncError):
    """A worker inside a server refused or lost something.

    Attributes: ``kind`` (one of ``plan``, ``checksum``, ``load``, ``count``, ``verify``, ``owner``, ``protocol``,
    ``internal``), ``tensor`` (the parameter concerned, or an empty string), ``detail``, ``where`` (server and worker).
    """

    def __init__(self, kind: str, tensor: str, detail: str, where: str = "") -> None:
        super().__init__(kind, tensor, detail, where)
        self.kind, self.tensor, self.detail, self.where = kind, tensor, detail, where

    def __str__(self) -> str:
        about = f" {self.tensor!r}" if self.tensor else ""
        place = f" ({self.where})" if self.where else ""
        return f"{self.kind}{about}: {self.detail}{place}"

    @property
    def retryable(self) -> bool:
        """Whether sending everything once more can help. A refused plan stays refused."""
        return self.kind not in ("plan", "owner", "protocol")


class ChannelError(WeightSyncError):
    """The connection between the pusher and a worker broke or timed out."""
