"""vLLM's OpenAI servers with forked engines and workers: vLLM is imported once, not three times for each server.

It forks a server for each line of the standard input, a JSON object with `arguments`, `log`, `env` and `network` (the
namespace of another host, or null), and prints the server's process id.

Safe on the CPU with one OpenMP thread, which the helpers set: no thread exists yet at a fork.
"""

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import sys

from plinth_base.namespaces import die_with_parent, end_forks_with_parent

CLONE_NEWNET = 0x40000000  # Python 3.12 has os.setns


def serve(arguments: list[str]) -> None:
    """Run one server in this process."""
    sys.argv = ["weight-sync-test-server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


def fork_server(arguments: list[str], log: str, env: dict[str, str], network: str | None) -> int:
    """The process id of a server with a process group of its own, which ends with this process."""
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        files = (os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        for target, file in ((0, files[0]), (1, files[1]), (2, files[1])):
            os.dup2(file, target)
        os.environ.update(env)
        if network is not None:
            with open(network) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns", network)
        serve(arguments)
    except SystemExit as ended:
        os._exit(int(bool(ended.code)))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    end_forks_with_parent()  # else a killed test run leaves vLLM's engine core
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "SpinCondition"):
        # Workers of two ranks and their engine spin for a second after each message, on the cores that others wait for.
        shm_broadcast.SpinCondition.__init__.__defaults__ = (0.01,)  # type: ignore[misc]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of one thread of several"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that end are not waited for
    for line in sys.stdin:
        print(fork_server(**json.loads(line)), file=answers, flush=True)
