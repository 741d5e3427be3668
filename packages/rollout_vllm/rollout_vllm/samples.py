"""Input and output of generation: plain, picklable data without dependencies."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
FailureKind = Literal[
    "too_long",  # prompt + max_tokens exceed the model's context
    "refused",  # the server rejected the request (4xx)
    "malformed",  # a response without all samples, token ids and log-probs
    "connection",  # connection refused or lost
    "timeout",  # no response within request_timeout_s
    "server",  # 5xx or 429
    "aborted",  # the server aborted the request
    "deadline",  # the caller's deadline passed
    "rollout",  # the user's rollout function raised
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to be sampled n times.

    prompt_ids: token ids. seed: makes sampling reproducible; sample i uses seed + i, so every prompt of a step needs
    its own seed (see `request_seed`). None: no seed.
    """

    prompt_id: str
    prompt_ids: Sequence[int]
    seed: int | None = None


class VersionSpan(NamedTuple):
    """`num_tokens` consecutive tokens that were sampled by one policy version."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response.

    response_ids: token ids, including the end-of-sequence token if it was sampled. log_probs: log-probability (natural
    logarithm) of each token under the distribution it was sampled from, i.e. after temperature and the other sampling
    settings; same length as response_ids; None with `RolloutConfig(log_probs=False)`. policy_version: that of the
    first token; last_policy_version: the client's version when the last response arrived, or that of a later token.
    version_spans: the policy version of every token, in order; the num_tokens sum to the length of the response, and
    neighboring spans have different versions. They are exact on servers that note versions
    (`RolloutClient.fetch_policy_versions`), whenever weights are pushed. On other servers a span has the client's
    version at the time its request was sent, which is exact when weights change between `RolloutClient.pause` and
    `resume`.
    """

    prompt_id: str
    sample_index: int
    response_ids: list[int]
    log_probs: list[float] | None
    finish_reason: FinishReason
    policy_version: int
    last_policy_version: int
    server_url: str = ""
    num_attempts: int = 1
    duration_s: float = 0.0  # from the first attempt to the response
    version_spans: tuple[VersionSpan, ...] = ()  # empty: all tokens are of policy_version

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
    """All samples of one prompt. Every index 0..n-1 is either in samples or in failures."""

    prompt_id: str
    samples: tuple[Sample, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.failures


@dataclass(frozen=True, kw_only=True)
class PartialSample:
    """The response so far. finish_reason None: unfinished, possibly without any token."""

    sample_index: int
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    last_policy_version: int = 0
    num_attempts: int = 0
    server_url: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PartialGroup:
    """An interrupted group. Pass it to a later `generate` in place of a request to resume it.

    samples: one for every index 0..n-1. Plain data, which can be pickled into a checkpoint.
    """

    request: Request
    samples: tuple[PartialSample, ...]

    @property
    def prompt_id(self) -> str:
        return self.request.prompt_id


@dataclass(frozen=True, kw_only=True)
class FirstGroups:
    """Result of `RolloutClient.generate_first`.

    groups: in request order; `num_groups` complete ones (fewer if too many groups failed) and the incomplete ones that
    ended before them. rest: the interrupted groups, to be resumed; empty with keep_rest=False.
    """

    groups: list[GroupResult]
    rest: list[PartialGroup]


def request_seed(run_seed: int, step: int, prompt_id: str) -> int:
    """A distinct seed for each prompt of each step: 62 bits of SHA-256, so that seed + sample index fits an int64."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def merge_spans(spans: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Merge neighboring spans of the same version and drop empty ones."""
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
