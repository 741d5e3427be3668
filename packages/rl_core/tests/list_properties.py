"""Print the property tests of this folder by file, with how many cases and examples each is tried on.

Run: python packages/rl_core/tests/list_properties.py
"""

import importlib.util
from pathlib import Path


def properties(path: Path) -> list[tuple[str, int, int]]:
    """(name, parametrised cases, examples per case) of each hypothesis test in the file."""
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
    totals = [0, 0, 0]
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        rows = properties(path)
        if not rows:
            continue
        print(f"\n{path.name}")
        for name, cases, examples in rows:
            print(f"  {name.removeprefix('test_').replace('_', ' '):72s} {cases:3d} x {examples}")
            totals = [totals[0] + 1, totals[1] + cases, totals[2] + cases * examples]
    print(f"\n{totals[0]} properties, {totals[1]} cases, up to {totals[2]} examples")


if __name__ == "__main__":
    main()
