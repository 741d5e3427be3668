"""The license of every pinned distribution is allowed, or an exception with a reason (scripts/licenses.py)."""

from email.message import Message
from importlib.metadata import Distribution, distribution
from typing import Any, cast

import pytest

from scripts.licenses import ALLOWED, EXCEPTIONS, exception, installed_stack, is_allowed, license_of, pins


def metadata(**fields: str | list[str]) -> Distribution:
    """A distribution with these fields of metadata (`_` for `-`)."""
    message = Message()
    for key, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            message[key.replace("_", "-")] = value

    class Found:
        metadata = message

    return cast(Distribution, Found())


@pytest.mark.parametrize("name", pins(installed_stack()))
def test_the_license_of_every_pin_is_allowed(name: str) -> None:
    found = license_of(distribution(name))
    assert is_allowed(found) or exception(name), f"{name} is under {found}: see scripts/licenses.py"


def test_exceptions_are_pinned_and_needed() -> None:
    stack = installed_stack()
    assert set(EXCEPTIONS) <= {*pins("cpu"), *pins("cuda")}
    for name in set(EXCEPTIONS) & set(pins(stack)):
        assert not is_allowed(license_of(distribution(name))), name


@pytest.mark.parametrize(
    ("fields", "license_name"),
    [
        ({"License_Expression": "MIT OR GPL-3.0-only", "License": "x"}, "MIT OR GPL-3.0-only"),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Topic :: X"], "License": "x"}, "MIT"),
        ({"Classifier": ["License :: OSI Approved"], "License": "ISC"}, "ISC"),
        ({"Classifier": [f"License :: OSI Approved :: {name}" for name in ("MIT License", "GPL")]}, "MIT AND GPL"),
        ({"License": "MIT License\n\nCopyright (c) 2022"}, "MIT"),
        ({}, "none"),
    ],
)
def test_the_license_is_the_most_precise_field(fields: dict[str, Any], license_name: str) -> None:
    assert license_of(metadata(**fields)) == license_name


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only OR Apache-2.0 AND MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("(MIT OR GPL-3.0-only) AND MIT", False),
        ("none", False),
        ("Other/Proprietary License", False),
    ],
)
def test_all_parts_of_one_alternative_have_to_be_allowed(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def test_no_license_that_reaches_other_code_is_allowed() -> None:
    assert not [name for name in ALLOWED if "GPL" in name or "SSPL" in name or "BUSL" in name]
