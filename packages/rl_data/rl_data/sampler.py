"""Resumable sampler of training prompts.

A batch that reaches the end of an epoch is filled from the next epoch, so every prompt is drawn exactly once per epoch
for any batch size. A batch does not repeat a prompt unless it is larger than the number of prompts: the new epoch
first draws prompts that the batch does not contain yet.

The state restores the order exactly. It is JSON-serializable: a few numbers and at most one batch of indices.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import DataConfigError, SamplerStateError

_STATE_VERSION = 1


class PromptSampler:
    """Draws indices from range(num_prompts), epoch after epoch.

    The order depends only on (num_prompts, seed, shuffle) and the requested batch sizes.
    """

    def __init__(self, num_prompts: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise DataConfigError(field="num_prompts", value=num_prompts, allowed="at least 1")
        if seed < 0:
            raise DataConfigError(field="seed", value=seed, allowed="at least 0")
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self.epoch = 0
        """Epoch of the next prompt, counted from 0."""
        self.position = 0
        """Number of prompts drawn from this epoch, less than num_prompts."""
        self._held: list[int] = []
        """Prompts of the previous epoch in the batch that spans both."""
        self._num_needed = 0
        """Number of prompts that this batch still needed."""
        self._order = self._make_order()

    def _make_order(self) -> list[int]:
        """The order of the epoch; the batch that spans two epochs gets prompts that it does not hold, if there are."""
        order = list(range(self.num_prompts))
        if self.shuffle:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch])))
            order = generator.permutation(self.num_prompts).tolist()
        held = set(self._held)
        first = [index for index in order if index not in held][: self._num_needed]
        taken = set(first)
        return first + [index for index in order if index not in taken]

    def next(self, batch_size: int) -> list[int]:
        """The next `batch_size` indices. Raises DataConfigError for a size below 1."""
        if batch_size < 1:
            raise DataConfigError(field="batch_size", value=batch_size, allowed="at least 1")
        batch: list[int] = []
        while len(batch) < batch_size:
            end = min(self.num_prompts, self.position + batch_size - len(batch))
            batch += self._order[self.position : end]
            self.position = end
            if end == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
                # A batch larger than the data repeats prompts in any case, so at most one epoch is avoided.
                self._num_needed = min(batch_size - len(batch), self.num_prompts)
                self._held = batch[-self.num_prompts :] if self._num_needed else []
                self._order = self._make_order()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; JSON-serializable."""
        return {
            "version": _STATE_VERSION,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "held": list(self._held),
            "num_needed": self._num_needed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        Raises SamplerStateError, without changing anything, if the state belongs to another number of prompts, seed or
        order.
        """
        own = self.state_dict()
        missing = sorted(set(own) - set(state))
        if missing:
            raise SamplerStateError("the sampler state lacks it", field=missing[0])
        for key in ("version", "num_prompts", "seed", "shuffle"):
            if state[key] != own[key]:
                problem, remedy = "the sampler state is of another sampler", "resume with the same data and settings"
                raise SamplerStateError(problem, field=key, value=state[key], allowed=str(own[key]), remedy=remedy)
        if not 0 <= state["position"] < self.num_prompts or state["epoch"] < 0:
            problem = f"the sampler state is impossible with {self.num_prompts} prompts"
            raise SamplerStateError(problem, field="position", value=state["position"])
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._held = [int(index) for index in state["held"]]
        self._num_needed = int(state["num_needed"])
        self._order = self._make_order()
