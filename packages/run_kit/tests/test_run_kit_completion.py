"""`plinth completion`: the words of the commands, and the scripts in real shells."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from run_kit_testkit import Example

from run_kit import commands, run_cli
from run_kit.completion.command import main, script
from run_kit.completion.words import Words, collect_words

# Prints the replies to each line of stdin, as readline would ask for them, one line each.
ASK_BASH = r"""
COMP_WORDBREAKS=$' \t\n"\'@><=;|&(:'
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMPREPLY=()
    _plinth
    printf '%s\n' "${COMPREPLY[*]}"
done
"""
HELP = """usage: files [-h] {list,copy} ...

positional arguments:
  {list,copy}

options:
  -h, --help     show this help message and exit
  --dry-run      copy nothing; [output=FILE]
"""


def app(argv: list[str]) -> None:
    presets = Path(__file__).parent / "no presets"
    run_cli(Example, lambda config: None, app_name="plinth app", preset_dir=presets, argv=argv)


def files(argv: list[str]) -> int:
    if argv[:1] == ["list"] and "--help" in argv:
        print("usage: files list [--long]")
    elif "--help" in argv:
        print(HELP)
    return 2


def broken(argv: list[str]) -> int:
    raise RuntimeError("no driver")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Words:
    monkeypatch.setitem(sys.modules, "run_kit_completion_test", sys.modules[__name__])
    found = [
        EntryPoint(name=name, value=f"run_kit_completion_test:{name}", group=commands.GROUP)
        for name in ("app", "files", "broken")
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: found)
    return collect_words()


def test_words_are_commands_keys_choices_and_options(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    assert words[""] == ["--help", "--version", "app", "broken", "files", "help"]
    assert [word for word in words["app"] if word.startswith("actor.zero.")] == [
        "actor.zero.bucket_bytes=", "actor.zero.offload=cpu", "actor.zero.offload=none", "actor.zero.offload=off",
        "actor.zero.stage=1", "actor.zero.stage=2", "actor.zero.stage=3",
    ]  # fmt: skip
    assert {"actor.enabled=true", "actor.enabled=false", "config=", "--help", "--print-config"} <= set(words["app"])
    assert words["files"] == ["--dry-run", "--help", "copy", "list", "output="]
    assert words["files list"] == ["--long"]
    assert "files copy" not in words, "a value, whose help is that of the command"
    assert words["broken"] == []


def test_a_command_that_fails_is_named(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    collect_words()
    assert "warning: broken is completed without its words: no driver" in capsys.readouterr().err


def test_help_as_json_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["--help-json"])
    tree = json.loads(capsys.readouterr().out)
    keys = {key["key"]: key for key in tree["keys"]}
    assert (ended.value.code, tree["doc"], tree["presets"]) == (0, "An example app.", [])
    assert keys["actor.zero.stage"] == {
        "key": "actor.zero.stage", "type": "1|2|3", "default": "2", "choices": ["1", "2", "3"], "doc": "ZeRO stage.",
    }  # fmt: skip
    assert keys["actor.enabled"]["choices"] == ["true", "false"]
    assert keys["actor.optim.warmup"]["choices"] == []


def expected(words: list[str], typed: str) -> str:
    """What readline replaces the typed part with: up to the next dot or equals sign."""
    fitting = [word for word in words if word.startswith(typed)]
    if "=" in typed:
        return " ".join(word.partition("=")[2] for word in fitting)
    parts = [re.match(f"{re.escape(typed)}[^.=]*[.=]?", word) for word in fitting]
    return " ".join(dict.fromkeys(part[0] for part in parts if part))


def test_bash_completes_every_prefix_of_every_word(words: Words) -> None:
    pairs = [(command, word) for command, found in words.items() for word in found]
    prefixes = [(command, word[:length]) for command, word in pairs for length in range(len(word) + 1)]
    lines = "".join(f"plinth {command} seed=1 --x {typed}\n" for command, typed in prefixes)
    program = script("bash", words) + ASK_BASH
    done = subprocess.run(["bash", "-c", program], input=lines, capture_output=True, text=True, timeout=60, check=True)
    replies = done.stdout.splitlines()
    assert done.stderr == ""
    for (command, typed), reply in zip(prefixes, replies, strict=True):
        assert reply == expected(words[command], typed), (command, typed)


def test_bash_completes_the_app_of_a_job_and_knows_no_words_elsewhere() -> None:
    words = {"": ["job", "app"], "job": ["app", "nodes="], "app": ["seed=1", "seed=2"]}
    lines = "plinth job app se\nplinth job app no\nplinth job se\nplinth job app seed=\n/bin/plinth nothing x\n"
    program = script("bash", words) + ASK_BASH
    done = subprocess.run(["bash", "-c", program], input=lines, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["seed=", "nodes=", "", "1 2", "", ""]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on this machine")
def test_fish_completes(words: Words, tmp_path: Path) -> None:
    (tmp_path / "plinth.fish").write_text(script("fish", words))
    for typed, reply in (
        ("plinth a", ["app"]),
        ("plinth app actor.zero.s", ["actor.zero.stage="]),
        ("plinth app actor.zero.stage=", ["actor.zero.stage=1", "actor.zero.stage=2", "actor.zero.stage=3"]),
        ("plinth files list --", ["--long"]),
    ):
        program = f"source {tmp_path}/plinth.fish; complete -C '{typed}'"
        done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == reply


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_parse(words: Words, shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (tmp_path / "script").write_text(script(shell, words))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef plinth\n")
    with pytest.raises(SystemExit) as ended:
        main(["csh"])
    assert ended.value.code == 2
