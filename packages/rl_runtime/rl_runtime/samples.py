"""The scored samples of a step as the batch of its update.

A sample of a run carries its `Prompt`, with the token ids that an environment gave its episode in place of the data's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core import Batch, pack
from rl_data import Prompt
from rollout_vllm import Sample

Phase = Callable[[str], AbstractContextManager[Any]]
"""Times a named phase of a step: `with phase("reward"): ...`."""


def seen_prompt(sample: Sample) -> Prompt:
    """The prompt with the token ids and images that an environment gave an episode in place of those of the data."""
    prompt: Prompt = sample.prompt
    ids, images = tuple(sample.prompt_ids.tolist()), tuple(sample.data.get("images", prompt.images))
    if ids == tuple(prompt.token_ids) and images == prompt.images:
        return prompt
    return replace(prompt, token_ids=ids, images=images)


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """The number of each sample's group, in the order in which groups first appear."""
    number = {key: place for place, key in enumerate(dict.fromkeys(sample.prompt_id for sample in samples))}
    return [number[sample.prompt_id] for sample in samples]


def sample_numbers(batch: Batch) -> Tensor:
    """int64 [S], the sample of each sequence, 0 to N - 1; sequences of a sample are neighbors."""
    default = torch.arange(batch.num_sequences)
    numbers_S: Tensor = batch.per_sequence.get("sample_ids", default).unique_consecutive(return_inverse=True)[1]
    return numbers_S


def batch_of(samples: Sequence[Sample], *, policy_version: int | None = None) -> Batch:
    """The scored samples as one batch.

    A sample with branches is several sequences, one after another, which have its facts in common.

    Per token: `routes` if the samples have them, uint8 or int16 [T, layers, experts]; -1 in context at the end.

    Columns: `rollout_log_probs`, unless they were not requested; `staleness`, int32, versions between the token and the
    weights that train; `turn_rewards` if a sample has some. Per sequence: `scores` (float64), `group_ids`,
    `sample_ids`, `total_lens` (response tokens of the longest path including context, which `sampling.max_tokens`
    limits), `is_truncated`, and `baseline_scores` (float64) if there are extra responses.

    Args:
        policy_version: of the weights that train on the samples; None: the newest one that sampled a token.
    """
    ids = [number for number, sample in enumerate(samples) for _ in sample.paths]
    longest = [max(path.response_ids.size for path in sample.paths) for sample in samples]
    samples = [path for sample in samples for path in sample.paths]
    versions = np.concatenate([np.zeros(0, np.int32), *(sample.generated_versions for sample in samples)])
    newest = int(versions.max(initial=0)) if policy_version is None else policy_version
    columns = {"staleness": newest - versions}
    log_probs = [sample.generated_log_probs for sample in samples]
    known = [row for row in log_probs if row is not None]
    if len(known) == len(samples):
        columns["rollout_log_probs"] = np.concatenate([np.zeros(0, np.float32), *known])
    if any(sample.turn_rewards is not None for sample in samples):
        columns["turn_rewards"] = np.concatenate(
            [
                np.zeros(sample.num_generated, np.float32) if sample.turn_rewards is None else sample.turn_rewards
                for sample in samples
            ]
        )
    facts = {
        "scores": torch.tensor([sample.score for sample in samples], dtype=torch.float64),
        "group_ids": torch.tensor(group_numbers(samples), dtype=torch.int64),
        "sample_ids": torch.tensor(ids, dtype=torch.int64),
        "total_lens": torch.tensor([longest[number] for number in ids], dtype=torch.int64),
        "is_truncated": torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
    }
    baselines = [sample.baseline_score for sample in samples if sample.baseline_score is not None]
    if baselines and len(baselines) == len(samples):
        facts["baseline_scores"] = torch.tensor(baselines, dtype=torch.float64)
    routes = [sample.routes for sample in samples]
    per_token = {"routes": _routes(samples)} if routes and all(rows is not None for rows in routes) else {}
    return pack(
        [sample.prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        masks=[sample.response_mask for sample in samples],
        columns={name: torch.from_numpy(column) for name, column in columns.items()},
        per_sequence=facts,
        per_token=per_token,
        images=[sample.images for sample in samples],
    )


def _routes(samples: Sequence[Sample]) -> torch.Tensor:
    """The experts of all tokens of the samples, one after another."""
    parts = []
    for sample in samples:
        assert sample.routes is not None
        # Of the last token, and of context behind the last sampled one, none are known, and no target depends on them.
        num_unknown = sample.token_ids.size - len(sample.routes)
        unknown = np.full((num_unknown, *sample.routes.shape[1:]), -1, np.int16)
        # Nobody reads those of the last token; context has none to differ from (actor/routes_differ).
        parts += [sample.routes, unknown if num_unknown > 1 else unknown.astype(sample.routes.dtype)]
    routes = np.concatenate(parts)
    return torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16))  # torch knows no uint16
