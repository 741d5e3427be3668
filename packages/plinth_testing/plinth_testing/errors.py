"""Expects an error by its type and fields instead of its words."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


@contextmanager
def raises(expected: type[ErrorT] | tuple[type[ErrorT], ...], **fields: Any) -> Iterator[Any]:
    """`pytest.raises(expected)`, where the error also has these attributes and can be pickled.

    `with raises(EngineConfigError, field="zero.stage", value=4): ...`
    """
    import pytest

    with pytest.raises(expected) as caught:
        yield caught
    error = caught.value
    assert {name: getattr(error, name) for name in fields} == fields, str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
