"""Pages of the documentation site: which files are pages, and the text of those that are generated.

Needs neither MkDocs nor torch. A page is named by its path in the site. For a file of the repository this is the path
there, so that relative links between Markdown files work on the site as they do in the repository.
"""

import ast
import dataclasses
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from run_kit.config.help import list_presets
from run_kit.config.schema import Section, entries
from scripts.docs_site.reference import reference_text
from scripts.markdown_links import tokens

REPO = Path(__file__).resolve().parents[2]
PATTERNS = (
    *("README.md", "CONTRIBUTING.md", "docs/**/*.md", "apps/README.md", "benchmarks/**/README.md"),
    *("packages/*/README.md", "packages/*/CHANGELOG.md"),
)
PICTURES = (".svg", ".png", ".css", ".js")
CODE = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".in": "text"}
UPGRADING = "docs/upgrading.md"
# Commands of run_kit that take keys; those of the apps are found.
RUN_KIT_CONFIGS = {
    "runs": "run_kit.runs:RunsConfig",
    "runs compare": "run_kit.run_actions:CompareConfig",
    "runs open": "run_kit.run_actions:OpenConfig",
}


def markdown_files() -> dict[str, Path]:
    """Markdown files of the repository that are pages, by their path in it."""
    return {path.relative_to(REPO).as_posix(): path for pattern in PATTERNS for path in sorted(REPO.glob(pattern))}


def assets() -> dict[str, Path]:
    """Pictures and styles below docs/, by their path in the repository."""
    paths = (path for path in sorted((REPO / "docs").rglob("*")) if path.suffix in PICTURES)
    return {path.relative_to(REPO).as_posix(): path for path in paths}


def generated_pages() -> dict[str, str]:
    """Markdown of every page that no file holds, by its path in the site."""
    pages = {f"reference/config/{_file_name(command)}.md": config_page(command) for command in config_classes()}
    pages |= {f"reference/api/{package}.md": api_page(package) for package in packages()}
    return pages


def source_page(path: Path) -> str:
    """A page with the text of a file that is not Markdown; left out of the search."""
    text = path.read_text(encoding="utf-8")
    fence = "`" * (max(map(len, re.findall(r"`+", text)), default=0) + 3)
    name = path.relative_to(REPO).as_posix()
    head = "---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n"
    return f"{head}\n# {name}\n\n{fence}{CODE[path.suffix]}\n{text}{fence}\n"


def linked_path(page: str, link: str) -> str | None:
    """The path in the repository that a link names, without its anchor; that of README.md for a folder that has one.

    None for links to other sites, links inside the page, and paths that do not exist.
    """
    target = link.partition("#")[0]
    if not target or re.match(r"[a-z][a-z+.-]*:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path.startswith("..") or not (REPO / path).exists():
        return None
    readme = posixpath.normpath(posixpath.join(path, "README.md"))
    return readme if (REPO / readme).is_file() else path


def lists_by_four(markdown: str) -> str:
    """The same Markdown with the content of list items indented by four spaces a level, as MkDocs' dialect reads it.

    GitHub's needs the width of the marker only: two spaces after `* `, three after `1. `.
    """
    lines = markdown.split("\n")
    # For every line, outermost item first: is it the item's first line, and the width of the item's marker.
    widths: list[list[tuple[bool, int]]] = [[] for _ in lines]
    for token in tokens(markdown):
        if token.type == "list_item_open" and token.map is not None:
            first, end = token.map
            marker = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", lines[first][sum(width for _, width in widths[first]) :])
            if marker is not None:
                for number in range(first, end):
                    widths[number].append((number == first, len(marker.group())))
    return "\n".join(_indented(line, around) for line, around in zip(lines, widths, strict=True))


def _indented(line: str, around: Sequence[tuple[bool, int]]) -> str:
    outer = [width for is_first, width in around if not is_first]
    indent = len(line) - len(line.lstrip(" "))
    # A lazy line of a paragraph may be indented less than its item.
    return " " * (4 * len(outer)) + line[min(sum(outer), indent) :] if line.strip() else line


# The navigation


def expand_nav(nav: Sequence[Any], pages: Sequence[str]) -> list[Any]:
    """A navigation in which every entry with `*` is replaced by the pages that match it and are not named elsewhere.

    Raises:
        ValueError: an entry with `*` that no page matches.
    """
    named = {entry for entry in nav_pages(nav) if "*" not in entry}

    def expand(entry: Any) -> Iterator[Any]:
        if isinstance(entry, dict):
            for title, value in entry.items():
                yield {title: expand_nav_list(value) if isinstance(value, list) else value}
        elif "*" in entry:
            # `*` stands for one folder or file name, as in a shell.
            matching = [page for page in pages if fnmatchcase(page, entry) and page.count("/") == entry.count("/")]
            if not matching:
                raise ValueError(f"the navigation of mkdocs.yml has {entry}, which no page matches")
            yield from sorted(set(matching) - named)
        else:
            yield entry

    def expand_nav_list(entries: Sequence[Any]) -> list[Any]:
        return [item for entry in entries for item in expand(entry)]

    return expand_nav_list(nav)


def nav_pages(nav: Any) -> Iterator[str]:
    """The pages (or patterns) of a navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(entry)


# Configuration


def config_classes() -> dict[str, type]:
    """Configuration class of each command: `grpo`, `bench six_case`, `slurm`, …

    Those of an app are the classes NAMEConfig of its config.py that are neither a section nor a base of another there.
    """
    classes: dict[str, type] = {}
    for file in sorted(REPO.glob("apps/*/config.py")):
        app = file.parent.name
        roots = _root_classes(importlib.import_module(f"apps.{app}.config"))
        for cls in roots:
            classes[app if len(roots) == 1 else f"{app} {_snake(cls.__name__.removesuffix('Config'))}"] = cls
    for command, place in RUN_KIT_CONFIGS.items():
        module, _, name = place.partition(":")
        classes[command] = getattr(importlib.import_module(module), name)
    return classes


def config_page(command: str) -> str:
    """Every key of a command."""
    presets = REPO / "apps" / command.split()[0] / "presets"
    return reference_text(
        config_classes()[command],
        title=f"plinth {command}",
        presets=list_presets(presets),
        overlays=list_presets(presets / "overlays"),
    )


def _root_classes(module: Any) -> list[type]:
    own = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and dataclasses.is_dataclass(cls)
        and cls.__name__.endswith("Config")
    ]
    sections = {entry.cls for cls in own for entry in entries(cls) if isinstance(entry, Section)}
    bases = {base for cls in own for base in cls.__mro__[1:]}
    return [cls for cls in own if cls not in sections | bases]


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _file_name(command: str) -> str:
    return command.replace(" ", "_")


# The Python API


def packages() -> list[str]:
    """The packages in the order of their names."""
    return sorted(path.parent.name for path in REPO.glob("packages/*/*/__init__.pyi"))


def public_names(package: str) -> list[tuple[str, str]]:
    """(module, name) of everything that a package exports, in the order of its stub."""
    stub = REPO / "packages" / package / package / "__init__.pyi"
    return [
        (node.module or "", alias.asname or alias.name)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def api_page(package: str) -> str:
    """The public names of a package under the folders that define them, for mkdocstrings."""
    module = ast.parse((REPO / "packages" / package / package / "__init__.py").read_text(encoding="utf-8"))
    blocks = [f"# {package}", ast.get_docstring(module) or "", f"Import these names from `{package}`."]
    by_room: dict[str, list[str]] = {}
    for path, name in public_names(package):
        by_room.setdefault(path.split(".")[0], []).append(f"::: {package}.{path}.{name}")
    for room, names in sorted(by_room.items()):
        blocks += [f"## {room}", *names]
    return "\n\n".join(blocks) + "\n"


# The upgrade guide


def upgrade_tables() -> str:
    """The text below the upgrade guide: the newest changes of every package."""
    blocks = ["## Newest changes"]
    for package in packages():
        version, text = _newest_changes(REPO / "packages" / package / "CHANGELOG.md")
        blocks += [f"### {package} {version}", text]
        blocks.append(f"[Older versions](../packages/{package}/CHANGELOG.md)")
    return "\n\n".join(blocks) + "\n"


def _newest_changes(file: Path) -> tuple[str, str]:
    """The heading of the newest version in a CHANGELOG, and what it says."""
    _, heading, text = re.split(r"^## (.*)$", file.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)
    return heading, re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
