"""Shorter start of a server: a forked engine, no kernels of other models, and libraries that wait for their use."""

import importlib
import importlib.util
import inspect
import multiprocessing
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

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


def import_when_used(name: str, *functions: str) -> None:
    """Import an installed module at the first look at one of its attributes, not at an import statement of others.

    functions: those that others import from the module; it is imported when one is called.
    """
    try:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package
        spec = None
    if spec is None:
        return
    stand_in = ModuleType(name)

    def load(attribute: str) -> Any:
        if attribute.startswith("__"):  # `inspect` looks for the file of every module
            raise AttributeError(attribute)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    def calling(function: str) -> Callable[..., Any]:
        return lambda *args, **keywords: load(function)(*args, **keywords)

    stand_in.__getattr__ = load  # type: ignore[method-assign]
    vars(stand_in).update({function: calling(function) for function in functions})
    if spec.submodule_search_locations is not None:
        stand_in.__path__ = spec.submodule_search_locations  # looked at by every import of something from it
    sys.modules[name] = stand_in


def skip_warm_up_of_routers(replace: Replace) -> None:
    """Leave out the kernels of four MoE models' routers, which vLLM before 0.32 compiles whatever the model is."""
    from vllm.model_executor.warmup import kernel_warmup

    name = "_warmup_ll_bf16_router_gemm"
    looks_at_model = bool(inspect.signature(getattr(kernel_warmup, name)).parameters)  # vLLM 0.32
    if not looks_at_model:
        replace(kernel_warmup, **{name: lambda: None})
