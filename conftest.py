"""Shared test settings. Imports nothing heavy, so that collecting one package's tests stays cheap."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# Fewer examples than hypothesis makes by default: scripts/mutants.py shows that they are enough.
NUM_EXAMPLES = 50
# In CI use the same examples every time, so that a failure comes from the change; no deadlines on shared cores.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=NUM_EXAMPLES)
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=NUM_EXAMPLES)
# scripts/test_alone.py asks whether the code runs with what a package declares.
settings.register_profile(
    "few", derandomize=True, deadline=None, max_examples=3, phases=[Phase.explicit, Phase.generate]
)
# scripts/mutants.py asks whether a test fails, not for the smallest example.
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    max_examples=NUM_EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Under `pants test` the heavy stack (torch, ...) comes from .venv, which .pants.bootstrap names. Python processes
# that a test starts find it, and the sandbox's source roots, through the variable that holds Pex's sys.path entries.
_heavy_stack = os.environ.get("PLINTH_SITE_PACKAGES")
_passed_on = "__PEX_EXTRA_SYS_PATH__"
if _heavy_stack and _passed_on in os.environ:
    sys.path.append(_heavy_stack)
    _roots = [os.path.abspath(root) for root in os.environ[_passed_on].split(os.pathsep)]
    os.environ[_passed_on] = os.pathsep.join([*_roots, _heavy_stack])


# What collecting imports is a million objects that stay: searching them for garbage takes a quarter of its time, and
# half a second at each `gc.collect()` of a test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


# Two thirds of the tests of `make test` that start processes are its: on one worker they would be the longest chain.
PARTS = {"packages/ds_engine/tests": 3}
# Groups that take longest: none of them begins when the others end.
FIRST = [
    "packages/rollout_vllm/tests",
    *(f"tests/test_{name}.py" for name in ("rollout_in_training", "sft_end_to_end", "staleness", "vision_end_to_end")),
    *(f"tests/test_{name}.py" for name in ("ppo", "matched_servers")),
    "packages/weight_sync/tests",
]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist, a package's tests that start processes run on one worker: they share servers and ranks.

    Those of tests/ share nothing beyond their file; the largest package has several groups, each of whole files. Groups
    run first, so that no worker ends with a long one.
    """
    if config.pluginmanager.hasplugin("xdist"):
        groups: dict[str, list[pytest.Item]] = {}
        for item in filter(starts_processes, items):
            path = item.path.relative_to(config.rootpath)
            groups.setdefault(str(path if path.parts[0] == "tests" else path.parent), []).append(item)
        order = dict.fromkeys(items, len(FIRST) + 1)
        for name, members in groups.items():
            parts, before = PARTS.get(name, 1), dict[Path, int]()
            for index, item in enumerate(members):
                part = before.setdefault(item.path, index) * parts // len(members)
                item.add_marker(pytest.mark.xdist_group(f"{name}/{part}" if parts > 1 else name))
                order[item] = FIRST.index(name) if name in FIRST else len(FIRST)
        items.sort(key=order.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The last worker begins with tests that start no process: they use the cores while the others' processes wait."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduler(LoadGroupScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            if node is self.nodes[-1] and (alone := next((name for name in self.workqueue if "::" in name), None)):
                self.workqueue.move_to_end(alone, last=False)
            super()._assign_work_unit(node)

    return Scheduler(config, log) if config.getvalue("dist") == "loadgroup" else None


def starts_processes(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "e2e"))
