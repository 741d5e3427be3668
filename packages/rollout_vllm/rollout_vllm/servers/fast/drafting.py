"""Drafts of speculative decoding only where they save time.

A step that verifies drafts takes longer. `DraftTrial` measures both kinds of steps in turns, for each number of running
requests, and the faster kind is used until the next trial.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plinth_base.fence import Replace

_TURN = 16
"""Steps of one kind before the other kind's turn."""
_SETTLING = 2
"""First steps of a turn, which are not measured: their drafts were made before it."""
_NUM_TURNS = 4
"""Turns of a trial, with drafts and without."""
_HOLD = 1024
"""Steps of the faster kind before the next trial."""


@dataclass
class Pace:
    """Measured steps of one kind."""

    times: list[float] = field(default_factory=list)
    """Seconds per token of each step."""
    num_tokens: int = 0
    num_drafted: int = 0
    num_sequences: int = 0
    """Sequences that took part, over all steps."""

    @property
    def s_per_token(self) -> float:
        """The median, which a step that waited for something else does not move."""
        return statistics.median(self.times)


@dataclass
class _Size:
    """State for numbers of running requests between two powers of two."""

    num_steps: int = 0
    paces: dict[bool, Pace] = field(default_factory=lambda: {True: Pace(), False: Pace()})
    drafts: bool = True
    """The faster kind."""
    is_known: bool = False


class DraftTrial:
    """Decides before each step whether to draft. Pure state.

    Args:
        say: gets one line when the faster kind of steps changes for a number of running requests.
    """

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self.drafts = True
        """True if drafts are made for the next step."""
        self._say = say
        self._sizes: dict[int, _Size] = {}
        self._last_end, self._last_size = 0.0, -1

    def end_step(self, now: float, *, num_sequences: int, num_tokens: int, num_drafted: int, decodes: bool) -> None:
        """A step has ended.

        Args:
            now: seconds of a monotonic clock.
            num_drafted: tokens that it verified.
            decodes: False if it also computed prompts, which says nothing about drafts.
        """
        size = num_sequences.bit_length()
        seconds, is_next = now - self._last_end, size == self._last_size
        self._last_end, self._last_size = now, size if decodes else -1
        if not decodes:
            return
        state = self._sizes.setdefault(size, _Size())
        in_trial = state.num_steps < _TURN * _NUM_TURNS
        if in_trial and is_next and state.num_steps % _TURN >= _SETTLING:
            pace = state.paces[self._kind(state)]
            pace.times.append(seconds / num_tokens)
            pace.num_tokens += num_tokens
            pace.num_drafted += num_drafted
            pace.num_sequences += num_sequences
        state.num_steps += 1
        if in_trial and state.num_steps == _TURN * _NUM_TURNS:
            self._decide(size, state)
        elif state.num_steps >= _TURN * _NUM_TURNS + _HOLD:
            state.num_steps, state.paces = 0, {True: Pace(), False: Pace()}
        self.drafts = self._kind(state)

    @staticmethod
    def _kind(state: _Size) -> bool:
        in_trial = state.num_steps < _TURN * _NUM_TURNS
        return state.num_steps // _TURN % 2 == 0 if in_trial else state.drafts

    def _decide(self, size: int, state: _Size) -> None:
        drafted, plain = state.paces[True], state.paces[False]
        if not (drafted.times and plain.times):  # the number of requests changed in every step
            return
        before, state.drafts = state.drafts, drafted.s_per_token < plain.s_per_token
        if state.is_known and before == state.drafts:
            return
        state.is_known = True
        kept = drafted.num_tokens - drafted.num_sequences
        requests = f"{1 << (size - 1)} to {(1 << size) - 1} running requests"
        self._say(
            f"speculative decoding: {'on' if state.drafts else 'off'} for {requests}: "
            f"{1e6 * drafted.s_per_token:.1f} us per token with drafts "
            f"({max(0, kept) / max(1, drafted.num_drafted):.2f} accepted, "
            f"{drafted.num_tokens / drafted.num_sequences:.2f} tokens a step), {1e6 * plain.s_per_token:.1f} without"
        )


def draft_where_it_pays(replace: Replace) -> None:
    """Make and schedule drafts as `DraftTrial` decides."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    trial = DraftTrial(lambda line: print(line, flush=True))
    update, take, propose = (
        Scheduler.update_from_output,
        Scheduler.update_draft_token_ids,
        GPUModelRunner.propose_draft_token_ids,
    )

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        num_tokens = sum(map(len, model_runner_output.sampled_token_ids or ()))
        decodes = scheduler_output.total_num_scheduled_tokens == len(scheduled) + drafted and num_tokens > 0
        result = update(self, scheduler_output, model_runner_output)
        trial.end_step(
            time.perf_counter(),
            num_sequences=len(scheduled),
            num_tokens=num_tokens,
            num_drafted=drafted,
            decodes=decodes,
        )
        return result

    def update_draft_token_ids(self: Any, drafts: Any) -> None:
        """Also for workers in other processes, which know nothing of the trial."""
        none: list[list[int]] = [[] for _ in drafts.req_ids]
        take(self, drafts if trial.drafts else type(drafts)(drafts.req_ids, none))

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
        if trial.drafts or not isinstance(sampled_token_ids, list):
            return propose(self, scheduler_output, sampled_token_ids, *args)
        return [[] for _ in sampled_token_ids]

    replace(Scheduler, update_from_output=update_from_output, update_draft_token_ids=update_draft_token_ids)
    replace(GPUModelRunner, propose_draft_token_ids=propose_draft_token_ids)
