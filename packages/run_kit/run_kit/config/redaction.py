"""Keeps secrets out of files, logs and command lines."""

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_SECRET_KEY = re.compile(r"(?:^|[._])(?:api_key|password|secret|token)$")


def redact_urls(text: str) -> str:
    """`text` with `***@` for the user and password of every URL in it."""
    return _CREDENTIALS.sub("***@", text)


def secrets_in(overrides: list[str]) -> list[str]:
    """The keys of `key=value` overrides whose value is a secret in plain sight, and no interpolation."""
    pairs = [override.partition("=") for override in overrides]
    return [
        key for key, _, value in pairs if _SECRET_KEY.search(key) and value not in ("", "null") and "${" not in value
    ]
