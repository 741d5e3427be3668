"""Runs inside the server process, as a script: prepares it, then hands over to vLLM's OpenAI server.

Being a small script of its own (and not `-m vllm...`) also keeps vLLM's spawned children from importing the whole
HTTP front end again as their main module.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

AUTH_MODULE = "plinth_server_auth"
FORK_VARIABLE = "PLINTH_ROLLOUT_FORK"


def _load_auth() -> None:
    """Make auth.py importable under one fixed name, wherever this package lies and however it was installed."""
    spec = importlib.util.spec_from_file_location(AUTH_MODULE, Path(__file__).with_name("auth.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[AUTH_MODULE] = module
    spec.loader.exec_module(module)


def _fork_engine_and_worker() -> None:
    """Let the CPU engine and its worker be forks of this process instead of fresh interpreters.

    Each fresh one imports vLLM, torch and transformers again: 8 to 20 s apiece. Forking is sound as long as no OpenMP
    pool exists yet, which one thread guarantees; the launcher asks for it only then.
    """
    from vllm.utils import system_utils

    if hasattr(system_utils, "get_mp_context"):
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401  (imported here once instead of in the children)


def _leave_log_probs_undecoded() -> None:
    """Spare the front end a decoding of every token that comes with a log-prob, which it does beside that of the text.

    One tokenizer call a token is most of what a log-prob costs there (the figures are in the README). Our client asks
    for ids, and whoever asks for names still gets them: vLLM decodes what has none yet as it writes the answer.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original = LogprobsProcessor.from_new_request
    LogprobsProcessor.from_new_request = lambda tokenizer, request: original(None, request)


def main() -> None:
    import runpy

    _load_auth()
    _leave_log_probs_undecoded()
    if os.environ.get(FORK_VARIABLE) == "1":
        _fork_engine_and_worker()
    sys.argv[0] = "plinth-rollout-server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
