"""Shorter start of a server: the engine is forked, and kernels of other models are not compiled."""

import inspect
import multiprocessing

from plinth_base.fence import Replace


def fork_engine_and_worker(replace: Replace) -> None:
    """Fork the CPU engine and its worker from this process instead of spawning new interpreters.

    Forking is safe as long as no OpenMP pool exists. That holds with one thread, and the launcher enables forking only
    then.
    """
    from vllm.utils import system_utils

    replace(system_utils, get_mp_context=lambda: multiprocessing.get_context("fork"))
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401  (imported once, before the fork)


def skip_warm_up_of_routers(replace: Replace) -> None:
    """Leave out the kernels of four MoE models' routers, which vLLM before 0.32 compiles whatever the model is."""
    from vllm.model_executor.warmup import kernel_warmup

    name = "_warmup_ll_bf16_router_gemm"
    looks_at_model = bool(inspect.signature(getattr(kernel_warmup, name)).parameters)  # vLLM 0.32
    if not looks_at_model:
        replace(kernel_warmup, **{name: lambda: None})
