"""Rooms and import arrows of packages: `python scripts/import_graph.py [--root CHECKOUT] [PACKAGE ...]`.

A room is a file or folder right below a package's module folder; an arrow is a pair of rooms of which the first imports
the second, lazily or not. `__init__.py` and `errors.py` are left out: the first re-exports, the second is imported by
everyone. A floor is 1 + the highest floor a room imports; rooms of one import cycle share a floor.
`tests/test_layering.py` uses the same reading of imports.
"""

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path


@cache
def imported_modules(source: str, package: str = "") -> tuple[tuple[int, str], ...]:
    """(line, dotted module) of every import, wherever it stands, and of import_module("literal").

    Args:
        package: dotted package of the file, to resolve relative imports; empty leaves them out.
    """
    return tuple(_imported_modules(source, package))


def _imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and not package:
                continue
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            module = node.args[0].value
            if package or not module.startswith("."):
                yield node.lineno, resolve_name(module, package)


def module_imports(module_folder: Path) -> dict[Path, set[Path]]:
    """File below `module_folder` -> the files below it that it imports (paths relative to it)."""
    name = module_folder.name
    files = {path.relative_to(module_folder) for path in sorted(module_folder.rglob("*.py"))}
    of_module: dict[str, Path] = {}
    for file in files:
        parts = (name, *file.with_suffix("").parts)
        of_module[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    arrows: dict[Path, set[Path]] = {file: set() for file in files}
    for file in files:
        package = ".".join((name, *file.parent.parts))
        for _, module in imported_modules((module_folder / file).read_text(encoding="utf-8"), package):
            target = of_module.get(module)
            if target is not None and target != file and target.name != "__init__.py":
                arrows[file].add(target)
    return arrows


def rooms(module_folder: Path) -> dict[str, set[str]]:
    """Room -> rooms that it imports. A room is the first part of a file's path below `module_folder`."""
    graph: dict[str, set[str]] = {}
    for file, targets in module_imports(module_folder).items():
        if file.parts[0] in ("__init__.py", "errors.py"):
            continue
        arrows = graph.setdefault(file.parts[0], set())
        arrows |= {target.parts[0] for target in targets} - {file.parts[0], "__init__.py", "errors.py"}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of rooms that import one another, directly or through others."""
    reached = {room: _reachable(graph, room) for room in graph}
    groups = {tuple(sorted(other for other in reached[room] if room in reached[other])) for room in graph}
    return sorted(group for group in groups if len(group) > 1)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        fresh = graph[pending.pop()] - seen
        seen |= fresh
        pending += fresh
    return seen


def num_floors(graph: dict[str, set[str]]) -> int:
    """Number of floors on which the rooms stand."""
    together = {room: set(group) for group in cycles(graph) for room in group}
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            group = together.get(room, {room})
            below = set().union(*(graph[member] for member in group)) - group
            floors[room] = 1 + max((floor(other) for other in below), default=0)
        return floors[room]

    return max(map(floor, graph), default=0)


def main() -> None:
    """Prints one line per package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout to read")
    parser.add_argument("packages", nargs="*", help="names below packages/; all by default")
    args = parser.parse_args()
    names = args.packages or sorted(path.parent.name for path in args.root.glob("packages/*/pyproject.toml"))
    print(f"{'package':<16}{'rooms':>6}{'arrows':>8}{'floors':>8}{'files':>7}{'lines':>8}  cycles")
    for name in names:
        folder = args.root / "packages" / name / name
        graph = rooms(folder)
        files = list(folder.rglob("*.py"))
        num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        num_arrows = sum(map(len, graph.values()))
        circles = "; ".join(" ~ ".join(group) for group in cycles(graph)) or "none"
        print(f"{name:<16}{len(graph):>6}{num_arrows:>8}{num_floors(graph):>8}{len(files):>7}{num_lines:>8}  {circles}")


if __name__ == "__main__":
    main()
