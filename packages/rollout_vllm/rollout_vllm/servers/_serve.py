"""Entry script of the server process: prepares the process, then runs vLLM's OpenAI server.

A small script, instead of `-m vllm...`, also prevents vLLM's spawned children from importing the whole HTTP front end
as their main module.
"""

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

AUTH_MODULE = "plinth_server_auth"
FORK_VARIABLE = "PLINTH_ROLLOUT_FORK"


def _load_auth() -> None:
    """Make auth.py importable under a fixed name, independently of where this package is installed."""
    spec = importlib.util.spec_from_file_location(AUTH_MODULE, Path(__file__).with_name("auth.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[AUTH_MODULE] = module
    spec.loader.exec_module(module)


def _fork_engine_and_worker() -> None:
    """Fork the CPU engine and its worker from this process instead of spawning new interpreters.

    Each new interpreter imports vLLM, torch and transformers again, which takes 8 to 20 s. Forking is safe as long as
    no OpenMP pool exists. That holds with one thread, and the launcher enables forking only then.
    """
    from vllm.utils import system_utils

    if hasattr(system_utils, "get_mp_context"):
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401  (imported once, before the fork)


def _skip_log_prob_decoding() -> None:
    """Stop the front end from decoding every token that has a log-prob, in addition to decoding the text.

    One tokenizer call per token is most of the cost of a log-prob there (see docs/rollout_vllm.md). The client of this
    package uses token ids. Other clients still get token strings: vLLM decodes them when it writes the response.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original = LogprobsProcessor.from_new_request
    LogprobsProcessor.from_new_request = lambda tokenizer, request: original(None, request)


def main() -> None:
    import runpy

    _load_auth()
    _skip_log_prob_decoding()
    if os.environ.get(FORK_VARIABLE) == "1":
        _fork_engine_and_worker()
    sys.argv[0] = "plinth-rollout-server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
