"""Scored samples of held-out prompts, and the metrics of each prompt. Training and `apps/evaluate` use the same.

Samples that failed are counted and enter no metric; a prompt with fewer samples than a metric needs has no value.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plinth_base.errors import shown
from rl_core import majority_vote, pass_at_k
from rl_data import Prompt
from rollout_vllm import Sample

from .groups import score_of


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """One scored sample. JSON-able, as are all of this module."""

    index: int
    """Number of the sample, 0 to n - 1; failed samples have numbers too."""
    response: str
    score: float
    is_right: bool
    """True if it has the full score (`Scorer.is_full`)."""
    finish_reason: str
    num_tokens: int
    """Response tokens that the model sampled."""
    num_turns: int = 1
    terms: Mapping[str, float] = field(default_factory=dict)
    """Value of each of several rewards."""
    images: tuple[str, ...] = ()
    """Files of the images that it has seen."""


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The samples of one held-out prompt, and why others failed."""

    prompt_id: str
    prompt: str
    ground_truth: str
    data_source: str
    samples: tuple[SampleResult, ...]
    votes: tuple[int, ...] | None = None
    """For each sample a number that is equal for equal answers, -1 without an answer; None: the reward finds none."""
    failures: tuple[str, ...] = ()

    @property
    def num_right(self) -> int:
        """Samples with the full score."""
        return sum(sample.is_right for sample in self.samples)

    @property
    def score_mean(self) -> float:
        """Mean score of the samples; NaN without any."""
        return float(np.mean([sample.score for sample in self.samples])) if self.samples else float("nan")

    @property
    def majority(self) -> float:
        """True if the most frequent answer is right (`rl_core.majority_vote`); NaN without samples or votes."""
        if self.votes is None or not self.samples:
            return float("nan")
        return majority_vote(self.votes, [sample.is_right for sample in self.samples])


def prompt_result(
    prompt: Prompt,
    samples: Iterable[Sample],
    *,
    is_right: Sequence[bool],
    votes: Sequence[int] | None,
    failures: Sequence[str],
) -> PromptResult:
    """The result of one prompt from its scored samples."""
    return PromptResult(
        prompt_id=prompt.id,
        prompt=prompt.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        samples=tuple(
            SampleResult(
                index=sample.sample_index,
                response=sample.text,
                score=score_of(sample),
                is_right=right,
                finish_reason=sample.finish_reason or "",
                num_tokens=sample.num_generated,
                num_turns=sample.num_turns,
                terms=sample.reward_terms,
                images=getattr(sample.prompt, "images", ()),
            )
            for sample, right in zip(samples, is_right, strict=True)
        ),
        votes=None if votes is None else tuple(votes),
        failures=tuple(failures),
    )


def sample_counts(num_samples: int) -> tuple[int, ...]:
    """The k of pass@k for n samples: powers of two up to n, and n."""
    powers = (1 << power for power in range(num_samples.bit_length()))
    return tuple(sorted({*powers, num_samples}))


def prompt_metrics(
    results: Sequence[PromptResult], *, num_samples: int, pass_at: Collection[int]
) -> dict[str, npt.NDArray[np.float64]]:
    """Metric -> one float64 for each prompt, NaN where it has no value: `pass@k`, `mean@n`, `maj@n`.

    `pass@k` for k in `pass_at` needs k scored samples, `mean@n` (mean score) and `maj@n` (majority vote) one.

    Args:
        num_samples: n, the number of samples that were requested for each prompt.
    """
    right = np.array([result.num_right for result in results], np.int64)
    scored = np.array([len(result.samples) for result in results], np.int64)
    columns = {}
    for k in sorted(pass_at):
        column = columns[f"pass@{k}"] = np.full(len(results), np.nan)
        column[scored >= k] = pass_at_k(right[scored >= k], scored[scored >= k], k)
    columns[f"mean@{num_samples}"] = np.array([result.score_mean for result in results], np.float64)
    majority = np.array([result.majority for result in results], np.float64)
    return columns | ({f"maj@{num_samples}": majority} if num_samples > 1 and np.isfinite(majority).any() else {})


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Results on held-out prompts, of which `num_samples_per_prompt` samples each were requested."""

    prompts: tuple[PromptResult, ...]
    num_samples_per_prompt: int

    @property
    def accuracy(self) -> float:
        """Share of the scored samples with the full score."""
        return sum(result.num_right for result in self.prompts) / self.num_samples

    @property
    def score_mean(self) -> float:
        """Mean score of the scored samples."""
        return float(np.mean([sample.score for result in self.prompts for sample in result.samples]))

    @property
    def num_samples(self) -> int:
        """Number of scored samples."""
        return sum(len(result.samples) for result in self.prompts)

    @property
    def num_failed(self) -> int:
        """Number of samples that could not be generated or scored."""
        return len(self.prompts) * self.num_samples_per_prompt - self.num_samples

    @property
    def failure(self) -> str:
        """Reason why the first of the failed samples failed; empty if none did."""
        return next((reason for result in self.prompts for reason in result.failures), "")

    def examples(self, count: int = 3) -> list[str]:
        """A line each for the first samples of the first prompts: end of the prompt, response, answer and score."""
        first = ((result, result.samples[0]) for result in self.prompts if result.samples)
        return [
            f" {shown(row.prompt[-70:])} -> {shown(sample.response)}; answer {row.ground_truth}, score {sample.score:g}"
            for row, sample in itertools.islice(first, count)
        ]

    def metrics(self) -> dict[str, float]:
        """Names and values for the metrics of a run; `pass@k` and `maj@n` with several samples per prompt."""
        n = self.num_samples_per_prompt
        metrics: dict[str, float] = {
            "val/accuracy": self.accuracy,
            "val/score/mean": self.score_mean,
            "val/num_samples": self.num_samples,
            "val/num_failed": self.num_failed,
        }
        if n == 1:
            return metrics
        columns = prompt_metrics(self.prompts, num_samples=n, pass_at=sample_counts(n)[1:])
        del columns[f"mean@{n}"]  # val/score/mean, but for the weight of prompts with failed samples
        return metrics | {f"val/{name}": float(np.nanmean(v)) for name, v in columns.items() if np.isfinite(v).any()}
