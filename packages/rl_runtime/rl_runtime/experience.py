"""The samples of one step: token ids, rollout log-probs, scores and per-token columns.

Shapes: `N` samples; a column is N float32 arrays with one value per generated token. Generated tokens are the response
tokens that the policy sampled; `response_mask` excludes the others (tool results, text of other turns).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_core import SequenceData
from rl_data import Prompt

Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Phase = Callable[[str], AbstractContextManager[Any]]
"""Times a named phase of a step: `with phase("reward"): ...`."""


PromptLike = Prompt
"""What the runtime reads of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One scored sample of a prompt."""

    prompt: PromptLike
    group_id: int
    """Number of its group in the batch."""
    group_key: str = ""
    """Name of its group in the run, `<step>/<number>:<id of the prompt>`."""
    sample_index: int
    response_ids: tuple[int, ...]
    response_text: str
    response_mask: BoolArray | None = None
    """[response tokens], False for context that the policy did not sample and is not trained on; None: all True."""
    rollout_log_probs: Float32Array | None
    """The servers' log-probs, one value per generated token; None with `rollout.log_probs=false`."""
    finish_reason: str
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, number of consecutive generated tokens that it sampled), in order."""
    num_turns: int = 1
    score: float
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    """Value of each of several rewards (`reward.terms`), before its weight; empty if there is one reward."""
    turn_rewards: Float32Array | None = None
    """Rewards of an environment's turns, one value per generated token, 0 except at the last token of a turn; None: the
    score is the only reward. Their sum is the environment's part of the score."""
    baseline_score: float | None = None
    """Score of the greedy response to the same prompt (ReMax); None if the algorithm does not use it."""

    @property
    def token_ids(self) -> list[int]:
        """Of prompt and response, with the end-of-sequence token if there is one."""
        return [*self.prompt.token_ids, *self.response_ids]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens, including context."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def num_generated(self) -> int:
        """Response tokens that the policy sampled."""
        return len(self.response_ids) if self.response_mask is None else int(self.response_mask.sum())

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled a token."""
        return min(version for version, _ in self.version_spans)

    def to_state(self) -> dict[str, Any]:
        """All fields but the prompt, JSON-able; of an episode's own prompt the token ids."""
        state = {name.name: getattr(self, name.name) for name in fields(self) if name.name != "prompt"}
        arrays = {name: value.tolist() for name, value in state.items() if isinstance(value, np.ndarray)}
        return state | arrays | {"reward_terms": dict(self.reward_terms), "prompt_ids": self.prompt.token_ids}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, prompt: PromptLike) -> "Experience":
        """The inverse of `to_state`, also after JSON; `prompt` is that of the data."""
        values = dict(state)
        types = {"response_mask": np.bool_, "rollout_log_probs": np.float32, "turn_rewards": np.float32}
        for name, dtype in types.items():
            values[name] = None if values[name] is None else np.asarray(values[name], dtype=dtype)
        spans = tuple((version, num_tokens) for version, num_tokens in values["version_spans"])
        values |= {"response_ids": tuple(values["response_ids"]), "version_spans": spans}
        return cls(prompt=with_token_ids(prompt, values.pop("prompt_ids")), **values)


def with_token_ids(prompt: PromptLike, token_ids: Sequence[int]) -> PromptLike:
    """The prompt with the token ids that an environment gave an episode in place of those of the data."""
    if tuple(token_ids) == tuple(prompt.token_ids):
        return prompt
    return replace(prompt, token_ids=tuple(token_ids))


@dataclass(frozen=True, kw_only=True)
class ExperienceBatch:
    """The samples of a train batch or mini batch. Immutable: `with_column` and `select` return new batches."""

    items: tuple[Experience, ...]
    columns: Mapping[str, tuple[Float32Array, ...]] = field(default_factory=dict)
    policy_version: int | None = None
    """Version of the weights that train on the samples; None: the newest one that sampled a token."""

    @property
    def scores_N(self) -> torch.Tensor:
        """[N] float64."""
        return torch.tensor([item.score for item in self.items], dtype=torch.float64)

    @property
    def group_ids_N(self) -> torch.Tensor:
        """[N] int64, the same for all samples of a prompt."""
        return torch.tensor([item.group_id for item in self.items], dtype=torch.int64)

    @property
    def response_lens_N(self) -> torch.Tensor:
        """[N] int64, number of generated tokens."""
        return torch.tensor([item.num_generated for item in self.items], dtype=torch.int64)

    @property
    def total_lens_N(self) -> torch.Tensor:
        """[N] int64, number of response tokens including context, which `sampling.max_tokens` limits."""
        return torch.tensor([len(item.response_ids) for item in self.items], dtype=torch.int64)

    @property
    def truncated_N(self) -> torch.Tensor:
        """[N] bool, whether the response was cut at the length limit."""
        return torch.tensor([item.finish_reason == "length" for item in self.items])

    @property
    def turn_rewards_K(self) -> torch.Tensor:
        """[K] float32, the rewards of turns at their generated tokens; 0 for samples that have none."""
        rows = [
            np.zeros(item.num_generated, np.float32) if item.turn_rewards is None else item.turn_rewards
            for item in self.items
        ]
        return torch.from_numpy(np.concatenate(rows))

    @property
    def rollout_log_probs_K(self) -> torch.Tensor | None:
        """[K] float32, the servers' log-probs of the generated tokens of all samples in order; None without them."""
        rows = [item.rollout_log_probs for item in self.items if item.rollout_log_probs is not None]
        return torch.from_numpy(np.concatenate(rows)) if len(rows) == len(self.items) else None

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all samples, without padding."""
        return sum(item.num_tokens for item in self.items)

    def with_column(self, name: str, values: Sequence[Float32Array]) -> "ExperienceBatch":
        """Adds or replaces a column: N arrays, one value per generated token.

        Raises:
            ValueError: an array has another length.
        """
        arrays = tuple(np.asarray(value, dtype=np.float32) for value in values)
        if [len(a) for a in arrays] != [item.num_generated for item in self.items]:
            raise ValueError(f"column {name!r} does not have one value per generated token")
        return replace(self, columns={**self.columns, name: arrays})

    def with_per_sequence(self, name: str, values_N: torch.Tensor) -> "ExperienceBatch":
        """Adds a column that repeats one value per sample, [N], over its generated tokens."""
        pairs = zip(values_N.tolist(), self.items, strict=True)
        return self.with_column(name, [np.full(item.num_generated, v, dtype=np.float32) for v, item in pairs])

    def flat(self, name: str) -> torch.Tensor:
        """Column `name` of all samples in order: float32 [K], K = sum of `response_lens_N`."""
        return torch.from_numpy(np.concatenate(self.columns[name]))

    def select(self, indices: Sequence[int]) -> "ExperienceBatch":
        """The samples at `indices`, with their columns."""
        return replace(
            self,
            items=tuple(self.items[i] for i in indices),
            columns={name: tuple(column[i] for i in indices) for name, column in self.columns.items()},
        )

    def mini_batch_indices(self, num_prompts: int) -> tuple[tuple[int, ...], ...]:
        """The sample indices of each mini batch of `num_prompts` prompts; groups are not split and keep their order.

        The last mini batch is smaller when groups were left out of the train batch.
        """
        order = list(dict.fromkeys(item.group_id for item in self.items))
        chosen = [set(order[start : start + num_prompts]) for start in range(0, len(order), num_prompts)]
        return tuple(tuple(i for i, item in enumerate(self.items) if item.group_id in groups) for groups in chosen)

    def sequence(self, index: int) -> SequenceData:
        """Sample `index` without its columns, as rl_core packs it."""
        item = self.items[index]
        return SequenceData(
            prompt_ids=item.prompt.token_ids, response_ids=item.response_ids, response_mask=item.response_mask
        )
