"""containers/: its files name what exists, what .dockerignore lets through, and the set-up of the machine itself."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

REPO = Path(__file__).resolve().parents[1]
CONTAINERFILE = (REPO / "containers" / "Containerfile").read_text(encoding="utf-8")
RECIPE = (REPO / "containers" / "plinth.def").read_text(encoding="utf-8")
RULES = [
    line
    for line in (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def sources() -> list[str]:
    """The paths that the Containerfile copies."""
    lines = re.findall(r"^COPY (.+)$", CONTAINERFILE, re.MULTILINE)
    return [path for line in lines for path in line.split()[:-1]]


def is_in_context(path: str) -> bool:
    """True if `.dockerignore` lets this path through: the last rule that matches it or a folder above it decides."""
    folders = [str(each) for each in (PurePosixPath(path), *PurePosixPath(path).parents)][:-1]
    taken = True
    for rule in RULES:
        pattern = rule.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        if any(
            fnmatch(each.rpartition("/")[2], anywhere) if anywhere != pattern else fnmatch(each, pattern)
            for each in folders
        ):
            taken = rule.startswith("!")
    return taken


def tracked(*folders: str) -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z", *folders], cwd=REPO, capture_output=True, text=True, check=True)
    return [path for path in listing.stdout.split("\0") if path]


def test_everything_copied_is_a_tracked_file_that_reaches_the_build() -> None:
    for source in sources():
        files = tracked(source)
        assert files, f"containers/Containerfile copies {source}, which is not in the repository"
        assert [path for path in files if not is_in_context(path)] == []


def test_caches_runs_and_history_stay_outside() -> None:
    outside = (".git/config", ".venv/bin/python", "outputs/run/config.yaml", "packages/rl_core/build/lib/a.py")
    assert [path for path in outside if is_in_context(path)] == []


def test_the_image_installs_the_pins_of_the_repository() -> None:
    assert {"3rdparty/cpu.txt", "3rdparty/cuda.txt", "scripts/setup.sh"} <= set(sources())
    assert CONTAINERFILE.count("scripts/setup.sh &&") == 2


def test_the_recipe_for_apptainer_uses_the_paths_of_the_image() -> None:
    workdir = re.search(r"^WORKDIR (/opt/\S+)$", CONTAINERFILE, re.MULTILINE)
    assert workdir is not None
    programs = set(re.findall(r"(/\S+)/\.venv/bin", RECIPE))
    assert programs == {workdir[1]}
    assert f"ENV PATH={workdir[1]}/.venv/bin:" in CONTAINERFILE
