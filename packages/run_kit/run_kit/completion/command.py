"""Prints a script that completes commands, presets, keys and choices: `plinth completion bash|zsh|fish`."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .words import Words, collect_words

_PLACES = {
    "bash": "plinth completion bash > ~/.local/share/bash-completion/completions/plinth",
    "zsh": "plinth completion zsh > FOLDER/_plinth, for a FOLDER of $fpath",
    "fish": "plinth completion fish > ~/.config/fish/completions/plinth.fish",
}


def script(shell: str, words: Words) -> str:
    """The script of a shell: bash (3.2 or newer), zsh or fish."""
    template = (Path(__file__).parent / f"plinth.{shell}").read_text(encoding="utf-8")
    cases = []
    for command, found in words.items():
        lines = "\n".join(textwrap.wrap(" ".join(found), 118, break_long_words=False, break_on_hyphens=False))
        if shell == "fish":
            lines = lines.replace("\n", " \\\n")
            cases.append(f"        case '{command}'\n            printf '%s\\n' {lines}")
        else:
            cases.append(f"    '{command}') found='{lines}' ;;")
    return template.replace("@place@", _PLACES[shell]).replace("@cases@", "\n".join(cases))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script; returns 0."""
    parser = argparse.ArgumentParser(
        prog="plinth completion",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Write it where the shell finds it, and again after an upgrade: " + "; ".join(_PLACES.values()),
    )
    parser.add_argument("shell", choices=sorted(_PLACES))
    print(script(parser.parse_args(argv).shell, collect_words()), end="")
    return 0
