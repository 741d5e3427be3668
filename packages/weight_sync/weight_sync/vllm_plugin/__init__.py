"""The part that runs inside vLLM, registered through the entry point ``vllm.general_plugins``."""

from ..server import BACKEND


def register() -> None:
    """Register the engine with vLLM's factory. vLLM calls this in every process, sometimes more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .replies import keep_in_step

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_sync.vllm_plugin.engine", "PlinthEngine")
    keep_in_step()
