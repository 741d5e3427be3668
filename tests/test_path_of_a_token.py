"""The records of a token on its way from a row of a file to the gradient: one at each station, 13 in all."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from rl_data.prompts import _prompt
from rl_data.rows import read_rows
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.rollout.groups import Collected, largest
from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.samples import batch_of
from rl_runtime.training.policy_loss import policy_loss
from rollout_vllm import RolloutClient
from rollout_vllm.client.group_run import GroupRun, extend
from rollout_vllm.client.protocol import parse_completion
from rollout_vllm.client.request_runner import RequestRunner

PATH = (
    *("Row", "Prompt", "Request", "Choice", "Completion", "Sample", "Group", "Collected"),
    *("Batch", "TrainBatch", "MiniBatch", "TokenOutputs", "LossOutput"),
)
"""In the order of the stations."""
STATIONS: tuple[Callable[..., Any], ...] = (
    read_rows,
    _prompt,
    RolloutPhase.request,
    RolloutClient.generate,
    RequestRunner.run,
    parse_completion,
    extend,
    GroupRun.result,
    Scorer.score,
    largest,
    RolloutPhase.collect,
    Collected.batch,
    batch_of,
    TrainBatch.__init__,
    ModelHandle.log_probs,
    TrainBatch.mini_batches.fget,  # type: ignore[attr-defined]
    ModelHandle.update,
    policy_loss,
)
"""The functions that take a record to the next station."""
BESIDE_THE_PATH = {
    *("Table", "Schema"),  # the file
    *("RequestFailure", "Failure"),  # where a path ends
    *("SamplingConfig", "PolicyConfig"),
    "StepStats",  # the result
}


def records(annotation: Any) -> set[str]:
    """The records in an annotation: dataclasses, and the train batch with its copies on the ranks."""
    if isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or annotation is TrainBatch):
        return {annotation.__name__}
    return {name for part in get_args(annotation) if part is not annotation for name in records(part)}


def test_a_token_meets_these_13_records_and_no_other() -> None:
    met = {name for station in STATIONS for hint in get_type_hints(station).values() for name in records(hint)}
    assert met - BESIDE_THE_PATH == set(PATH)
    assert len(PATH) == 13


def test_a_micro_batch_on_a_rank_is_of_the_same_type_as_the_batch_of_the_driver() -> None:
    assert get_type_hints(policy_loss)["batch"] is get_type_hints(batch_of)["return"]
