"""Classifies errors of torch.distributed by their messages, since it raises one type for many causes."""

from typing import Literal

_LOST_PEER = (
    "gloo/transport/",
    "Connection closed by peer",
    "Connection reset by peer",
    "DistBackendError",
    "NCCL error",
)
_TIMEOUT = ("timeout", "timed out")


def classify_torch_error(error: BaseException) -> Literal["lost peer", "timeout"] | None:
    """Cause of an error of torch.distributed: a connection to another rank broke, or a wait ended; None: another one.

    The error may also be one that quotes torch's, such as Ray's of a remote task.
    """
    text = str(error)
    if any(part in text for part in _LOST_PEER):
        return "lost peer"
    return "timeout" if any(part in text.lower() for part in _TIMEOUT) else None
