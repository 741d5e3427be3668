"""`raises` compares fields, not words."""

import pytest

from plinth_testing import raises


class SettingError(ValueError):
    """An error about a setting."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


class UnpicklableError(SettingError):
    """An error that calls its class with other arguments than it was given."""

    def __init__(self, field: str, value: int) -> None:
        super().__init__(field)
        self.value = value


def test_an_error_with_the_fields_is_accepted() -> None:
    with raises(SettingError, field="dp") as caught:
        raise SettingError("dp")
    assert caught.value.field == "dp"


@pytest.mark.parametrize("error", [SettingError("tp"), UnpicklableError("dp", 1)])
def test_another_field_and_an_error_that_does_not_pickle_are_refused(error: SettingError) -> None:
    with pytest.raises((AssertionError, TypeError)), raises(SettingError, field="dp"):
        raise error


def test_no_error_and_another_type_are_refused() -> None:
    with pytest.raises(pytest.fail.Exception), raises(SettingError):
        pass
    with pytest.raises(KeyError), raises(SettingError):
        raise KeyError
