"""The summary of a session in Markdown. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.runs import table_header, table_row
from benchmarks.session.plan import Measurement

_COLUMNS = ("measurement", "ended", "exit code", "seconds", "GPUs", "GPU peak GiB", "device", "date")


def summary(title: str, plan: Sequence[Measurement], records: Mapping[str, Mapping[str, Any]]) -> str:
    """Measurements that ran and that did not, the tables that several measurements share, and what each printed."""
    measured = [records[each.name] for each in plan if each.name in records]
    parts = [f"# {title}", "\n".join([table_header(_COLUMNS), *map(_row, measured)])]
    if missing := [each.name for each in plan if each.name not in records]:
        parts.append(f"Not measured: {', '.join(missing)}.")
    parts += [f"Versions: {versions}." for versions in dict.fromkeys(record["versions"] for record in measured)]
    if joined := joined_tables([record["output"] for record in measured]):
        parts += ["## Tables of several measurements", *joined]
    for record in measured:
        parts += [f"## {record['name']}", f"`{record['command']}`", record["output"].strip()]
        if record["ended"] == "failed":
            parts.append(f"```\n{record['errors']}\n```")
    return "\n\n".join(parts) + "\n"


def _row(record: Mapping[str, Any]) -> str:
    keys = ("name", "ended", "code", "seconds", "gpus", "peak_gib", "device", "date")
    return table_row([record[key] for key in keys])


def markdown_tables(text: str) -> Iterator[list[str]]:
    """The lines of each table in a text, header and rule first."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            yield lines
            lines = []


def joined_tables(outputs: Sequence[str]) -> list[str]:
    """Tables of cases whose header several outputs have, in one each; of rows of one case the last one stays."""
    measured: dict[str, list[list[str]]] = {}
    for table in (table for output in outputs for table in markdown_tables(output)):
        if table[0].startswith("| case |"):
            measured.setdefault(table[0], []).append(table)
    several = {header: tables for header, tables in measured.items() if len(tables) > 1}
    return [
        "\n".join(
            [header, tables[0][1], *{line.split("|")[1]: line for table in tables for line in table[2:]}.values()]
        )
        for header, tables in several.items()
    ]
