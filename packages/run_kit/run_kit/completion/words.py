"""The words that each command takes, read from the help of the commands."""

import contextvars
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from .. import commands

Words = dict[str, list[str]]
"""Command (`grpo`, `bench six_case`; empty for `plinth` itself) -> the words that may follow it, sorted."""

# Characters that no shell changes, and that do not end a word of readline.
_PLAIN = re.compile(r"[\w./=+,%-]+")


def collect_words() -> Words:
    """The words of every registered command; asks each one for its help, in this process."""
    registered = commands.registered()
    found: Words = {"": [*registered, "help", "--help", "--version"]}
    for name in registered:
        found |= _words_of(name)
    apps = {path.split()[0] for path, words in found.items() if any(word.startswith("preset=") for word in words)}
    for name, command in registered.items():
        if f"plinth {name} APP" in commands.summary(command):
            found[name] += sorted(apps)
    return {command: sorted(_plain(words, command)) for command, words in found.items()}


def _words_of(name: str) -> Words:
    """The words of a command and of its own commands (`ckpt list`)."""
    tree, text = _tree([name]), _output([name, "--help"])
    inner = _inner_commands(name, text)
    found: Words = {name: [*(_help_words(text) if tree is None else tree_words(tree)), *inner]}
    for command in inner:
        tree, own_text = _tree([name, command]), _output([name, command, "--help"])
        if tree is not None:
            found[f"{name} {command}"] = tree_words(tree)
        elif own_text != text:  # else it is a value, not a command
            found[f"{name} {command}"] = _help_words(own_text)
    return found


def tree_words(tree: Mapping[str, Any]) -> list[str]:
    """Words of a command with a configuration, from its `--help-json`: keys, their choices, presets and overlays."""
    words = ["config=", "--help", "--print-config"]
    words += [f"preset={file['name']}" for file in tree["presets"]]
    words += [f"overlay={file['name']}" for file in (*tree["overlays"], *tree["presets"])]
    for key in tree["keys"]:
        path = key["key"]
        # The user chooses the name in `reward.terms.NAME.weight`.
        if "NAME" not in path.split("."):
            words += [f"{path}={choice}" for choice in key["choices"]] or [f"{path}="]
    return list(dict.fromkeys(words))


def _help_words(text: str) -> list[str]:
    """Options (`--out`) and keys (`output=FILE`) in a help text."""
    return sorted({*re.findall(r"(?<![\w-])--[a-z][\w-]*", text), *re.findall(r"(?<=\[)[a-z_]+=(?=[A-Z])", text)})


def _inner_commands(name: str, text: str) -> list[str]:
    """What a help text lists as `{list,verify}` or as `plinth bench six_case|stage_gate`."""
    lists = re.findall(r"^  \{([\w,-]+)\}", text, flags=re.MULTILINE)
    alternatives = re.findall(rf"plinth {re.escape(name)} \[?([a-z][\w-]*(?:\|[a-z][\w-]*)+)", text)
    return sorted({word for found in (*lists, *alternatives) for word in re.split("[,|]", found)})


def _tree(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The command's `--help-json`; None for a command without a configuration."""
    try:
        tree = json.loads(_output([*arguments, "--help-json"]))
    except json.JSONDecodeError:
        return None
    return tree if isinstance(tree, dict) else None


def _output(arguments: Sequence[str]) -> str:
    """What a command prints; a command that cannot be loaded prints nothing."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            contextvars.copy_context().run(commands.main, arguments)
    except SystemExit:
        pass
    except Exception as error:
        if "--help" in arguments:  # the last question to a command: one warning for each
            print(f"warning: {arguments[0]} is completed without its words: {error}", file=sys.stderr)
    return printed.getvalue()


def _plain(words: Iterable[str], command: str) -> list[str]:
    words = list(dict.fromkeys(words))
    odd = [word for word in words if not _PLAIN.fullmatch(word)]
    if odd:
        print(f"warning: {command} is completed without {', '.join(odd)}, which shells would change", file=sys.stderr)
    return [word for word in words if word not in odd]
