"""Draws the prompts of each training step, and validates on the held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_data import PromptSampler
from rollout_vllm import SamplingConfig

from ..experience import Phase, PromptLike
from .phase import Collected, RolloutPhase, Validation


@dataclass(frozen=True, kw_only=True)
class StepRollouts:
    """The prompts of a run, their order, how they are sampled, and the phase that samples and scores them."""

    phase: RolloutPhase
    sampler: PromptSampler
    train_prompts: Sequence[PromptLike]
    val_prompts: Sequence[PromptLike]
    train_batch_size: int
    """Prompts of a step."""
    sampling: SamplingConfig
    validation: SamplingConfig
    """Sampling of the held-out prompts."""

    def collect(self, step: int, timed: Phase) -> Collected:
        """The scored samples of a step.

        Raises:
            RolloutFailed: no sample is left to train on.
        """
        num_prompts = self.phase.num_prompts(self.train_batch_size)
        prompts = [self.train_prompts[index] for index in self.sampler.next(num_prompts)]
        return self.phase.collect(prompts, self.sampling, step=step, phase=timed)

    def validate(self, step: int) -> Validation | None:
        """Scores on the held-out prompts after `step`; None if there are none.

        Raises:
            RolloutFailed: no sample could be generated and scored.
        """
        if not self.val_prompts:
            return None
        return self.phase.validate(self.val_prompts, self.validation, step=step)
