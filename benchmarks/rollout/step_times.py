"""Time of vLLM's decoding steps by part: a vLLM plugin, and the readings of it.

`plugin_folder` makes a folder that, on PYTHONPATH, lets vLLM load this file in each of its processes. There it times
the stages of every step and adds them up in memory-mapped arrays: one file for the engine core and one for the front
end, in the folder that the variable PLINTH_STEP_TIMES names.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

FOLDER = "PLINTH_STEP_TIMES"
STAGES = ("steps", "schedule", "submit", "wait for GPU", "update", "send (thread)", "CPU of process")
"""Of the engine core. Seconds, except for the number of steps. Sending runs in a thread beside the others."""
FRONT_END = ("messages", "process outputs", "CPU of process")


def plugin_folder(folder: Path) -> Path:
    """Write a distribution that registers this file as a vLLM plugin; returns the folder for PYTHONPATH."""
    info = folder / "plinth_step_times-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plinth-step-times\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstep_times = benchmarks.rollout.step_times:register\n"
    )
    return folder


def read(folder: Path) -> dict[str, float]:
    """Totals since the start, by stage; those of the front end are prefixed."""
    core, front = _totals(folder, "core", STAGES), _totals(folder, "front", FRONT_END)
    measured = dict(zip(STAGES, core.tolist(), strict=True))
    return measured | {f"front end: {name}": value for name, value in zip(FRONT_END, front.tolist(), strict=True)}


def _totals(folder: Path, role: str, names: tuple[str, ...]) -> Any:
    path = folder / f"{role}.f64"
    if not path.exists():
        path.write_bytes(bytes(8 * len(names)))
    return numpy.memmap(path, numpy.float64, "r+", shape=(len(names),))


@functools.cache
def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.executor import uniproc_executor
    from vllm.v1.serial_utils import MsgpackEncoder

    folder = Path(os.environ[FOLDER])
    core, front = _totals(folder, "core", STAGES), _totals(folder, "front", FRONT_END)
    executor, future = uniproc_executor.UniProcExecutor, uniproc_executor.AsyncOutputFuture
    in_core = set[bool]()  # the front end encodes requests with the same class

    _time(Scheduler, "schedule", core, 1)
    _time(executor, "execute_model", core, 2)
    _time(executor, "sample_tokens", core, 2)
    _time(future, "result", core, 3)
    _time(Scheduler, "update_from_output", core, 4, count=0, cpu=6, then=functools.partial(in_core.add, True))
    _time(MsgpackEncoder, "encode_into", core, 5, only=lambda: bool(in_core))
    _time(OutputProcessor, "process_outputs", front, 1, count=0, cpu=2)


def _time(
    owner: Any,
    name: str,
    totals: Any,
    place: int,
    *,
    count: int | None = None,
    cpu: int | None = None,
    only: Callable[[], bool] = lambda: True,
    then: Callable[[], Any] = lambda: None,
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        measured = original(*args, **kwargs)
        if only():
            totals[place] += time.perf_counter() - begin
        if count is not None:
            totals[count] += 1
        if cpu is not None:
            totals[cpu] = time.process_time()
        then()
        return measured

    setattr(owner, name, timed)
