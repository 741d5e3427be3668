"""vLLM's OpenAI server with a forked engine and forked workers: one import of vLLM per server instead of three or more.

Safe on the CPU with one OpenMP thread, which the helpers set: no thread pool exists yet at the fork.
"""

import multiprocessing
import runpy
import sys

from plinth_testing.processes import end_forks_with_parent

if __name__ == "__main__":
    end_forks_with_parent()  # else a killed test run leaves vLLM's engine core
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    sys.argv[0] = "weight-sync-test-server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
