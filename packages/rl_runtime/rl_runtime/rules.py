"""Rules of a configuration: the values of one setting, and what a feature needs of other settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plinth_base.errors import shown

from .errors import InputError


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key, also of one in a mapping."""
    for name in key.split("."):
        config = config[name] if isinstance(config, Mapping) else getattr(config, name)
    return config


def check_value(
    config: object, key: str, is_allowed: bool, allowed: str, *, problem: str = "", remedy: str | None = None
) -> None:
    """Raises InputError, with the value of `key` and what is allowed, unless that value is allowed."""
    if not is_allowed:
        raise InputError(problem, field=key, value=value_of(config, key), allowed=allowed, remedy=remedy)


def check_at_least(minimum: int, config: object, *names: str) -> None:
    """Raises InputError for the first of these fields of a configuration that is below `minimum`; null is not."""
    for name in names:
        value = getattr(config, name)
        check_value(config, name, value is None or value >= minimum, f"{minimum} or more")


def check_seconds(config: object, *names: str) -> None:
    """Raises InputError for the first of these fields of a configuration that is no time; null is allowed."""
    for name in names:
        value = getattr(config, name)
        check_value(config, name, value is None or value > 0, "above 0 seconds")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A demand of a feature on one setting."""

    field: str
    """Dotted key of the setting."""
    allowed: str
    """Values that fit the feature, in words."""
    holds: Callable[[Any], bool]
    """True for a configuration that fits."""
    why: str = ""
    remedy: str | None = None


def only(
    field: str, *values: Any, when: Callable[[Any], bool] = lambda _: True, why: str = "", remedy: str | None = None
) -> Rule:
    """The rule that `field` has one of these values, in configurations that `when` selects."""

    def holds(config: Any) -> bool:
        return value_of(config, field) in values or not when(config)

    return Rule(field=field, allowed=" or ".join(map(_word, values)), holds=holds, why=why, remedy=remedy)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of a configuration, with everything that it needs and excludes."""

    key: str
    """Dotted key of the setting that turns it on."""
    rules: tuple[Rule, ...]
    is_on: Callable[[Any], bool] | None = None
    """True for a configuration that uses the feature; None: `key` has a truthy value."""

    def check(self, config: Any) -> None:
        """Raises InputError for the first rule that a configuration with this feature breaks."""
        if not (value_of(config, self.key) if self.is_on is None else self.is_on(config)):
            return
        for rule in self.rules:
            why = f", {rule.why}" if rule.why else ""
            problem = f"{self.key} is {_word(value_of(config, self.key))}{why}"
            check_value(config, rule.field, rule.holds(config), rule.allowed, problem=problem, remedy=rule.remedy)


def check_features(config: Any, features: Iterable[Feature]) -> None:
    """Raises InputError if a feature of the configuration excludes another setting."""
    for feature in features:
        feature.check(config)
