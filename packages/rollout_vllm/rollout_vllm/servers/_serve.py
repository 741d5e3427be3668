"""Entry script of the server process: prepares the process, then runs vLLM's OpenAI server.

A small script, instead of `-m vllm...`, also prevents vLLM's spawned children from importing the whole HTTP front end
as their main module.
"""

import gc
import json
import os
import sys
import time
from uuid import uuid4

from plinth_base.namespaces import end_forks_with_parent, end_with
from rollout_vllm.servers import patch, policy_versions


def is_on(name: str) -> bool:
    """A switch that `command.server_environment` has set."""
    return os.environ.get(f"PLINTH_ROLLOUT_{name}") == "1"


def buffer_tokens(*, front_end: bool) -> None:
    """Make the engine core, and `front_end`, buffer the tokens of clients that read only ids and log-probs."""
    from rollout_vllm.servers.fast import buffering

    buffering.buffer_in_engine_core(patch.BUFFERING.replace, patch.IDS_ONLY, policy_versions.PUBLISH)
    if front_end:
        buffering.buffer_in_front_end(patch.BUFFERING.replace, patch.IDS_ONLY)


def keep_the_store_in_a_file() -> None:
    """Let workers meet in a file among the server's sockets, as in vLLM 0.32, and not at an open port."""
    from vllm.utils import network_utils

    if not hasattr(network_utils, "get_file_store_init_method") and patch.STORE.check():
        folder = os.environ["VLLM_RPC_BASE_PATH"]

        def init_method(ip: str, port: int) -> str:
            return f"file://{folder}/store:{uuid4().hex}"  # vLLM's CPU worker names shared memory by what follows ":"

        patch.STORE.replace(network_utils, get_distributed_init_method=init_method)


def prepare_engine_core() -> None:
    """Prepare this process for the engine core and its workers, which are forked from it or do it again."""
    if os.environ.get("PLINTH_ROLLOUT_QUANTIZATION") == "bitsandbytes":  # no fast path: else the weights are wrong
        from rollout_vllm.servers.quantizing import load_on_one_stream

        load_on_one_stream()
    if is_on("EXACT"):
        from rollout_vllm.servers.exact.install import match_transformers

        patch.EXACT.check()
        match_transformers(patch.EXACT.replace, on_gpu=is_on("GPU"))
    if is_on("ROUTES"):
        from rollout_vllm.servers.routes import record_routes

        patch.ROUTES.check()
        record_routes(patch.ROUTES.replace)
    if is_on("SPECULATIVE"):
        from rollout_vllm.servers.speculating import verify_by_request

        patch.VERIFYING.check()
        verify_by_request(patch.VERIFYING.replace, on_gpu=is_on("GPU"))
    if is_on("FAST_PATHS"):
        speed_up_engine_core()


def choose_steps_to_draft() -> None:
    """Measure whole steps, hence after `buffer_tokens`, whose steps look at fewer requests."""
    if is_on("DRAFTING") and is_on("FAST_PATHS") and patch.DRAFTING.check():
        from rollout_vllm.servers.fast.drafting import draft_where_it_pays

        draft_where_it_pays(patch.DRAFTING.replace)


def speed_up_engine_core() -> None:
    """Short scheduling, faster attention, and no needless work when the engine core starts."""
    from rollout_vllm.servers.fast import decoding, start

    if patch.DECODING.check():
        decoding.skip_needless_block_searches(patch.DECODING.replace)
        decoding.decode_in_short_steps(patch.DECODING.replace)
    if not is_on("GPU"):
        return
    if patch.WARM_UP.check():
        start.skip_warm_up_of_routers(patch.WARM_UP.replace)
    # A batch-invariant server computes a request the same beside any other; the number of them decides who computes it.
    # Attention of a server that matches the trainer is that of the trainer.
    if not is_on("EXACT") and os.environ.get("VLLM_BATCH_INVARIANT") != "1" and patch.ATTENTION.check():
        from rollout_vllm.servers.fast import attention  # with kernels of Triton

        attention.attend_together(patch.ATTENTION.replace)


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

    from rollout_vllm.servers import images
    from rollout_vllm.servers.fast import completions, start

    begin = time.perf_counter()
    gc.disable()  # a fifth of the import's time: it makes a million objects, which all stay
    end_forks_with_parent()

    patch.SOCKETS.check()
    # These two before vLLM's modules import the functions that they replace.
    keep_the_store_in_a_file()
    if is_on("FAST_PATHS") and is_on("FORK") and patch.FORK.check():
        start.fork_engine_and_worker(patch.FORK.replace)
    prepare_engine_core()
    if not is_on("FAST_PATHS"):
        print("fast paths: turned off by fast_paths=False; vLLM's own path is used for all", flush=True)
    elif patch.BUFFERING.check():
        os.environ["PLINTH_ROLLOUT_BUFFER"] = "1"  # both halves or none
        buffer_tokens(front_end=True)  # the engine core is forked, or does it again
        policy_versions.PolicyVersionMiddleware.enabled = True
        completions.CompletionMiddleware.marker = patch.IDS_ONLY
    if (why := patch.IMAGES.problem()) is None:
        images.take_images(patch.IMAGES.replace)
    else:
        print(f"requests with images are refused: {why}", flush=True)
    choose_steps_to_draft()
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
    keep_the_store_in_a_file()
    prepare_engine_core()
    if is_on("BUFFER"):
        buffer_tokens(front_end=False)
    choose_steps_to_draft()
