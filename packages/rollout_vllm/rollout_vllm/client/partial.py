"""Responses that grow from answer to answer: pure functions.

An answer that the server cut short ("abort") is kept, and the response is gone on with in another request whose
prompt is the original one and all tokens so far. So every token keeps the log-prob and the version it was drawn with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..config import SamplingConfig
from ..samples import PartialGroup, PartialSample, Request, Sample, VersionSpan, request_seed
from .protocol import Choice


def fresh_group(request: Request, n: int) -> PartialGroup:
    """Nothing generated yet."""
    return PartialGroup(request=request, samples=tuple(PartialSample(sample_index=i) for i in range(n)))


def merge_spans(spans: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version become one span; empty ones go."""
    merged: list[VersionSpan] = []
    for version, num_tokens in spans:
        if num_tokens == 0:
            continue
        if merged and merged[-1].policy_version == version:
            num_tokens += merged.pop().num_tokens
        merged.append(VersionSpan(version, num_tokens))
    return tuple(merged)


def token_versions(spans: Sequence[VersionSpan]) -> list[int]:
    """The policy version of every token."""
    return [span.policy_version for span in spans for _ in range(span.num_tokens)]


def extend(
    part: PartialSample, choice: Choice, sampling: SamplingConfig, *, version: int, last_version: int
) -> PartialSample:
    """`part` with an answer's tokens behind its own; finished unless the answer was cut short.

    version: the client's when the request was sent; last_version: when the answer came.
    """
    ids = part.response_ids + choice.response_ids
    reason = None if choice.finish_reason == "abort" else choice.finish_reason
    if reason is None and len(ids) >= sampling.max_tokens:
        reason = "length"  # cut off after its last token
    return dataclasses.replace(
        part,
        response_ids=ids,
        log_probs=part.log_probs + choice.log_probs,
        version_spans=merge_spans([*part.version_spans, (version, len(choice.response_ids))]),
        finish_reason=reason,
        last_policy_version=last_version,
    )


def remaining(part: PartialSample, sampling: SamplingConfig) -> SamplingConfig:
    """The sampling settings of the request that goes on with `part`."""
    done = len(part.response_ids)
    max_tokens = sampling.max_tokens - done
    return dataclasses.replace(sampling, n=1, max_tokens=max_tokens, min_tokens=max(0, sampling.min_tokens - done))


def seed_of(request: Request, part: PartialSample) -> int | None:
    """The seed of the request that goes on with `part`: its own at the start, another one after every cut.

    The same seed again would draw later tokens with the random numbers that drew the first ones.
    """
    if request.seed is None:
        return None
    own = request.seed + part.sample_index
    return own if not part.response_ids else request_seed(own, len(part.response_ids), "go on")


def finished_sample(request: Request, part: PartialSample) -> Sample:
    """The sample of a finished part."""
    assert part.finish_reason is not None
    return Sample(
        prompt_id=request.prompt_id,
        sample_index=part.sample_index,
        response_ids=part.response_ids,
        log_probs=part.log_probs,
        finish_reason=part.finish_reason,
        policy_version=part.version_spans[0].policy_version if part.version_spans else part.last_policy_version,
        last_policy_version=part.last_policy_version,
        server_url=part.server_url,
        num_attempts=part.num_attempts,
        duration_s=part.duration_s,
        version_spans=part.version_spans,
    )
