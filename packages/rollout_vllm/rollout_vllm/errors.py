"""The exceptions of this package, as a tree.

RolloutError
├── RolloutConfigError (also ValueError)   the user's mistake: found before any process starts
│   ├── ModelFolderError                   not a usable Hugging Face folder
│   ├── PortInUseError                     a fixed port that something else listens on
│   ├── KVCacheTooSmallError               max_model_len does not fit into the KV cache that was asked for
│   └── RequestTooLongError                prompt + max_tokens exceed max_model_len
├── ServerStartError                       a server did not come up; carries the reason and the log's path
├── ServerDiedError                        a server that was up is gone
├── ControlError                           a control route (sleep, wake, LoRA) answered with an error
└── NoServerError                          every server is down

Failures of single samples are data (`Failure`), not exceptions: see samples.py.
"""

from __future__ import annotations

from pathlib import Path


class RolloutError(Exception):
    """Root of this package's exceptions."""


class RolloutConfigError(RolloutError, ValueError):
    """A setting or an input that cannot work; the message says what would."""


class ModelFolderError(RolloutConfigError):
    """The model path is no usable Hugging Face folder."""


class PortInUseError(RolloutConfigError):
    """The fixed port is taken."""


class KVCacheTooSmallError(RolloutConfigError):
    """One sequence of max_model_len tokens needs more KV cache than there is."""


class RequestTooLongError(RolloutConfigError):
    """Prompt and response together exceed the model's context."""


class ServerStartError(RolloutError):
    """A server did not become ready.

    reason: one line; server_index: which of the group; log_path: where its whole output lies.
    """

    def __init__(self, reason: str, server_index: int, log_path: Path | None) -> None:
        super().__init__(reason, server_index, log_path)  # all of it in args, so that it pickles
        self.reason = reason
        self.server_index = server_index
        self.log_path = log_path

    def __str__(self) -> str:
        where = f" (log: {self.log_path})" if self.log_path else ""
        return f"vLLM server {self.server_index} did not start: {self.reason}{where}"


class ServerDiedError(RolloutError):
    """A server that was running has exited."""

    def __init__(self, reason: str, server_index: int, log_path: Path | None) -> None:
        super().__init__(reason, server_index, log_path)
        self.reason = reason
        self.server_index = server_index
        self.log_path = log_path

    def __str__(self) -> str:
        where = f" (log: {self.log_path})" if self.log_path else ""
        return f"vLLM server {self.server_index} died: {self.reason}{where}"


class ControlError(RolloutError):
    """A control route answered with an error, or not at all."""


class NoServerError(RolloutError):
    """No endpoint was given, or none may take traffic."""
