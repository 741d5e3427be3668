"""Draws the prompts of each training step, and validates on the held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_data import Prompt, PromptSampler
from rollout_vllm import SamplingConfig

from ..samples import Phase
from .config import DynamicSamplingConfig
from .dynamic_sampling import DrawPrompts, DynamicSampling
from .groups import Collected, Finish
from .phase import RolloutPhase
from .validation import Validation


@dataclass(frozen=True, kw_only=True)
class StepRollouts:
    """The prompts of a run, their order, how they are sampled, and the phase that samples and scores them."""

    phase: RolloutPhase
    sampler: PromptSampler
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    train_batch_size: int
    """Prompts of a step."""
    sampling: SamplingConfig
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    validation: SamplingConfig
    """Sampling of the held-out prompts."""

    @property
    def parts(self) -> dict[str, Any]:
        """Name -> what a checkpoint saves."""
        return {"sampler": self.sampler, "rollout": self.phase}

    def published(self, version: int) -> None:
        """Tells which weights the servers hold. Each step starts its own groups, with the weights of that time."""

    def collect(self, step: int, timed: Phase) -> Collected:
        """The scored samples of a step.

        Raises:
            RolloutFailed: no sample is left to train on.
        """
        draw = self._prompts_of_step()
        prompts = draw(self.train_batch_size)
        if not self.dynamic_sampling.max_rounds:
            return self.phase.collect(prompts, self.sampling, step=step, phase=timed)
        dynamic = DynamicSampling(self.dynamic_sampling, self.train_batch_size, draw)
        collected = self.phase.collect(prompts, self.sampling, step=step, phase=timed, more=dynamic.more)
        return dynamic.select(collected, step=step)

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts in the order of the run."""
        return [self.train_prompts[index] for index in self.sampler.next(num_prompts)]

    def _prompts_of_step(self) -> DrawPrompts:
        """Draws the prompts of a step, one round of generation after the other.

        All draws together are one batch of the sampler, which does not repeat a prompt while there are others. So the
        state of the sampler is set back, and a larger batch is drawn, which begins with the same prompts.
        """
        start, num_drawn = self.sampler.state_dict(), 0

        def draw(num_groups: int) -> list[Prompt]:
            nonlocal num_drawn
            num_before, num_drawn = num_drawn, num_drawn + self.phase.num_prompts(num_groups)
            if num_before:
                self.sampler.load_state_dict(start)
            return [self.train_prompts[index] for index in self.sampler.next(num_drawn)[num_before:]]

        return draw

    def validate(self, step: int, finish: Finish | None = None) -> Validation | None:
        """Scores on the held-out prompts after `step`; None if there are none. `finish`: see `RolloutPhase.validate`.

        Raises:
            RolloutFailed: no sample could be generated and scored.
        """
        if not self.val_prompts:
            return None
        return self.phase.validate(self.val_prompts, self.validation, step=step, finish=finish)
