"""Groups of scored samples: from what the client or an episode generated to what a step trains on."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rl_core import Batch
from rl_data import Prompt
from rollout_vllm import Group, Sample

from ..samples import batch_of, seen_prompt

Finish = Callable[[Sequence[Sample]], list[Sample]]
"""Completes the scores of samples, in their order."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The samples of a step, and the number of those left out."""

    samples: tuple[Sample, ...]
    """The samples to train on."""
    dropped: tuple[Sample, ...] = ()
    """Scored samples that are not trained on, because dynamic sampling dropped their group."""
    num_failed: int
    reason: str = ""
    """Reason why the first of the failed samples was left out."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout."""
    reading: Future[dict[str, float]] | None = None
    """Those of the counters of servers and client, which are read during the update."""
    note: str = ""
    """A line for the log, if the batch has fewer groups than asked for."""
    ended: tuple[Group, ...] = ()
    """Every group that ended in this step, those that are not in the batch too."""
    policy_version: int | None = None
    """Version of the weights that train on the samples; None: the newest one that sampled a token."""

    @property
    def scored(self) -> tuple[Sample, ...]:
        """All scored samples of the step; their mean score is that of the policy, also with dynamic sampling."""
        return self.samples + self.dropped

    def batch(self) -> Batch:
        """The samples to train on as the batch of the step's update."""
        return batch_of(self.samples, policy_version=self.policy_version)


def decoded(group: Group, tokenizer: Any) -> Group:
    """The group whose samples have their texts, and prompts with the token ids of their episodes."""
    rows = [sample.response_ids for sample in group.samples]
    if _decodes_batches(tokenizer):  # in threads of its own, without Python's lock
        texts = tokenizer.backend_tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)
    else:  # of an array: transformers looks at the type of every number in a list
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    samples = zip(group.samples, texts, strict=True)
    return replace(group, samples=tuple(one.changed(text=text, prompt=seen_prompt(one)) for one, text in samples))


def _decodes_batches(tokenizer: Any) -> bool:
    """True for a tokenizer whose texts are those of its backend: its class has no decoding of its own."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    # transformers 5 does not clean up texts of BPE, though the files of Llama 3 ask for it, unless this flag is set.
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    if tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe):
        return False
    classes = type(tokenizer).__mro__
    own = classes[: classes.index(PreTrainedTokenizerFast)]
    return not any({"decode", "_decode"} & vars(one).keys() for one in own)


def largest(groups: Sequence[Group], min_samples: int, *, at_most: int) -> list[Group]:
    """The `at_most` groups with the most scored samples, in order, of those with at least `min_samples`."""
    enough = [group for group in groups if len(group.samples) >= min_samples]
    fullest = sorted(sorted(range(len(enough)), key=lambda i: -len(enough[i].samples))[:at_most])
    return [enough[i] for i in fullest]


async def with_baseline(scoring: Awaitable[Group], extra: Awaitable[Group]) -> Group:
    """The samples of a group with the mean score of its extra responses; none if these failed."""
    scored, baseline = await scoring, await extra
    if not baseline.samples:
        reason = f"no extra response: {baseline.failures[0].message}"
        return scored.without(scored.samples, "reward", reason)
    score = mean_score(baseline.samples)
    return replace(scored, samples=tuple(sample.changed(baseline_score=score) for sample in scored.samples))


def with_final_scores(groups: Sequence[Group], finish: Finish) -> list[Group]:
    """The groups with the final scores of their samples, which are computed together."""
    samples = iter(finish([sample for group in groups for sample in group.samples]))
    return [replace(group, samples=tuple(next(samples) for _ in group.samples)) for group in groups]


def score_of(sample: Sample) -> float:
    """The score of a scored sample."""
    assert sample.score is not None
    return sample.score


def mean_score(samples: Sequence[Sample]) -> float:
    """Mean score of scored samples."""
    return sum(map(score_of, samples)) / len(samples)


def to_state(group: Group) -> dict[str, Any]:
    """A group between drawing and training for a checkpoint, JSON-able: prompt, samples so far, and their scores."""
    prompt = {one.name: getattr(group.request.prompt, one.name) for one in fields(Prompt)}
    return {"prompt": prompt, **group.to_state()}


def from_state(state: Mapping[str, Any]) -> Group:
    """The inverse of `to_state`, also after JSON."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in state["prompt"].items()
    }
    group = Group.from_state(state, prompt=Prompt(**values))
    return replace(group, samples=tuple(replace(sample, prompt=seen_prompt(sample)) for sample in group.samples))
