"""What goes in and comes out: plain data, picklable, without any library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
FailureKind = Literal[
    "too_long",  # prompt + max_tokens do not fit the model's context
    "refused",  # the server called the request wrong (4xx)
    "malformed",  # answers without all samples, token ids and log-probs
    "connection",  # no connection, or lost
    "timeout",  # no answer within request_timeout_s
    "server",  # 5xx or 429
    "aborted",  # the server aborted it
    "deadline",  # the caller's deadline passed
    "rollout",  # the user's rollout function raised
]


@dataclass(frozen=True)
class Endpoint:
    """One running server. `model` is the name it serves under; None: asked for at first use."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to be sampled n times.

    prompt_ids: token ids. seed: makes the samples repeatable; sample i is drawn with seed + i, so give every prompt
    of a step its own (`request_seed`). None: unseeded.
    """

    prompt_id: str
    prompt_ids: Sequence[int]
    seed: int | None = None


class VersionSpan(NamedTuple):
    """So many tokens in a row, drawn by this policy version."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response.

    response_ids: token ids, the end-of-sequence token included when it was sampled. log_probs: natural logarithm of
    the probability each of them was drawn with, after temperature and the other sampling settings; same length.
    policy_version: the version the client held when the first request was sent; last_policy_version: when the last
    answer came back. version_spans: which version drew which tokens, in order; the num_tokens add up to the response,
    neighbours differ in version. It is exact when weights change between `RolloutClient.pause` and `resume`; without
    a pause a span has the version of the moment its request was sent.
    """

    prompt_id: str
    sample_index: int
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    last_policy_version: int
    server_url: str = ""
    num_attempts: int = 1
    duration_s: float = 0.0  # from the first attempt to the answer
    version_spans: tuple[VersionSpan, ...] = ()  # left empty: all tokens of policy_version

    def __post_init__(self) -> None:
        if not self.version_spans and self.response_ids:
            object.__setattr__(self, "version_spans", (VersionSpan(self.policy_version, len(self.response_ids)),))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One sample that could not be generated. It has no reward: leave it out of the batch."""

    prompt_id: str
    sample_index: int
    kind: FailureKind
    message: str
    num_attempts: int


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """All of a prompt's samples: len(samples) + len(failures) == n, every index once."""

    prompt_id: str
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.failures


@dataclass(frozen=True, kw_only=True)
class PartialSample:
    """A response so far. finish_reason None: unfinished, perhaps without a token yet."""

    sample_index: int
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    last_policy_version: int = 0
    num_attempts: int = 0
    server_url: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PartialGroup:
    """A group that was cut off: hand it to a later `generate` in a request's place, and it is gone on with.

    samples: one for every index 0..n-1. Plain data: it may be pickled into a checkpoint.
    """

    request: Request
    samples: tuple[PartialSample, ...]

    @property
    def prompt_id(self) -> str:
        return self.request.prompt_id


@dataclass(frozen=True, kw_only=True)
class FirstGroups:
    """What `RolloutClient.generate_first` brings.

    groups: in request order; as many complete ones as were asked for (fewer when too many failed), and those with
    failures that ended before the cut. rest: the others, to be gone on with; empty when they were given up.
    """

    groups: list[GroupResult]
    rest: list[PartialGroup]


def request_seed(run_seed: int, step: int, prompt_id: str) -> int:
    """A seed of its own for each prompt of each step: 62 bits of SHA-256, so seed + sample index stays an int64."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
