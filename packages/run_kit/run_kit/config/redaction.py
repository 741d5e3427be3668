"""Keeps secrets out of files, logs and command lines: the only place that decides what a secret is.

Secrets are credentials in URLs, values of environment variables whose names say so (`HF_TOKEN`, `WANDB_API_KEY`), and
values of configuration keys whose names say so (`rollout.api_key`).
"""

import os
import re
from typing import Any

from .trees import plain_tree
from .yaml import dump

_MASK = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY = re.compile(
    r"(?i)([?&](?:[\w.-]*[_.-])?(?:api_?key|key|password|secret|signature|sig|token|credential)=)[^&#\s'\"]+"
)
# Not every `..._token`: `stop_token` is an option of environments.
_SECRET_KEY = re.compile(
    r"(?i)(?:^|[._-])(?:api_?key|access_?key|secret_?key|secret|password|passwd|(?:access|auth|bearer|hf)_token)$"
    r"|(?:^|\.)token$"
)
_SECRET_VARIABLE = re.compile(r"(?i)(?:^|_)(?:API_?KEY|KEY|KEY_ID|SECRET|TOKEN|PASSWORD|PASSWD)$")
_MIN_LENGTH = 8
"""Values of environment variables from this length: a shorter one may be part of any word."""


def redact(text: str) -> str:
    """`text` with `***` for credentials and secret parameters of URLs, and for secrets of the environment."""
    text = _QUERY.sub(rf"\1{_MASK}", _CREDENTIALS.sub(f"{_MASK}@", text))
    secrets = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    for value in sorted(secrets, key=len, reverse=True):  # the longest first: one may be part of another
        if len(value) >= _MIN_LENGTH:
            text = text.replace(value, _MASK)
    return text


def tree_without_secrets(config: Any) -> Any:
    """A config as dicts, lists and scalars for files and services: secret keys are null, text is redacted."""
    return _redacted(plain_tree(config))


def yaml_without_secrets(config: Any) -> str:
    """A config as YAML with every key; `load_config` of that file gives an equal config, but for the secrets."""
    return dump(tree_without_secrets(config))


def secrets_in(overrides: list[str]) -> list[str]:
    """The keys of `key=value` overrides whose value is a secret in plain sight, and no interpolation."""
    pairs = [override.partition("=") for override in overrides]
    return [
        key for key, _, value in pairs if _SECRET_KEY.search(key) and value not in ("", "null") and "${" not in value
    ]


def _redacted(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: None if isinstance(value, str) and _SECRET_KEY.search(key) else _redacted(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [_redacted(item) for item in tree]
    return redact(tree) if isinstance(tree, str) else tree
