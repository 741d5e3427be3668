"""The vLLM plugin, loaded through the entry point ``vllm.general_plugins``."""

from ..config import BACKEND


def register() -> None:
    """Register the engine with vLLM's factory. vLLM calls this in every process, sometimes more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from . import held_requests, processing, stale_replies

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_sync.vllm_plugin.engine", "PlinthEngine")
    # Where vLLM is another one, the engine refuses to start, and a push that keeps requests is refused.
    processing.PATCH.wrap(processing.recording)
    stale_replies.PATCH.wrap(stale_replies.reading_stale_replies)
    held_requests.PATCH.wrap(held_requests.beside_held_requests)
