"""Policy losses by name. Standard library only: a configuration knows them before torch is imported.

To add a loss, write its function in a module of this folder and its entry here; the tests over all names then cover it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..batching.batch import Batch
    from .policy import PolicyLossStats


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy loss: where its function is, and the settings that it takes."""

    function: str
    """`module:name` in this folder, a function (log_probs_K, old_log_probs_K, advantages_K, **options) that returns
    the loss of each token and its `PolicyLossStats`."""
    options: Mapping[str, float | None]
    """Its keyword arguments with their defaults."""
    needs_lengths: bool = False
    """The function also gets `response_lens_S`, so sequences must be whole."""

    def load(self) -> "Callable[..., tuple[Tensor, PolicyLossStats]]":
        """Imports the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., tuple[Tensor, PolicyLossStats]]
        function = getattr(import_module(f"{__package__}.{module}"), name)
        return function

    def __call__(self, log_probs_K: "Tensor", batch: "Batch", **options: Any) -> "tuple[Tensor, PolicyLossStats]":
        """The loss of each token of a micro batch with columns `old_log_probs` and `advantages`, and its statistics."""
        inputs: dict[str, Any] = {"response_lens_S": batch.response_lens_S} if self.needs_lengths else {}
        old_K, advantages_K = batch.columns["old_log_probs"], batch.columns["advantages"]
        return self.load()(log_probs_K, old_K, advantages_K, **inputs, **{**self.options, **options})


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(
        function="policy:ppo_clip_loss", options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    ),
    "gspo": PolicyLoss(function="policy:gspo_loss", options={"clip_low": 3e-4, "clip_high": 4e-4}, needs_lengths=True),
    "cispo": PolicyLoss(function="policy:cispo_loss", options={"clip_low": 1.0, "clip_high": 4.0}),
}
"""Name -> loss; `algorithm.loss` of an app names one."""
