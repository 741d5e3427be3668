"""Errors about servers, which name a field of RolloutConfig, with the configuration key of the field."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from rollout_vllm import RolloutConfig, RolloutConfigError

from ..errors import InputError

_FIELD = re.compile(rf"({'|'.join(field.name for field in fields(RolloutConfig))})(=|:| is )")


@contextmanager
def naming_servers(section: str = "rollout") -> Iterator[None]:
    """Errors that begin with a field, such as `port=8000`, begin with its key instead: `rollout.port=8000`.

    Others, about the model's folder for example, stay as they are.

    Args:
        section: the configuration section that holds the RolloutConfig.

    Raises InputError for rollout_vllm.RolloutConfigError about a field.
    """
    try:
        yield
    except RolloutConfigError as error:
        if not _FIELD.match(str(error)):
            raise
        raise InputError(f"{section}.{error}") from error
