"""The mutation drill: its list fits the tree, and it tells caught faults from survivors and from broken tests."""

import re
import subprocess
from pathlib import Path

import pytest

from scripts.mutants import Fault, MutantError, chosen, drill, read_faults

REPO = Path(__file__).resolve().parents[1]
FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_every_fault_is_found_once_and_its_tests_exist(fault: Fault) -> None:
    fault.planted(REPO)
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert re.search(rf"^def {function.partition('[')[0]}", (REPO / file).read_text(), re.MULTILINE), test


def a_fault(old: str = "n + 1", new: str = "n + 2", tests: tuple[str, ...] = ("test_it.py",)) -> Fault:
    return Fault(name="a_fault", file="packages/thing/thing/__init__.py", old=old, new=new, tests=tests)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis takes seconds to import
    (tmp_path / "packages/thing/thing").mkdir(parents=True)
    (tmp_path / "packages/thing/thing/__init__.py").write_text("def up(n):\n    return n + 1  # 1\n")
    (tmp_path / "test_it.py").write_text(
        """
import subprocess, sys
import thing
def test_child():
    subprocess.run([sys.executable, "-c", "import thing; assert thing.up(1) == 2"], check=True)
def test_none():
    assert thing.up
def test_wrong():
    assert thing.up(1) == 7
"""
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_faults_are_caught_also_in_subprocesses_or_survive_or_have_broken_tests(tree: Path) -> None:
    verdicts = {"test_child": "caught", "test_none": "SURVIVED", "test_wrong": "BROKEN"}
    faults = [a_fault(tests=(f"test_it.py::{test}",)) for test in verdicts]
    results = drill(tree, faults, jobs=1, probe=False)
    assert {result.fault.tests[0].partition("::")[2]: result.verdict for result in results} == verdicts
    assert "n + 1" in (tree / "packages/thing/thing/__init__.py").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n - 1", "n", "0 times"),
        ("1", "2", "2 times"),
        ("# 1", "# 2", "does not change the program"),
        ("n + 1", "n +", "no Python"),
    ],
)
def test_a_fault_that_does_not_fit_the_tree_is_refused(tree: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(MutantError, match=message):
        next(drill(tree, [a_fault(old, new)], jobs=1, probe=False))


def test_an_unknown_name_is_refused_with_those_of_the_list() -> None:
    with pytest.raises(MutantError, match=r"no_such: not in the list, which has a_fault"):
        chosen([a_fault()], ["no_such"])
