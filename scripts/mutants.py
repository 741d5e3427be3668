"""Mutation drill: plants the faults of `mutants.toml` one at a time in a copy of the tree and reports which tests fail.

    python scripts/mutants.py [--jobs N] [--list] [FAULT ...]

A fault is caught if one of its tests fails with it and all of them pass without it. The copy has a virtual environment
of its own, whose only other source of packages is the site-packages of the running interpreter without its .pth files.
Subprocesses, forked ranks and Ray workers therefore cannot import the original tree, which the editable installs name.

Exit code: 0 if every fault is caught, 1 if one survives or its tests cannot tell, 2 for a bad list or name.
"""

import argparse
import ast
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 600.0
"""For the tests of one fault."""


class MutantError(ValueError):
    """The list of faults does not fit the tree, or a name is not in the list."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One replacement in one package. Files, lines and line breaks may change."""

    name: str
    package: str
    """Name of the package, or `apps`."""
    function: str = ""
    """Function, or `Class.method`, that has the old text; empty: the package has it once."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Node ids of pytest: a file, or file::function for all cases of a function."""

    def planted(self, root: Path) -> tuple[Path, str]:
        """The file, relative to `root`, and its text with the fault.

        Raises:
            MutantError: the old text is not found exactly once, or the new text is no Python.
        """
        places = list(self._places(root))
        if len(places) != 1:
            where = f"{self.package} {self.function}".strip()
            raise MutantError(
                f"{self.name}: {where} has the old text {len(places)} times instead of once: {self.old!r}"
            )
        [(path, text, match)] = places
        changed = text[: match.start()] + self.new + text[match.end() :]
        try:
            if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
                raise MutantError(f"{self.name}: the new text does not change the program")
        except SyntaxError as error:
            raise MutantError(f"{self.name}: {path} is no Python with the new text: {error}") from None
        return path.relative_to(root), changed

    def _places(self, root: Path) -> Iterator[tuple[Path, str, re.Match[str]]]:
        old = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        folder = root / "apps" if self.package == "apps" else root / "packages" / self.package / self.package
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text()
            if old.search(text):
                for begin, end in _functions(text, self.function) if self.function else [(0, len(text))]:
                    yield from ((path, text, match) for match in old.finditer(text, begin, end))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Verdict of the tests about a fault."""

    fault: Fault
    verdict: str
    """caught, SURVIVED or BROKEN."""
    seconds: float
    detail: str
    """The test that failed first, or why the verdict is BROKEN."""


def _functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each function of this name in a module; `name` may have the class before it."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    nodes = [("", node) for node in ast.parse(text).body]
    for prefix, node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            qualname = f"{prefix}{node.name}"
            if f".{qualname}".endswith(f".{name}"):
                yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
            else:
                nodes += [(f"{qualname}.", inner) for inner in node.body]


def read_faults(path: Path = LIST) -> list[Fault]:
    """The faults of a list, in its order."""
    tables = tomllib.loads(path.read_text())
    return [Fault(name=name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """The named faults; all without names. Raises MutantError for a name that is not in the list."""
    known = {fault.name: fault for fault in faults}
    if unknown := [name for name in names if name not in known]:
        raise MutantError(f"{', '.join(unknown)}: not in the list, which has {', '.join(known)}")
    return [known[name] for name in names] or list(faults)


class Copy:
    """A copy of the tree in `folder`, with a virtual environment that imports the packages of the copy."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.root = folder
        self._process: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=original, capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (original / name).is_file():  # not deleted meanwhile
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(original / name, folder / name)
        environment = folder / ".venv"
        venv.create(environment, symlinks=True, with_pip=False)
        self.python = environment / "bin" / "python"
        paths = [*sorted(map(str, (folder / "packages").iterdir())), str(folder), sysconfig.get_path("purelib")]
        (site,) = environment.glob("lib/python3*/site-packages")
        (site / "copy.pth").write_text("\n".join(paths) + "\n")

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault inside the context."""
        file, changed = fault.planted(self.root)
        path = self.root / file
        original = path.read_text()
        path.write_text(changed)
        try:
            yield
        finally:
            path.write_text(original)

    def run(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> tuple[int | None, str]:
        """Exit code (None: stopped after `timeout_s`) and output of the copy's Python, in the copy."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        # No bytecode: its time stamp cannot tell two versions of a file that are a moment apart.
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            self._process = subprocess.Popen(
                [str(self.python), *arguments], cwd=self.root, env=env, stdout=log, stderr=log, start_new_session=True
            )
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout_s)
            self.stop()  # also what an ended process left behind
            self._process.wait()
            self._process = None
            log.seek(0)
            return code, log.read()

    def stop(self) -> None:
        """Kills what `run` has started and not waited for."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def run_tests(self, tests: Sequence[str], *options: str, timeout_s: float = TIMEOUT_S) -> tuple[int | None, str]:
        """Runs pytest quietly on node ids."""
        quiet = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
        return self.run("-m", "pytest", *quiet, *options, *tests, timeout_s=timeout_s)


_PROBE = """
import importlib.util, json, subprocess, sys
names = sys.argv[2].split(",")
def folders(names):
    return [importlib.util.find_spec(name).submodule_search_locations[0] for name in names]
imported = {"this process": folders(names)}
if sys.argv[1] == "all":
    child = [sys.executable, __file__, "one", sys.argv[2]]
    imported["a subprocess"] = json.loads(subprocess.check_output(child))["this process"]
    import ray
    quiet = dict(include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.init("local", num_cpus=1, _node_ip_address="127.0.0.1", **quiet)
    imported["a Ray worker"] = ray.get(ray.remote(folders).remote(names))
print(json.dumps(imported))
"""


def check_imports(copy: Copy) -> None:
    """Raises MutantError unless a process, its subprocess and a Ray worker all import the copy's packages."""
    names = [path.parent.name for path in sorted(copy.root.glob("packages/*/*/__init__.py"))
             if path.parent.name not in ("tests", "examples")]  # fmt: skip
    probe = copy.root / "mutants_probe.py"
    probe.write_text(_PROBE)
    code, output = copy.run(str(probe), "all", ",".join([*names, "apps"]))
    probe.unlink()
    if code != 0:
        raise MutantError(f"the copy cannot import its packages:\n{output[-3000:]}")
    for where, folders in json.loads(output.splitlines()[-1]).items():
        if foreign := [folder for folder in folders if not Path(folder).is_relative_to(copy.root)]:
            raise MutantError(f"{where} imports {', '.join(foreign)} instead of the copy in {copy.root}")


def failures_without_fault(copy: Copy, tests: Sequence[str]) -> dict[str, str]:
    """Reason for which each of these tests says nothing about a fault: it fails without one, or no case of it runs."""
    if not tests:
        return {}
    code, output = copy.run_tests(tests, "-rA", "--tb=short", timeout_s=3 * TIMEOUT_S)
    if code not in (0, 1):  # a file that cannot be imported hides the others
        by_file = [[test for test in tests if _file(test) == file] for file in dict.fromkeys(map(_file, tests))]
        if len(by_file) > 1 and code in (2, 4):
            return {test: why for part in by_file for test, why in failures_without_fault(copy, part).items()}
        return dict.fromkeys(tests, f"pytest ended with {code} without the fault: {_reason(output)}")
    reasons = {}
    for test in tests:
        failed = [node for node in _nodes(output, "FAILED", "ERROR") if _selects(test, node)]
        if failed:
            reasons[test] = f"{failed[0]} fails without the fault"
        elif not any(_selects(test, node) for node in _nodes(output, "PASSED")):
            reasons[test] = f"no case of {test} runs on this machine"
    return reasons


def _nodes(output: str, *outcomes: str) -> list[str]:
    """Node ids of pytest's short summary (-rA) with these outcomes."""
    lines = (line.split(" ", 1) for line in output.splitlines() if line.startswith(outcomes))
    return [rest[0].split(" - ", 1)[0] for _, *rest in lines if rest and "::" in rest[0]]


def _reason(output: str) -> str:
    """The line of pytest's output that says most about an error outside of tests."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E  ", "ERROR"))]
    return (errors or lines[-1:] or ["no output"])[0]


def _file(test: str) -> str:
    return test.partition("::")[0]


def _selects(test: str, node: str) -> bool:
    return node == test or node.startswith((f"{test}::", f"{test}["))


def try_fault(copy: Copy, fault: Fault) -> Result:
    """Runs the tests of a fault with it."""
    started = time.monotonic()
    with copy.with_fault(fault):
        code, output = copy.run_tests(fault.tests, "-x", "--tb=line")
    failed = _nodes(output, "FAILED")  # a fixture's ERROR says little: ranks that did not start in time, say
    if code == 1 and failed:
        verdict, detail = "caught", failed[0].rpartition("::")[2]
    elif code == 0:
        verdict, detail = "SURVIVED", "all of its tests pass"
    else:
        end = "did not end" if code is None else f"ended with {code}"
        verdict, detail = "BROKEN", f"pytest {end}: {_reason(output)}"
    return Result(fault=fault, verdict=verdict, seconds=time.monotonic() - started, detail=detail)


def drill(original: Path, faults: Sequence[Fault], *, jobs: int, probe: bool = True) -> Iterator[Result]:
    """Tries the faults, `jobs` at a time, each job in a copy of its own; yields results as they come.

    Raises:
        MutantError: a fault does not fit the tree, or (with `probe`) the copies do not import their own packages.
    """
    for fault in faults:
        fault.planted(original)
    # By file: cases of one file share fixtures.
    tests = sorted({test for fault in faults for test in fault.tests})
    files = sorted(set(map(_file, tests)))
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = [Copy(original, Path(folder).resolve() / f"copy{index}") for index in range(jobs)]
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        useless: dict[str, str] = {}

        def attempt(fault: Fault) -> Result:
            if reasons := [useless[test] for test in fault.tests if test in useless]:
                return Result(fault=fault, verdict="BROKEN", seconds=0.0, detail=reasons[0])
            copy = free.get()
            try:
                return try_fault(copy, fault)
            finally:
                free.put(copy)

        try:
            if probe:
                check_imports(copies[0])
            shares = [[test for test in tests if _file(test) in files[index::jobs]] for index in range(jobs)]
            for failures in pool.map(failures_without_fault, copies, shares):
                useless |= failures
            for done in as_completed([pool.submit(attempt, fault) for fault in faults]):
                yield done.result()
        finally:  # after an interrupt the threads wait for processes
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of the list; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the faults and exit")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: allowed: 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tests too
    started = time.monotonic()
    results = []
    try:
        faults = chosen(read_faults(), options.faults)
        if options.list:
            for fault in faults:
                print(f"{fault.name}\n  {fault.planted(REPO)[0]}\n  - {fault.old.strip()}\n  + {fault.new.strip()}")
            return 0
        width = max(len(fault.name) for fault in faults)
        for result in drill(REPO, faults, jobs=options.jobs):
            results.append(result)
            row = f"{result.fault.name:<{width}}  {result.verdict:<8}  {result.seconds:5.1f} s  {result.detail}"
            print(row, flush=True)
    except MutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    num_caught = sum(result.verdict == "caught" for result in results)
    print(f"{num_caught} of {len(faults)} faults caught in {time.monotonic() - started:.0f} s")
    return 0 if num_caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
