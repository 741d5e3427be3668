"""Errors carry fields, the sentence is made of them, and both survive pickling."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plinth_base import PlinthError, prefix_fields


class SettingError(PlinthError, ValueError):
    """A wrong setting."""


class ServerError(PlinthError):
    """An error with parameters of its own."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url}: HTTP {status}")
        self.url, self.status = url, status


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"problem": "no free port"}, "no free port"),
        ({"field": "kl_target", "value": -1, "allowed": "above 0"}, "kl_target: got -1; allowed: above 0"),
        ({"field": "dp", "value": None, "remedy": "set dp"}, "dp: got null; set dp"),
        ({"field": "dp", "problem": "is missing"}, "dp: is missing"),
        ({"field": "name", "value": "x" * 1000, "problem": "is long"}, f"name: got '{'x' * 36}...{'x' * 39}'; is long"),
    ],
)
def test_the_sentence_names_field_value_problem_allowed_and_remedy(fields: dict[str, Any], sentence: str) -> None:
    assert str(SettingError(**fields)) == sentence


texts = st.none() | st.text(max_size=9)


@given(
    problem=st.text(max_size=9),
    field=texts,
    value=st.just(...) | st.none() | st.integers() | st.lists(st.text(max_size=3)),
    allowed=texts,
    remedy=texts,
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_errors_pickle_with_their_fields(protocol: int, **fields: Any) -> None:
    error = SettingError(**fields)
    error.add_note("on rank 3")
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is SettingError
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    assert copy.value is ... or copy.value == fields["value"]


def test_attributes_and_parameters_of_subclasses_are_pickled() -> None:
    copy = pickle.loads(pickle.dumps(ServerError("http://a", 500)))
    assert (type(copy), copy.url, copy.status, str(copy)) == (ServerError, "http://a", 500, "http://a: HTTP 500")


def test_a_section_prefixes_the_field_of_a_copy() -> None:
    error = SettingError(field="port", value=8000)
    assert error.under("rollout").under("actor").field == "actor.rollout.port"
    assert error.field == "port"
    assert SettingError("no server").under("rollout").field == "rollout"
    assert ServerError("http://a", 500).under("rollout").status == 500


def test_prefix_fields_leaves_errors_without_a_field_alone() -> None:
    with pytest.raises(SettingError) as caught, prefix_fields("rollout"):
        raise SettingError(field="port", value=8000)
    assert (caught.value.field, caught.value.value) == ("rollout.port", 8000)
    error = SettingError("no server")
    with pytest.raises(SettingError) as caught, prefix_fields("rollout"):
        raise error
    assert caught.value is error
