"""Lists the hypothesis tests of a folder, with how many cases and examples each is tried on.

python -m plinth_testing.properties packages/rl_core/tests
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def list_properties(path: Path) -> list[tuple[str, int, int]]:
    """(name, parametrized cases, examples per case) of each hypothesis test in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for name, test in vars(module).items():
        if not (name.startswith("test_") and getattr(test, "is_hypothesis_test", False)):
            continue
        cases = 1
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize":
                cases *= len(mark.args[1])
        found.append((name, cases, test._hypothesis_internal_use_settings.max_examples))
    return found


def main() -> None:
    """Prints the properties of each test file of the folder on the command line, and their totals."""
    num_properties = num_cases = num_examples = 0
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))  # helpers beside the tests
    for path in sorted(folder.glob("test_*.py")):
        rows = list_properties(path)
        if rows:
            print(f"\n{path.name}")
        for name, cases, examples in rows:
            print(f"  {name.removeprefix('test_').replace('_', ' '):72s} {cases:3d} x {examples}")
            num_properties, num_cases = num_properties + 1, num_cases + cases
            num_examples += cases * examples
    print(f"\n{num_properties} properties, {num_cases} cases, up to {num_examples} examples")


if __name__ == "__main__":
    main()
