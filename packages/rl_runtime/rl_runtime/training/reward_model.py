"""A reward model on the trainer's ranks: its output at the last token of a sample is added to the sample's score."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rl_core import SequenceData

from ..errors import RolloutFailed
from ..experience import Experience
from ..ranks.model_handle import ModelHandle
from ..ranks.train_batch import TrainBatch
from ..rollout.phase import Collected
from ..rollout.scoring_config import MODEL_TERM


class RewardModel:
    """A frozen engine with a value head that scores samples after the rollout, when the ranks are free."""

    def __init__(self, model: ModelHandle, *, weight: float) -> None:
        """`weight`: factor of its output (`reward.model_weight`)."""
        self._model, self._weight = model, weight

    def score(self, items: Sequence[Experience]) -> list[Experience]:
        """The samples with their final scores; see `with_output`.

        Raises:
            RolloutFailed: an output is not finite.
        """
        if not items:
            return []
        with TrainBatch([to_be_scored(item) for item in items]) as batch:
            outputs = [float(value_1[0]) for value_1 in self._model.values(batch)]
        return [with_output(item, output, self._weight) for item, output in zip(items, outputs, strict=True)]

    def complete(self, collected: Collected) -> Collected:
        """The train batch of a step with its final scores; raises as `score` does."""
        return replace(collected, batch=replace(collected.batch, items=tuple(self.score(collected.batch.items))))


def to_be_scored(item: Experience) -> SequenceData:
    """The tokens of a sample and one more, before which the engine reads the value: that of the last token.

    Attention is causal, so what that token is does not matter.
    """
    ids = item.token_ids
    return SequenceData(prompt_ids=ids, response_ids=ids[-1:])


def with_output(item: Experience, output: float, weight: float) -> Experience:
    """The sample with `weight` times the model's output added to its score; the output itself is a term.

    Raises:
        RolloutFailed: the output, or the score, is not finite.
    """
    score = item.score + weight * output
    if not math.isfinite(score):
        raise RolloutFailed(
            f"reward.model gives {output} to sample {item.sample_index} of prompt {item.prompt.id}, "
            f"and {item.score:g} + {weight:g} times that is no finite score"
        )
    return replace(item, score=score, reward_terms={**item.reward_terms, MODEL_TERM: output})
