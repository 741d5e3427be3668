"""The vLLM plugin, loaded through the entry point ``vllm.general_plugins``."""

from ..config import BACKEND


def register() -> None:
    """Register the engine with vLLM's factory. vLLM calls this in every process, sometimes more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .held_requests import patch_scheduler
    from .processing import record_processing
    from .stale_replies import patch_executor

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_sync.vllm_plugin.engine", "PlinthEngine")
    record_processing()
    patch_executor()
    patch_scheduler()
