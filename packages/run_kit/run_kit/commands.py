"""The `plinth` command: `plinth NAME [argument ...]` runs a command that an installed package registers.

`plinth help NAME [argument ...]` is `plinth NAME [argument ...] --help`; `plinth --version` prints the versions.

A package registers one through an entry point: `[project.entry-points."plinth.commands"]`, `NAME = "module:function"`.
The function takes the arguments after NAME and returns an exit code, or ends the process itself.
"""

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path

from .cli import INVOKED_AS
from .terminal import lasting_streams

GROUP = "plinth.commands"
_HELP = ("--help", "-h", "help")
_GROUPS = {
    "Train": ("grpo", "ppo", "sft", "reward", "dpo", "distill", "serve"),
    "Before a run": ("doctor", "prepare", "plan", "import-deepspeed"),
    "Runs and models": ("runs", "report", "evaluate", "ckpt"),
    "Clusters and benchmarks": ("slurm", "bench"),
}
"""Commands in the order of `plinth --help`; those of other packages come last."""


def registered() -> dict[str, EntryPoint]:
    """The commands of all installed packages, by name."""
    return {command.name: command for command in sorted(entry_points(group=GROUP), key=lambda command: command.name)}


@lasting_streams()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, lists them all, or prints the versions; returns 2 for an unknown command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = registered()
    if len(arguments) > 1 and arguments[0] in _HELP:
        arguments = [*arguments[1:], "--help"]
    name = arguments[0] if arguments else "--help"
    if name == "--version":
        print(*versions(), sep="\n")
        return 0
    if name in _HELP:
        print(overview(commands))
        return 0
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        print(f"error: unknown command {name!r}{hint}; available: {', '.join(commands)}", file=sys.stderr)
        return 2
    try:
        command = commands[name].load()
    except (ImportError, AttributeError) as error:
        entry = commands[name]
        package = entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]
        problem = f"{entry.value}, which the package {package} registers, cannot be loaded ({error})"
        print(f"error: {problem}; install that package again", file=sys.stderr)
        return 2
    _find_modules_of_working_folder()
    INVOKED_AS.set(f"plinth {name}")
    code = command(arguments[1:])
    return code if isinstance(code, int) else 0


def overview(commands: Mapping[str, EntryPoint]) -> str:
    """The commands by what they are for, each with the first line of its module."""
    width = max(map(len, commands), default=0)
    lines = ["usage: plinth COMMAND [argument ...]; plinth COMMAND --help describes one; plinth --version"]
    others = [name for name in commands if not any(name in names for names in _GROUPS.values())]
    for title, names in {**_GROUPS, "Other commands": others}.items():
        known = [f"  {name:<{width}}  {summary(commands[name])}" for name in names if name in commands]
        lines += ["", title, *known] if known else []
    return "\n".join(lines)


def versions() -> list[str]:
    """NAME VERSION of each installed distribution of this repository, sorted by name."""
    installed = {distribution.name: distribution.version for distribution in distributions()}
    return [f"{name} {installed[name]}" for name in sorted(installed) if name.startswith("plinth-")]


def _find_modules_of_working_folder() -> None:
    """Adds the working folder to the import path, as `python -m` does, for functions that the user names in keys.

    It comes last, so that no file in it hides an installed module. `PYTHONSAFEPATH` turns this off.
    """
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def summary(command: EntryPoint) -> str:
    """First line of the docstring of the command's module, read without importing the module."""
    try:
        spec = importlib.util.find_spec(command.module)
        if spec is None or spec.origin is None:
            raise ImportError(f"no module {command.module}; install its package again")
        source = Path(spec.origin).read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(source)) or ""
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        doc = f"(cannot be loaded: {error})"
    return doc.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
