"""Checks this machine for training and says what to change: `plinth doctor`.

A package registers a function for the private parts of other packages on which it relies through an entry point:
`[project.entry-points."plinth.upstream"]`, `NAME = "module:function"`. It returns rows with the keys name, state,
problem, replaces, reads, reason, tested and otherwise.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points

from .machine.check import Check
from .machine.gpus import read_gpus
from .machine.host import check_host
from .machine.software import check_compilers, check_gpus, check_server, read_torch, read_versions


def main(argv: Sequence[str] | None = None) -> int:
    """Print all checks and parts; returns 1 if a run is not possible or a part is refused here, otherwise 0."""
    parser = argparse.ArgumentParser(prog="plinth doctor", description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(argv)
    checks: list[Check] = []
    for title, section in check_machine():
        print(title)
        for check in section:
            print(check, flush=True)
            checks.append(check)
        print()
    packages, failed = read_parts()
    checks += failed
    last = summary(checks, packages)
    print("private parts of other packages", *failed, to_text(packages), last, sep="\n")
    return int(last.endswith("not possible"))


def check_machine() -> Iterator[tuple[str, Iterable[Check]]]:
    """The checks of each section, in order, while they are made."""
    gpus, error = read_gpus()
    torch = read_torch()
    num_gpus = torch.num_gpus or len(gpus)
    yield "GPUs", check_gpus(gpus, error, torch)
    versions = read_versions()
    stack = Check("versions", ", ".join(" ".join(one) for one in versions.items()) or "none")
    yield "software", (stack, check_server(versions, num_gpus > 0), *check_compilers(torch))
    yield "host", check_host(num_gpus=num_gpus, environment=os.environ)


def read_parts() -> tuple[dict[str, Sequence[Mapping[str, str]]], list[Check]]:
    """The rows of each package, and a problem for each package that cannot be imported."""
    packages: dict[str, Sequence[Mapping[str, str]]] = {}
    failed = []
    for each in sorted(entry_points(group="plinth.upstream"), key=lambda each: each.name):
        try:
            packages[each.name] = each.load()()
        except Exception as error:  # a broken installation raises anything
            finding = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
            failed.append(Check(each.name, finding, "problem", "run `scripts/setup.sh --force`"))
    return packages, failed


def summary(checks: Iterable[Check], packages: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """The last line: how many problems and warnings there are."""
    counts = Counter(check.state for check in checks)
    refused = sum(row["state"] == "refused" for rows in packages.values() for row in rows)
    problems, warnings = counts["problem"] + refused, counts["warning"]
    verdict = "a run is not possible" if problems else "a run is possible"
    return f"{problems} problems, {warnings} warnings: {verdict}"


def to_text(packages: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """One line for each row, and one for the installed versions that are not tested or the names that are missing."""
    return "".join(
        f"{package:<13} {row['state']:<14}{row['name']} ({row['tested']})\n"
        + (f"{'':<28}{row['problem']}\n" if row["problem"] else "")
        for package, rows in packages.items()
        for row in rows
    )
