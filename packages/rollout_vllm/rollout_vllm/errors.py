"""The exceptions of this package. Errors about a setting or argument carry the fields of `PlinthError`; all pickle.

PlinthError
├── ModelFolderError (also ValueError)         the model path is not a usable Hugging Face folder
└── RolloutError
    ├── RolloutConfigError (also ValueError)   an error in the user's configuration, found before any process starts
    │   └── RequestTooLongError                prompt + max_tokens exceed max_model_len
    ├── ServerStartError                       a server did not start; holds the reason and the path of the log
    │   └── ServerLostError                    it cannot start again, because its host is gone
    ├── ServerDiedError                        a running server exited
    ├── ScoringError                           a server did not score given tokens
    └── ControlError                           a control route (abort, sleep, wake, LoRA) failed
        └── UnlabeledTokensError               a server does not note the policy version of tokens

A sample that fails is data (`Failure`), not an exception; see samples.py.
"""

from collections.abc import Mapping
from pathlib import Path

from plinth_base import ModelFolderError as ModelFolderError
from plinth_base import PlinthError


class RolloutError(PlinthError):
    """Base class of this package's exceptions."""


class RolloutConfigError(RolloutError, ValueError):
    """Invalid configuration or input. `field` is a field of `RolloutConfig` or `SamplingConfig`, or an argument."""


class RequestTooLongError(RolloutConfigError):
    """Prompt and response together exceed the model's context."""


class _ServerError(RolloutError):
    """reason: one line; server_index: position in the group; log_path: file with the server's output."""

    _event = "failed"

    def __init__(self, reason: str, server_index: int, log_path: Path | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.server_index = server_index
        self.log_path = log_path

    def __str__(self) -> str:
        log = f" (log: {self.log_path})" if self.log_path else ""
        return f"vLLM server {self.server_index} {self._event}: {self.reason}{log}"


class ServerStartError(_ServerError):
    """A server did not become ready."""

    _event = "did not start"


class ServerLostError(ServerStartError):
    """A server cannot start again, because its host is gone."""


class ServerDiedError(_ServerError):
    """A running server exited."""

    _event = "died"


class ControlError(RolloutError):
    """A control route returned an error or did not answer. problems: url -> problem of each server that failed."""

    def __init__(self, message: str, problems: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(problems or {})


class UnlabeledTokensError(ControlError):
    """A server answers that it has no policy versions of tokens; asking it again is of no use."""


class ScoringError(RolloutError):
    """A server did not return log-probs of given tokens, after all retries."""
