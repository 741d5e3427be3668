"""vLLM's OpenAI server with its engine and workers forked: one import of vLLM a server instead of three or more.

Sound on the CPU with one OpenMP thread, which the helpers ask for: no thread pool exists yet when it forks.
"""

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    sys.argv[0] = "weight-sync-test-server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
