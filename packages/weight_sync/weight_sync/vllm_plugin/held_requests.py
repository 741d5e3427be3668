"""Drops the prefix cache of a server that holds requests, which keep their own KV cache.

vLLM's ``reset_prefix_cache`` does nothing while a request holds blocks, or preempts all requests. A push with
``SyncConfig(running_requests="keep")`` needs a third way, in vLLM's engine core: no block computed so far may be found
again, and no block that a held request fills later. Such a block was computed under the new weights, but from keys and
values of the old ones, and under its usual hash it would extend the blocks of a new request with the same tokens.
"""

import secrets
from typing import Any

from ..config import BACKEND
from .patch import FENCE

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

PATCH = FENCE.patch(
    name="prefix cache beside held requests",
    reason="requests that are held during a push keep their KV cache, and no other request uses it",
    otherwise="refused",
    replaces={_SCHEDULER: ("reset_prefix_cache(reset_running_requests, reset_connector, ...)",)},
    reads={
        _SCHEDULER: ("pause_state", "requests", "kv_cache_manager", "vllm_config", "reset_connector_cache"),
        "vllm.v1.core.sched.interface:PauseState": ("PAUSED_ALL",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        "vllm.v1.core.block_pool:BlockPool": ("blocks", "evict_blocks(block_ids, ...)"),
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_hash", "block_id"),
        "vllm.v1.request:Request": ("block_hashes", "cache_salt", "has_encoder_inputs", "num_computed_tokens"),
    },
)


def beside_held_requests(reset: Any) -> Any:
    """``Scheduler.reset_prefix_cache`` that succeeds beside held requests, on servers with this package's backend."""
    from vllm.v1.core.sched.interface import PauseState

    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        held = [request for request in self.requests.values() if request.num_computed_tokens]
        transfer = self.vllm_config.weight_transfer_config
        is_ours = transfer is not None and transfer.backend == BACKEND
        if reset_running_requests or not held or not is_ours or self.pause_state != PauseState.PAUSED_ALL:
            return bool(reset(self, reset_running_requests, reset_connector))
        drop_beside(held, self.kv_cache_manager.block_pool)
        return not reset_connector or bool(self.reset_connector_cache())

    return reset_prefix_cache


def drop_beside(held: list[Any], block_pool: Any) -> None:
    """Forget the hash of every block of vLLM's ``BlockPool``, and separate the hashes of ``held`` requests.

    Raises RuntimeError for a held request with images or other encoder inputs: its encoder outputs are dropped with the
    old policy's, and the rest of its prompt may need them.
    """
    if any(request.has_encoder_inputs for request in held):
        raise RuntimeError(
            "requests with images or other encoder inputs cannot be kept during a push; use running_requests=recompute"
        )
    block_pool.evict_blocks({block.block_id for block in block_pool.blocks if block.block_hash is not None})
    for request in held:
        # Hashes are chained: later blocks follow from the last hash, and the first one from the salt.
        request.cache_salt = secrets.token_hex(16)
        request.block_hashes[:] = [secrets.token_bytes(32) for _ in request.block_hashes]
