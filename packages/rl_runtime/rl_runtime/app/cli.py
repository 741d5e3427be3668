"""The command line of an app."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from run_kit import run_cli

from .job_config import JobConfig
from .supervised_job_config import SupervisedJobConfig

AppConfigT = TypeVar("AppConfigT", bound=JobConfig | SupervisedJobConfig)


def run_job_cli(
    config_cls: type[AppConfigT],
    main: Callable[[AppConfigT], None],
    *,
    app_name: str,
    preset_dir: Path,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """`run_kit.run_cli` for an app that runs its preset `demo` unless the user gives a model or data."""
    data = "supervised.files" if issubclass(config_cls, SupervisedJobConfig) else "data.train"
    run_cli(
        config_cls,
        main,
        app_name=app_name,
        preset_dir=preset_dir,
        argv=argv,
        default_preset="demo",
        default_preset_unless=("model.path", data),
    )
