"""Scheduling of decoded tokens: without looking for blocks that they do not need, and one short loop a step.

vLLM's scheduler asks the KV cache manager for room for every token of every request, and then tells it that the token
is known. With blocks of 16 tokens, 15 of 16 of these calls change nothing, and together they take half of the time in
which the engine core schedules a step. Here they return at once what vLLM returns after its checks.

In most steps of a rollout every running request decodes one token and none can be added. vLLM's loop treats each as if
it might be a chunk of a prompt, have drafts, images, or have to be preempted. `decode_in_short_steps` makes the same
decisions for such a step; all other steps are vLLM's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plinth_base.fence import Replace


class Tables(NamedTuple):
    """Blocks of a KV cache whose layers all have full attention."""

    blocks: Mapping[str, Sequence[Any]]
    """Those of each request."""
    cached: Mapping[str, int] | None
    """Number of each request's blocks in the prefix cache; None without one."""
    block_size: int


def tables_of(manager: Any) -> Tables | None:
    """The tables of a KVCacheManager.

    None for a model with another layer than full attention, whose blocks are also freed, and if vLLM caches parts of
    blocks.
    """
    if not hasattr(manager, "plinth_tables"):
        manager.plinth_tables = _tables_of(manager)
    tables: Tables | None = manager.plinth_tables
    return tables


def _tables_of(manager: Any) -> Tables | None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return None
    layers = managers[0]
    if manager.enable_caching and layers.block_size != layers.block_pool.hash_block_size:
        return None
    return Tables(layers.req_to_blocks, layers.num_cached_block if manager.enable_caching else None, layers.block_size)


def skip_needless_block_searches(replace: Replace) -> None:
    """Shorten the KV cache manager's calls for tokens that neither open nor complete a block."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    allocate, cache = KVCacheManager.allocate_slots, KVCacheManager.cache_blocks
    decoding = {"num_lookahead_tokens": 0}  # the scheduler's arguments for a running request

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1 and kwargs == decoding and not args:
            tables = tables_of(self)
            if tables is not None:
                blocks, cached, size = tables
                name, used = request.request_id, request.num_computed_tokens + 1
                if len(blocks.get(name, ())) * size >= used and (
                    cached is None or cached.get(name, 0) >= min(used, request.num_tokens) // size
                ):
                    return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **kwargs)

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        tables = tables_of(self)
        if tables is not None:
            _, cached, size = tables
            if cached is None or cached.get(request.request_id, 0) >= num_computed_tokens // size:
                return
        cache(self, request, num_computed_tokens)

    replace(KVCacheManager, allocate_slots=allocate_slots, cache_blocks=cache_blocks)


def _decodes_alone(scheduler: Any) -> bool:
    """True if a step of this scheduler has nothing but tokens of the model, one of each request."""
    return (
        scheduler.num_sampled_tokens_per_step == 1
        and not scheduler.num_spec_tokens
        and not scheduler.num_lookahead_tokens
        and not scheduler.use_pp
        and not scheduler.defer_block_free
        and not getattr(scheduler, "enable_return_routed_experts", False)  # vLLM 0.26
        and not any(getattr(scheduler, name, None) for name in ("connector", "ec_connector", "aux_output_connector"))
    )


def _is_plain(request: Any) -> bool:
    """True if a request decodes, and nothing but its tokens decides about it."""
    return (
        not request.is_prefill_chunk
        and not request.has_encoder_inputs
        and not request.use_structured_output
        and not request.resumable
    )


def decode_in_short_steps(replace: Replace) -> None:
    """Schedule a step in which every running request decodes one token in one short loop."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import CachedRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    stock = Scheduler.schedule
    # Number of computed tokens from which on a request has to be looked at: for a block, or because it may end.
    setattr(Request, "plinth_until", 0)  # noqa: B010  (vLLM's class has no such name)

    def until(scheduler: Any, tables: Tables, request: Any) -> int:
        blocks, cached, size = tables
        room = len(blocks.get(request.request_id, ())) * size
        if cached is not None:  # vLLM caches a block with its last token
            room = min(room, (cached.get(request.request_id, 0) + 1) * size - 1)
        ends: int = min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len) - 2
        return min(room, ends)

    def can_add(scheduler: Any) -> bool:
        running, waiting = scheduler.get_request_counts()
        most = min(scheduler.max_num_running_reqs, getattr(scheduler, "max_num_active_reqs", running + 1))
        return bool(waiting and running < most)

    def short_step(scheduler: Any, tables: Tables) -> Any:
        """The step's SchedulerOutput; None, and nothing has changed, if vLLM has to schedule it."""
        running, most_tokens = scheduler.running, scheduler.max_num_scheduled_tokens
        budget = min(most_tokens, scheduler.scheduler_config.max_num_batched_tokens)
        if not 0 < len(running) <= budget or scheduler._pause_state is not PauseState.UNPAUSED or can_add(scheduler):
            return None
        requests, names, computed, generated = list[Any](), list[str](), list[int](), list[int]()
        looked_at = list[tuple[int, Any]]()  # row, request
        for request in running:
            done, ahead = request.num_computed_tokens, request.num_output_placeholders
            if request.num_tokens_with_spec + ahead - done != 1 or request.spec_token_ids:
                return None
            if done >= request.plinth_until:
                if (not request.plinth_until and not _is_plain(request)) or done + 2 > scheduler.max_model_len:
                    return None
                if ahead and done + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                    continue  # its last token is being computed
                looked_at.append((len(names), request))
            requests.append(request)
            names.append(request.request_id)
            computed.append(done)
            generated.append(request.num_output_tokens + ahead)
        manager = scheduler.kv_cache_manager
        if not names or len(looked_at) > manager.block_pool.get_num_free_blocks():  # else none is preempted
            return None
        if not scheduler.use_v2_model_runner and not scheduler.prev_step_scheduled_req_ids.issuperset(names):
            return None
        new_blocks: list[Any] = [None] * len(names)
        for row, request in looked_at:
            blocks = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
            new_blocks[row] = blocks.get_block_ids(allow_none=True)
            request.plinth_until = until(scheduler, tables, request)
        # A step without tokens has all that is not about these requests: those that have finished, and vLLM's counters.
        scheduler.max_num_scheduled_tokens = 0
        try:
            output = stock(scheduler)
        finally:
            scheduler.max_num_scheduled_tokens = most_tokens
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict.fromkeys(names, 1), len(names)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=computed,
            num_output_tokens=generated,
        )
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(names)
        is_ahead = isinstance(scheduler, AsyncScheduler)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if is_ahead:
                request.num_output_placeholders += 1
        return output

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        if not hasattr(self, "plinth_tables"):
            self.plinth_tables = tables_of(self.kv_cache_manager) if _decodes_alone(self) else None
        tables = self.plinth_tables
        if tables is not None and not throttle_prefills and (output := short_step(self, tables)) is not None:
            return output
        output = stock(self, throttle_prefills)
        # Its blocks are new, also if it was preempted.
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids]:
            self.requests[name].plinth_until = 0
        return output

    replace(Scheduler, schedule=schedule)
