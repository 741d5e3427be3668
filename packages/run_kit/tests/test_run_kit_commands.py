import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from run_kit import commands
from run_kit.cli import INVOKED_AS


def echo(argv: list[str]) -> int:
    print(INVOKED_AS.get(), *argv)
    return 3


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands echo and report, started by nobody."""
    monkeypatch.setitem(sys.modules, "run_kit_commands_test", sys.modules[__name__])
    entries = [
        EntryPoint(name="echo", value="run_kit_commands_test:echo", group=commands.GROUP),
        EntryPoint(name="report", value="run_kit.report.__main__:main", group=commands.GROUP),
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: entries)
    token = INVOKED_AS.set("")
    yield
    INVOKED_AS.reset(token)


def test_a_command_gets_its_arguments_and_its_exit_code_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["echo", "a=1", "--help"]) == 3
    assert capsys.readouterr().out == "plinth echo a=1 --help\n"


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_before_a_command_is_help_of_that_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([word, "echo", "a"]) == 3
    assert capsys.readouterr().out == "plinth echo a --help\n"
    assert commands.main([word, "ecoh"]) == 2
    assert "unknown command 'ecoh'; nearest: echo" in capsys.readouterr().err


def test_the_versions_are_those_of_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"plinth-run-kit {version('plinth-run-kit')}" in lines
    assert {line.split()[0].partition("-")[0] for line in lines} == {"plinth"}
    assert lines == sorted(set(lines))


def test_modules_of_the_working_folder_are_found_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    commands.main(["echo"])
    commands.main(["echo"])
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["reprot"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'reprot'; nearest: report; available: echo, report\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_overview_shows_every_command_with_its_modules_first_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "run_kit_commands_test")
    assert commands.main(arguments) == 0
    out = capsys.readouterr().out
    assert "\nRuns and models\n  report  `plinth report RUN_FOLDER" in out
    assert "\n\nOther commands\n  echo" in out


def test_a_command_of_a_broken_package_is_named_and_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = EntryPoint(name="odd", value="nowhere.at.all:main", group=commands.GROUP)
    gone = EntryPoint(name="gone", value="run_kit.gone:main", group=commands.GROUP)
    entries = [*commands.entry_points(group=""), odd, gone]
    monkeypatch.setattr(commands, "entry_points", lambda group: entries)
    assert commands.main(["odd"]) == 2
    assert capsys.readouterr().err == (
        "error: nowhere.at.all:main, which the package nowhere registers, cannot be loaded (No module named "
        "'nowhere'); install that package again\n"
    )
    assert commands.main([]) == 0
    out = capsys.readouterr().out
    assert "odd     (cannot be loaded: No module named 'nowhere')" in out
    assert "gone    (cannot be loaded: no module run_kit.gone; install its package again)" in out


def test_a_reader_that_leaves_early_ends_a_command_without_a_traceback() -> None:
    code = "import sys; from run_kit import commands; sys.exit(commands.main(['report', '--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode == 128 + signal.SIGPIPE
