"""Entry script of the server process: prepares the process, then runs vLLM's OpenAI server.

A small script, instead of `-m vllm...`, also prevents vLLM's spawned children from importing the whole HTTP front end
as their main module.
"""

import ctypes
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

AUTH_MODULE = "plinth_server_auth"
VERSIONS_MODULE = "plinth_server_policy_versions"
FAST_PATHS_VARIABLE = "PLINTH_ROLLOUT_FAST_PATHS"
FORK_VARIABLE = "PLINTH_ROLLOUT_FORK"
BUFFER_VARIABLE = "PLINTH_ROLLOUT_BUFFER"
GPU_VARIABLE = "PLINTH_ROLLOUT_GPU"
EXACT_VARIABLE = "PLINTH_ROLLOUT_EXACT"
ROUTES_VARIABLE = "PLINTH_ROLLOUT_ROUTES"
DRAFTING_VARIABLE = "PLINTH_ROLLOUT_DRAFTING"
SPECULATIVE_VARIABLE = "PLINTH_ROLLOUT_SPECULATIVE"
CORES_VARIABLE = "PLINTH_ROLLOUT_CORES"
QUANTIZATION_VARIABLE = "PLINTH_ROLLOUT_QUANTIZATION"
_PR_SET_PDEATHSIG = 1


def _load(name: str, file: str) -> Any:
    """Make a neighboring file importable under a fixed name, independently of where this package is installed."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def uses_fast_paths() -> bool:
    """The switch `RolloutConfig.fast_paths`; on unless the launcher turned it off."""
    return os.environ.get(FAST_PATHS_VARIABLE) != "0"


def buffer_tokens(patch: Any, *, front_end: bool) -> None:
    """Make the engine core, and `front_end`, buffer the tokens of clients that read only ids and log-probs."""
    buffering = _load("plinth_server_buffering", "fast/buffering.py")
    versions = sys.modules.get(VERSIONS_MODULE) or _load(VERSIONS_MODULE, "policy_versions.py")
    buffering.buffer_in_engine_core(patch.BUFFERING.replace, patch.IDS_ONLY, versions.PUBLISH)
    if front_end:
        buffering.buffer_in_front_end(patch.BUFFERING.replace, patch.IDS_ONLY)


def keep_the_store_in_a_file(patch: Any) -> None:
    """Let workers meet in a file among the server's sockets, as in vLLM 0.32, and not at an open port."""
    from vllm.utils import network_utils

    if not hasattr(network_utils, "get_file_store_init_method") and patch.STORE.check():
        folder = os.environ["VLLM_RPC_BASE_PATH"]

        def init_method(ip: str, port: int) -> str:
            return f"file://{folder}/store:{uuid4().hex}"  # vLLM's CPU worker names shared memory by what follows ":"

        patch.STORE.replace(network_utils, get_distributed_init_method=init_method)


def prepare_engine_core(patch: Any) -> None:
    """Prepare this process for the engine core and its workers, which are forked from it or do it again."""
    if os.environ.get(QUANTIZATION_VARIABLE) == "bitsandbytes":  # no fast path: without it the weights are wrong
        _load("plinth_server_quantizing", "quantizing.py").load_on_one_stream()
    if os.environ.get(EXACT_VARIABLE) == "1":
        from rollout_vllm.servers.exact.install import match_transformers

        patch.EXACT.check()
        match_transformers(patch.EXACT.replace, on_gpu=os.environ.get(GPU_VARIABLE) == "1")
    if os.environ.get(ROUTES_VARIABLE) == "1":
        patch.ROUTES.check()
        _load("plinth_server_routes", "routes.py").record_routes(patch.ROUTES.replace)
    if os.environ.get(SPECULATIVE_VARIABLE) == "1":
        patch.VERIFYING.check()
        speculating = _load("plinth_server_speculating", "speculating.py")
        speculating.verify_by_request(patch.VERIFYING.replace, on_gpu=os.environ.get(GPU_VARIABLE) == "1")
    if uses_fast_paths():
        speed_up_engine_core(patch)


def draft_where_it_pays(patch: Any) -> None:
    """Measure whole steps, hence after `buffer_tokens`, whose steps look at fewer requests."""
    if os.environ.get(DRAFTING_VARIABLE) == "1" and uses_fast_paths() and patch.DRAFTING.check():
        _load("plinth_server_speculating", "speculating.py").draft_where_it_pays(patch.DRAFTING.replace)


def speed_up_engine_core(patch: Any) -> None:
    """Short scheduling, faster scores and attention, and no needless work when the engine core starts."""
    if patch.DECODING.check():
        _load("plinth_server_decoding", "fast/decoding.py").skip_needless_block_searches(patch.DECODING.replace)
    if os.environ.get(GPU_VARIABLE) != "1":
        return
    if patch.WARM_UP.check():
        _load("plinth_server_start", "fast/start.py").skip_warm_up_of_routers(patch.WARM_UP.replace)
    if os.environ.get(EXACT_VARIABLE) == "1":  # its scores and attention are those of the trainer
        return
    if patch.SCORES.check():
        _load("plinth_server_scores", "fast/scores.py").divide_rows(patch.SCORES.replace)
    # A batch-invariant server computes a request the same beside any other; the number of them decides who computes it.
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1" and patch.ATTENTION.check():
        _load("plinth_server_attention", "fast/attention.py").attend_together(patch.ATTENTION.replace)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent process, `parent`, ends.

    The supervisor ends engine core and workers; if it is killed itself, only the front end dies with it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def end_forks_with_parent() -> None:
    """Make every process that this one and its forks fork end with its parent.

    Forks of other threads than the main one are left alone: to the kernel, a parent ends with the forking thread.
    """
    forking: list[int] = []

    def before() -> None:
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forking:
            end_with(forking[0])

    os.register_at_fork(before=before, after_in_child=in_child)


def stay_on_cores() -> None:
    """Keep this thread, and what it starts, on the cores that the launcher chose, if it chose some."""
    if (cores := os.environ.get(CORES_VARIABLE)) is None:
        return
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    print(f"cores of the GPU's NUMA node: {cores or 'not known, so all are used'}", flush=True)


def take_over() -> None:
    """Become the server whose settings `spawn.PreparedServer` sends; end if it sends none."""
    begin = time.perf_counter()
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    settings = json.loads(line)
    for name, value in settings["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    stay_on_cores()
    sys.argv[1:] = settings["arguments"]
    log, nothing = os.open(settings["log"], os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    os.write(log, os.pread(1, os.fstat(1).st_size, 0))  # what was printed so far
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    print(f"started ahead: waited {time.perf_counter() - begin:.1f} s for its settings", flush=True)


def main() -> None:
    import runpy

    begin = time.perf_counter()
    gc.disable()  # a fifth of the import's time: it makes a million objects, which all stay
    end_forks_with_parent()
    stay_on_cores()

    _load(AUTH_MODULE, "auth.py")
    versions = _load(VERSIONS_MODULE, "policy_versions.py")
    patch = _load("plinth_server_patch", "patch.py")
    patch.SOCKETS.check()
    # These two before vLLM's modules import the functions that they replace.
    keep_the_store_in_a_file(patch)
    if uses_fast_paths():
        start = _load("plinth_server_start", "fast/start.py")
        # A tenth of the time in which vLLM is imported: for audio, and for losses of object detection.
        start.import_when_used("scipy.signal")
        start.import_when_used("scipy.optimize", "linear_sum_assignment")
        if os.environ.get(FORK_VARIABLE) == "1" and patch.FORK.check():
            start.fork_engine_and_worker(patch.FORK.replace)
    prepare_engine_core(patch)
    if not uses_fast_paths():
        print("fast paths: turned off by fast_paths=False; vLLM's own path is used for all", flush=True)
    elif patch.BUFFERING.check():
        os.environ[BUFFER_VARIABLE] = "1"  # both halves or none
        buffer_tokens(patch, front_end=True)  # the engine core is forked, or does it again
        versions.PolicyVersionMiddleware.enabled = True
    if (why := patch.IMAGES.problem()) is None:
        _load("plinth_server_images", "images.py").take_images(patch.IMAGES.replace)
    else:
        print(f"requests with images are refused: {why}", flush=True)
    draft_where_it_pays(patch)
    gc.freeze()
    gc.enable()
    print(f"vLLM's engine was imported in {time.perf_counter() - begin:.1f} s", flush=True)
    if sys.argv[1:] == ["--prepared"]:
        take_over()
    sys.argv[0] = "plinth-rollout-server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned engine core or worker
    end_with(os.getppid())
    end_forks_with_parent()
    patch = _load("plinth_server_patch", "patch.py")
    keep_the_store_in_a_file(patch)
    prepare_engine_core(patch)
    if os.environ.get(BUFFER_VARIABLE) == "1":
        buffer_tokens(patch, front_end=False)
    draft_where_it_pays(patch)
