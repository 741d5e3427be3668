"""A reward model on the trainer's ranks: its output at the last token of a sample is added to the sample's score."""

from collections.abc import Sequence
from dataclasses import replace

from rl_core import Batch, pack
from rollout_vllm import Sample
from rollout_vllm.episodes.rewards import MAX_REWARD

from ..errors import RolloutFailed
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from ..rollout.groups import Collected, score_of
from ..rollout.scoring_config import MODEL_TERM


class RewardModel:
    """A frozen engine with a value head that scores samples after the rollout, when the ranks are free."""

    def __init__(self, model: ModelHandle, *, weight: float) -> None:
        """`weight`: factor of its output (`reward.model_weight`)."""
        self._model, self._weight = model, weight

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their final scores; see `with_output`.

        Raises:
            RolloutFailed: an output is not finite.
        """
        if not samples:
            return []
        with TrainBatch(scored_batch(samples)) as batch:
            outputs = self._model.values(batch).tolist()
        return [with_output(sample, output, self._weight) for sample, output in zip(samples, outputs, strict=True)]

    def complete(self, collected: Collected) -> Collected:
        """The train batch of a step with its final scores; raises as `score` does."""
        return replace(collected, samples=tuple(self.score(collected.samples)))


def scored_batch(samples: Sequence[Sample]) -> Batch:
    """The tokens of each sample and one more, before which the engine reads the value: that of the last token.

    Attention is causal, so what that token is does not matter.
    """
    rows = [sample.token_ids for sample in samples]
    return pack(rows, [row[-1:] for row in rows])


def with_output(sample: Sample, output: float, weight: float) -> Sample:
    """The sample with `weight` times the model's output added to its score; the output itself is a term.

    Raises:
        RolloutFailed: the output, or the score, is not finite or too large.
    """
    score = score_of(sample) + weight * output
    if not abs(score) <= MAX_REWARD:  # nor NaN
        raise RolloutFailed(
            f"the output for sample {sample.sample_index} of prompt {sample.prompt.id} is {output}, and "
            f"{score_of(sample):g} + {weight:g} times that is no score",
            field="reward.model",
            allowed=f"-{MAX_REWARD:g} to {MAX_REWARD:g}",
        )
    return replace(sample, score=score, reward_terms={**sample.reward_terms, MODEL_TERM: output})
