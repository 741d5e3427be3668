"""The `plinth` command over the installed packages and apps."""

import contextvars
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from run_kit.commands import GROUP, main

APPS = Path(__file__).resolve().parents[1] / "apps"
COMMANDS = {"grpo", "ppo", "sft", "evaluate", "bench", "ckpt", "report", "plan", "prepare", "runs", "slurm"}
COMMANDS |= {"distill", "reward", "dpo", "doctor", "serve"}


def test_every_command_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert set(listed) >= COMMANDS
    assert len(set(listed)) == len(listed), "two packages register one name"
    assert "Other commands" not in text, "each has a place"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([name, "--help"])
    except SystemExit as exit_:
        code = exit_.code
    assert code in (0, None)
    assert len(capsys.readouterr().out) > 50


def test_the_apps_distribution_lists_every_app() -> None:
    project = tomllib.loads((APPS / "pyproject.toml").read_text())
    folders = {f"apps.{path.parent.name}" for path in APPS.glob("*/main.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == {"apps", *folders}
    registered = {command.name for command in entry_points(group=GROUP) if command.value.startswith("apps.")}
    assert registered == {folder.removeprefix("apps.") for folder in folders}


def test_help_shows_the_command_that_the_user_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a command has further commands, and in the usage of those that argparse reads."""
    for words, shown in (
        (["bench", "six_case", "--help"], "plinth bench six_case overlay=tiny"),
        (["plan", "--help"], "usage: plinth plan "),
        (["prepare", "--help"], "usage: plinth prepare "),
    ):
        with pytest.raises(SystemExit):
            contextvars.copy_context().run(main, words)
        assert shown in capsys.readouterr().out
