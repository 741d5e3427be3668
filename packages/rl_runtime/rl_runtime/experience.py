"""What one rollout step brought: sequences with their scores and per-token columns, ready to be packed for the ranks.

Shapes: `N` samples; every column is a list of N arrays, one value a generated token. Generated tokens are those of the
response that the policy wrote: all of them, but for what tools and other turns put between (`response_mask`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rl_core import SequenceData

Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class PromptLike(Protocol):
    """The prompt fields the runtime reads."""

    @property
    def id(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def ground_truth(self) -> str: ...
    @property
    def data_source(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One sample of a prompt, scored."""

    prompt: PromptLike
    group_id: int
    sample_index: int
    response_ids: tuple[int, ...]
    response_text: str
    response_mask: BoolArray | None = None
    """False where a response token is context, given to the policy and masked out of the loss; None: nowhere."""
    rollout_log_probs: Float32Array
    """One value a generated token."""
    finish_reason: str
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, how many generated tokens in a row it drew), in order."""
    num_turns: int = 1
    score: float

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens, context among them."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def num_generated(self) -> int:
        """Response tokens that the policy wrote."""
        return len(self.response_ids) if self.response_mask is None else int(self.response_mask.sum())

    @property
    def policy_version(self) -> int:
        """The oldest version that drew a token."""
        return min(version for version, _ in self.version_spans)


@dataclass(frozen=True, kw_only=True)
class ExperienceBatch:
    """The samples of a train batch or mini batch. Immutable: `with_column` and `select` give new batches."""

    items: tuple[Experience, ...]
    columns: Mapping[str, tuple[Float32Array, ...]] = field(default_factory=dict)

    @property
    def scores_N(self) -> torch.Tensor:
        """[N] float64."""
        return torch.tensor([item.score for item in self.items], dtype=torch.float64)

    @property
    def group_ids_N(self) -> torch.Tensor:
        """[N] int64; samples of one prompt share a number."""
        return torch.tensor([item.group_id for item in self.items], dtype=torch.int64)

    @property
    def response_lens_N(self) -> torch.Tensor:
        """[N] int64, generated tokens."""
        return torch.tensor([item.num_generated for item in self.items], dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        """Unpadded prompt and response tokens."""
        return sum(item.num_tokens for item in self.items)

    def with_column(self, name: str, values: Sequence[Float32Array]) -> "ExperienceBatch":
        """Adds or replaces a per-token column: N arrays, one value a generated token."""
        arrays = tuple(np.asarray(value, dtype=np.float32) for value in values)
        if [len(a) for a in arrays] != [item.num_generated for item in self.items]:
            raise ValueError(f"column {name!r} does not have one value a generated token")
        return replace(self, columns={**self.columns, name: arrays})

    def with_per_sequence(self, name: str, values_N: torch.Tensor) -> "ExperienceBatch":
        """Adds a column that repeats one value a sequence over its generated tokens (advantages, loss weights)."""
        pairs = zip(values_N.tolist(), self.items, strict=True)
        return self.with_column(name, [np.full(item.num_generated, v, dtype=np.float32) for v, item in pairs])

    def flat(self, name: str) -> torch.Tensor:
        """Column `name` of all samples one after another: [K] float32, K the sum of `response_lens_N`."""
        return torch.from_numpy(np.concatenate(self.columns[name]))

    def with_flat(self, name: str, values_K: torch.Tensor) -> "ExperienceBatch":
        """Adds a per-token column given as `flat` gives one."""
        borders = np.cumsum(self.response_lens_N.numpy())[:-1]
        return self.with_column(name, np.split(values_K.numpy(), borders))

    def select(self, indices: Sequence[int]) -> "ExperienceBatch":
        """The samples at `indices`, with their columns."""
        return ExperienceBatch(
            items=tuple(self.items[i] for i in indices),
            columns={name: tuple(column[i] for i in indices) for name, column in self.columns.items()},
        )

    def mini_batch_indices(self, num_prompts: int) -> tuple[tuple[int, ...], ...]:
        """The samples of each mini batch of `num_prompts` prompts: groups whole and in order.

        The last mini batch is smaller when groups were left out of the train batch.
        """
        order = list(dict.fromkeys(item.group_id for item in self.items))
        chosen = [set(order[start : start + num_prompts]) for start in range(0, len(order), num_prompts)]
        return tuple(tuple(i for i, item in enumerate(self.items) if item.group_id in groups) for groups in chosen)

    def mini_batches(self, num_prompts: int) -> Iterator["ExperienceBatch"]:
        """The mini batches of `mini_batch_indices`, each with its columns."""
        return map(self.select, self.mini_batch_indices(num_prompts))

    def sequence(self, index: int) -> SequenceData:
        """Sample `index` without its columns, as rl_core packs it."""
        item = self.items[index]
        return SequenceData(
            prompt_ids=item.prompt.token_ids, response_ids=item.response_ids, response_mask=item.response_mask
        )
