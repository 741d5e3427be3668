"""Markdown files of the repository: links, keys and commands exist, code blocks parse. `make docs` checks the site."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from run_kit.config.schema import Key, entries, field_doc
from scripts.docs_site import pages
from scripts.docs_site.check import foreign_loads
from scripts.markdown_links import anchors, code_blocks, targets

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "packages", "benchmarks")
FILES = [
    *sorted(path for folder in FOLDERS for path in (REPO / folder).rglob("*.md")),
    *(REPO / "README.md", REPO / "CONTRIBUTING.md"),
]
CURRENT = [file for file in FILES if file.name != "CHANGELOG.md"]


def name(file: Path) -> str:
    return str(file.relative_to(REPO))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_links_name_files_and_anchors_that_exist(file: Path) -> None:
    for link, path, anchor in targets(file):
        assert path.exists(), f"{name(file)}: no file for the link {link}"
        if anchor:
            assert path.suffix == ".md", f"{name(file)}: {link} has an anchor in a file without headings"
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name(file)}: no heading for {link}"


@pytest.mark.parametrize("file", CURRENT, ids=name)
def test_code_blocks_parse(file: Path) -> None:
    shell = []
    assert not re.search(r"^(<{7}|>{7}) ", file.read_text(encoding="utf-8"), re.MULTILINE), "a conflict of a merge"
    for block in code_blocks(file.read_text(encoding="utf-8")):
        if block.language == "python":
            # `await` at the top level stands for the body of a coroutine.
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
            compile(block.text, f"{name(file)}:{block.line}", "exec", flags=flags)
        elif block.language in ("bash", "sh"):
            shell.append(f"{{ : {block.line}\n{block.text}\n}}\n")
    parsed = subprocess.run(["bash", "-n"], input="".join(shell), text=True, capture_output=True, check=False)
    assert parsed.returncode == 0, f"{name(file)}: {parsed.stderr}"


def test_pip_installs_what_is_published_or_in_this_repository() -> None:
    """No distribution of this repository is on an index: it is a path, or from a folder of wheels."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py", "*.toml"], cwd=REPO, text=True, capture_output=True)
    wrong = [
        f"{file}: {line.strip()}"
        for file in listed.stdout.split()
        for line in (REPO / file).read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install\b[^`]*?[ '\"]plinth[-_\w]*([\[' \"`]|$)", line) and "--find-links" not in line
    ]
    assert wrong == []


def test_the_extras_of_the_installation_page_are_those_of_the_packages() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (REPO / "docs/install.md").read_text(encoding="utf-8"), re.MULTILINE)
    for folder, extras in rows:
        file = next(REPO.glob(f"packages/{folder}/pyproject.toml"), REPO / folder / "pyproject.toml")
        declared = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        assert set(re.findall(r"`([\w-]+)`", extras)) == declared.keys() - {"test"}, folder


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    known = [*pages.markdown_files(), *pages.generated_pages()]
    assert sorted(pages.nav_pages(pages.expand_nav(nav, known))) == sorted(known), "name new pages in mkdocs.yml"


@pytest.mark.parametrize(
    "loading",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        "<style>a { background: url('https://img.example/b.png') }</style>",
    ],
)
def test_a_page_that_loads_from_elsewhere_is_refused(loading: str) -> None:
    assert foreign_loads(f"<html><body>{loading}</body></html>")
    assert not foreign_loads('<link rel="canonical" href="https://a.example/"><a href="https://b.example/">b</a>')


ENTRIES = {entry.path: isinstance(entry, Key) for cls in pages.config_classes().values() for entry in entries(cls)}
"""Dotted paths of all keys (True) and sections of all commands."""
NAMED = re.compile(r"(?<![\w./:-])([a-z_]+(?:\.\w+)+)(?![\w./(*\u2026-])")
"""`section.key`, and not a part of an address, a path, a call or a pattern."""
OTHERS = {"algorithm.clip_hihg", "actor.zero.stag", "batch.columns", "batch.response_lens_S"}
OTHERS |= {f"{section}.deepspeed" for section in ("actor", "critic", "engine")}
"""Typos that a page shows on purpose, attributes of Python objects, and keys of files (`run_kit.cli.FileKey`)."""


def unknown_keys(text: str) -> set[str]:
    """Words in the code of a page that look like a key of some command and are none."""
    shell = [block.text for block in code_blocks(text) if block.language in ("bash", "sh", "console")]
    named = {key for code in [*re.findall(r"`([^`\n]+)`", text), *shell] for key in NAMED.findall(code)}
    sections = {path.split(".")[0] for path in ENTRIES}
    files = re.compile(r".*\.(csv|json|jsonl|md|parquet|py|sh|tsv|txt|yaml)")
    return {
        key for key in named - OTHERS if key.split(".")[0] in sections and not files.fullmatch(key) and not _exists(key)
    }


def _exists(key: str) -> bool:
    """A key or a section, or below a key whose value is a mapping; the user chooses the names of terms."""
    path = re.sub(r"^reward\.terms\.\w+", "reward.terms.NAME", key)
    above = [path[: dot.start()] for dot in re.finditer(r"\.", path)]
    return path in ENTRIES or any(ENTRIES.get(one, False) for one in above)


@pytest.mark.parametrize("file", [file for file in CURRENT if file.name != "from-verl.md"], ids=name)
def test_keys_that_a_page_names_exist(file: Path) -> None:
    assert unknown_keys(file.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("command", pages.config_classes())
def test_every_key_of_a_command_is_documented(command: str) -> None:
    """`--help` and the site read the string below a field, and no comment."""
    keys = [entry for entry in entries(pages.config_classes()[command]) if isinstance(entry, Key)]
    assert [key.path for key in keys if not field_doc(key.owner, key.name)] == []


def _commands() -> set[str]:
    """The commands of `plinth`, as the distributions of this repository register them."""
    files = [*REPO.glob("packages/*/pyproject.toml"), REPO / "apps/pyproject.toml"]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {command for project in projects for command in project.get("entry-points", {}).get("plinth.commands", {})}


COMMANDS = _commands()
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PRESETS = {path.stem for path in REPO.glob("apps/*/presets/**/*.yaml")}


@pytest.mark.parametrize("file", CURRENT, ids=name)
def test_commands_targets_presets_and_modules_of_shell_lines_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    shell = [block.text for block in code_blocks(text) if block.language in ("bash", "sh", "console", "")]
    lines = [
        line.strip().removeprefix("$ ") for line in [*re.findall(r"`([^`\n]+)`", text), *"\n".join(shell).split("\n")]
    ]
    for line in lines:
        if named := re.match(r"plinth ([a-z-]+)", line):
            assert named[1] in COMMANDS, line
        if named := re.match(r"make ([a-z-]+)", line):
            assert named[1] in MAKE_TARGETS, line
        for module in re.findall(r"python -m ((?:apps|benchmarks|scripts)\.[\w.]+)", line):
            parts = REPO / module.replace(".", "/")
            assert parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file(), line
        if line.startswith(("plinth ", "python -m apps.")):
            given = re.findall(r"\b(?:preset|overlay)=([a-z_0-9]+)(?![\w./])", line)
            assert set(given) <= PRESETS, line
