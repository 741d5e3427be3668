"""Lists the private parts of other packages that the installed packages rely on: `plinth doctor [--markdown FILE]`.

A package registers a function through an entry point: `[project.entry-points."plinth.upstream"]`, `NAME =
"module:function"`. It returns rows with the keys name, state, problem, replaces, reads, reason, tested and otherwise.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "plinth.upstream"

Row = Mapping[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows of every package; returns 1 if a part is refused here, otherwise 0."""
    parser = argparse.ArgumentParser(prog="plinth doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables below FILE's introduction")
    options = parser.parse_args(argv)
    packages = {each.name: each.load()() for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)}
    print(to_text(packages), end="")
    if options.markdown is not None:
        introduction = options.markdown.read_text(encoding="utf-8").partition("## ")[0]
        options.markdown.write_text(introduction + to_markdown(packages), encoding="utf-8")
    return int(any(row["state"] == "refused" for rows in packages.values() for row in rows))


def to_text(packages: Mapping[str, Sequence[Row]]) -> str:
    """One line for each row, and one for the installed versions that are not tested or the names that are missing."""
    lines = []
    for package, rows in packages.items():
        for row in rows:
            lines.append(f"{package:<13} {row['state']:<14}{row['name']} ({row['tested']})")
            if row["problem"]:
                lines.append(f"{'':<28}{row['problem']}")
    return "\n".join(lines) + "\n"


def to_markdown(packages: Mapping[str, Sequence[Row]]) -> str:
    """The tables of docs/upstream.md; the same wherever they are made."""
    lines: list[str] = []
    for package, rows in packages.items():
        lines += [f"## {package}", ""]
        for row in rows:
            lines += [f"**{row['name']}**: {row['reason']}.", ""]
            for key in ("replaces", "reads"):
                if row[key]:
                    lines.append(f"* {key} `{row[key].replace('; ', '`; `')}`")
            lines += [f"* tested with `{row['tested'].replace(', ', '`, `')}`; otherwise {row['otherwise']}", ""]
    return "\n".join(lines)
