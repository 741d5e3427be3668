"""Scored samples for tests; every field has a default."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_data import Prompt
from rollout_vllm import Failure, Group, Request, Sample, VersionSpan

PROMPT = Prompt(id="p", text="p", token_ids=(1,), ground_truth="1", data_source="gsm8k")


def prompt(token_ids: Sequence[int], id: str = "p") -> Prompt:
    return Prompt(id=id, text="p", token_ids=tuple(token_ids), ground_truth="1", data_source="gsm8k")


def sample(
    response: int | Sequence[int], *, group: int = 0, spans: Sequence[tuple[int, int]] = (), **fields: Any
) -> Sample:
    """A sample of a group with these response tokens, or with tokens 0 to `response` - 1.

    spans: (policy version, number of tokens). fields: replace the defaults.
    """
    ids = range(response) if isinstance(response, int) else response
    defaults: dict[str, Any] = {
        "prompt_id": str(group),
        "sample_index": 0,
        "prompt": PROMPT,
        "response_ids": np.array(ids, np.int32),
        "log_probs": np.zeros(len(ids), np.float32),
        "finish_reason": "stop",
        "version_spans": tuple(VersionSpan(*span) for span in spans),
        "score": 0.0,
    }
    values = defaults | fields
    return Sample(**{"prompt_ids": np.array(values["prompt"].token_ids, np.int32), **values})


def group(samples: Sequence[Sample], *, num_failed: int = 0, kind: Any = "connection") -> Group:
    """The group of these samples, in which others failed."""
    request = Request(prompt_id=samples[0].prompt_id if samples else "0", prompt_ids=[1])
    failures = [
        Failure(prompt_id=request.prompt_id, sample_index=index, kind=kind, message="it failed", num_attempts=1)
        for index in range(len(samples), len(samples) + num_failed)
    ]
    return Group(request=request, samples=tuple(samples), failures=tuple(failures))
