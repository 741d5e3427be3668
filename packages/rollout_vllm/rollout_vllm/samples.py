"""Input and output of generation: plain, picklable data."""

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
RouteArray: TypeAlias = NDArray[np.uint8 | np.uint16]

FinishReason = Literal["stop", "length", "abort"]
FailureKind = Literal[
    "too_long",  # prompt + max_tokens exceed the model's context
    "refused",  # the server rejected the request (4xx)
    "malformed",  # a response without all samples, token ids and log-probs
    "connection",  # connection refused or lost
    "timeout",  # no response within request_timeout_s
    "server",  # 5xx or 429
    "aborted",  # the server aborted the request
    "deadline",  # the time limit of an episode passed
    "rollout",  # the user's rollout function raised
    "reward",  # generated, and not scored
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to be sampled n times.

    prompt_ids: token ids, a sequence or an array. seed: makes sampling reproducible; sample i uses seed + i, so every
    prompt of a step needs its own seed (see `request_seed`). None: no seed. prompt: an object of the caller, which the
    samples carry. images: a safetensors file on a disk of the servers with the images whose placeholders `prompt_ids`
    has: `image.0`, `image.1`..., uint8 [height, width, 3]. model: name of the model to sample from,
    such as that of a LoRA adapter on the servers; None: the client's.
    """

    prompt_id: str
    prompt_ids: Sequence[int] | IntArray
    seed: int | None = None
    prompt: Any = None
    images: str | None = None
    model: str | None = None


_ARRAYS = {
    "response_ids": np.int32,
    "log_probs": np.float32,
    "prompt_ids": np.int32,
    "response_mask": np.bool_,
    "turn_rewards": np.float32,
}
"""The fields of a sample that are arrays, with their dtypes."""


class VersionSpan(NamedTuple):
    """`num_tokens` consecutive tokens that were sampled by one policy version."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response, finished or so far, or one episode: all tokens after the prompt.

    Ids and log-probs are arrays from the server's answer on; lists are converted. The rollout makes a sample, scoring
    adds `text` and the scores, and a training batch packs it.
    """

    prompt_id: str = ""
    """Name of its group."""
    sample_index: int
    prompt: Any = field(default=None, repr=False)
    """The caller's prompt, from the request."""
    prompt_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, the tokens before the response: those of the request, unless an episode has replaced them."""
    images: str | None = None
    """The file of the images in `prompt_ids` and in the context of the response."""
    response_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, with the end-of-sequence token if it was sampled."""
    log_probs: FloatArray | None = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32, log-probability (natural logarithm) of each token under the distribution it was sampled from, after
    temperature and the other sampling settings; 0 for context; None with `RolloutConfig(log_probs=False)`."""
    finish_reason: FinishReason | None = None
    """Reason why the last turn ended; None: unfinished, possibly without any token."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The policy version of every token, in order: the num_tokens sum to the length of the response, and neighboring
    spans differ; context has the version of the tokens before it. Empty: all tokens are of last_policy_version.

    They are exact on servers that note versions (`RolloutClient.fetch_policy_versions`), whenever weights are pushed.
    On other servers a span has the client's version at the time its request was sent, which is exact when weights
    change between `RolloutClient.pause` and `resume`."""
    last_policy_version: int = 0
    """The client's version when the last response arrived, or that of a later token."""
    response_mask: BoolArray | None = None
    """False for context that the policy did not sample, such as the result of a tool; None: all True."""
    routes: RouteArray | None = field(default=None, repr=False)
    """uint8 or uint16 [tokens, layers, experts], the experts that computed each token of prompt and response, up to the
    last but one sampled token; None without `RolloutConfig(routes=True)`. Tokens that a later turn or a resumed request
    computed again have the experts of the last time: the newest tokens were sampled with those."""
    num_turns: int = 1
    """Of the whole episode."""
    branches: "tuple[Sample, ...]" = field(default=(), repr=False)
    """Further paths of an episode that branches, each a sequence of its own. A token that several paths have in common
    is sampled in one of them, and context in the others."""
    tree: tuple[str, ...] = field(default=(), repr=False)
    """The turns of an episode that branches, for a reader."""
    turn_rewards: FloatArray | None = None
    """float32, the rewards that a rollout function gave, one value per sampled token, 0 but for the last token of a
    rewarded turn; None if it gave none."""
    server_url: str = ""
    num_attempts: int = 0
    duration_s: float = 0.0
    """From the first attempt to the response."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The contents of `episode.data`."""
    text: str = ""
    """The decoded response; set by scoring."""
    score: float | None = None
    """Set by scoring, and for an episode that scores itself: the sum of its turn rewards."""
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    """Value of each of several rewards, before its weight; empty if there is one reward."""
    baseline_score: float | None = None
    """Mean score of further responses to the prompt that are not trained on, such as a greedy one."""

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(value, dtype))
        if not self.version_spans and self.response_ids.size:
            spans = (VersionSpan(self.last_policy_version, self.response_ids.size),)
            object.__setattr__(self, "version_spans", spans)

    def changed(self, **values: Any) -> "Sample":
        """A copy with other values, which must have the types of the fields. `dataclasses.replace`, which converts all
        arrays again, took a fifth of a client's time."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | values)
        return copy

    @property
    def paths(self) -> "tuple[Sample, ...]":
        """The sample and its branches, each as a sample without branches that has the score."""
        if not self.branches:
            return (self,)
        score, baseline = self.score, self.baseline_score
        whole = (self, *self.branches)
        return tuple(path.changed(branches=(), score=score, baseline_score=baseline) for path in whole)

    @property
    def policy_version(self) -> int:
        """The oldest version of a token."""
        spans = (span.policy_version for path in self.paths for span in path.version_spans)
        return min(spans, default=self.last_policy_version)

    @property
    def token_ids(self) -> IntArray:
        """int32, prompt and response."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def num_generated(self) -> int:
        """Response tokens that the policy sampled, of all paths."""
        own = self.response_ids.size if self.response_mask is None else int(self.response_mask.sum())
        return own + sum(branch.num_generated for branch in self.branches)

    @property
    def generated_log_probs(self) -> FloatArray | None:
        """The log-probs without those of context."""
        if self.log_probs is None or self.response_mask is None:
            return self.log_probs
        return self.log_probs[self.response_mask]

    @property
    def versions(self) -> IntArray:
        """int32, the policy version of each response token."""
        spans = np.array(self.version_spans, np.int32).reshape(-1, 2)
        return np.repeat(spans[:, 0], spans[:, 1])

    @property
    def generated_versions(self) -> IntArray:
        """The versions without those of context."""
        return self.versions if self.response_mask is None else self.versions[self.response_mask]

    @property
    def generated_spans(self) -> tuple[VersionSpan, ...]:
        """`version_spans` without context: their num_tokens sum to `num_generated`."""
        if self.response_mask is None:
            return self.version_spans
        return merge_spans((version, 1) for version in self.generated_versions.tolist())

    def to_state(self) -> dict[str, Any]:
        """All fields but the prompt, JSON-able if `data` is."""
        routes = None if self.routes is None else pack_routes(self.routes)
        state = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "prompt"}
        arrays = {name: state[name].tolist() for name in _ARRAYS if state[name] is not None}
        arrays["branches"] = [branch.to_state() for branch in self.branches]
        return state | arrays | {"reward_terms": dict(self.reward_terms), "data": dict(self.data), "routes": routes}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, prompt: Any = None) -> "Sample":
        """The inverse of `to_state`, also after JSON."""
        spans = tuple(VersionSpan(*span) for span in state["version_spans"])
        routes = None if state.get("routes") is None else unpack_routes(state["routes"])
        branches = tuple(cls.from_state(branch, prompt=prompt) for branch in state.get("branches", ()))
        made = {"version_spans": spans, "routes": routes, "branches": branches, "tree": tuple(state.get("tree", ()))}
        return cls(prompt=prompt, **{**state, **made})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One sample that could not be generated. It has no reward: leave it out of the batch."""

    prompt_id: str
    sample_index: int
    kind: FailureKind
    message: str
    num_attempts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All samples of one prompt, requested, interrupted or ended.

    Of an ended group every index 0..n-1 is either in samples or in failures. Pass an interrupted one, whose samples
    are the responses so far, to a later `generate` in place of a request to resume it.
    """

    request: Request
    samples: tuple[Sample, ...] = ()
    failures: tuple[Failure, ...] = ()

    @classmethod
    def fresh(cls, request: Request, n: int) -> "Group":
        """A group without any tokens."""
        first = Sample(
            prompt_id=request.prompt_id,
            sample_index=0,
            prompt=request.prompt,
            prompt_ids=np.asarray(request.prompt_ids, np.int32),
            images=request.images,
        )
        return cls(request=request, samples=tuple(first.changed(sample_index=i) for i in range(n)))

    @property
    def prompt_id(self) -> str:
        return self.request.prompt_id

    @property
    def complete(self) -> bool:
        """True if no sample has failed."""
        return not self.failures

    @property
    def size(self) -> int:
        """Samples that were asked for."""
        return len(self.samples) + len(self.failures)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(sample.response_ids.size for sample in self.samples)

    def without(self, samples: Iterable[Sample], kind: FailureKind, message: str) -> "Group":
        """The group with these of its samples as failures."""
        lost = {sample.sample_index: sample.num_attempts for sample in samples}
        failures = [
            Failure(prompt_id=self.prompt_id, sample_index=index, kind=kind, message=message, num_attempts=attempts)
            for index, attempts in lost.items()
        ]
        kept = tuple(sample for sample in self.samples if sample.sample_index not in lost)
        return replace(self, samples=kept, failures=(*self.failures, *failures))

    def to_state(self) -> dict[str, Any]:
        """Everything but the caller's prompt, JSON-able. Token ids of a prompt that is the request's stand there."""
        prompt_ids = id_list(self.request.prompt_ids)
        samples = [sample.to_state() for sample in self.samples]
        for sample in samples:
            if sample["prompt_ids"] == prompt_ids:
                sample["prompt_ids"] = None
        request = {"prompt_id": self.prompt_id, "prompt_ids": prompt_ids, "seed": self.request.seed}
        request |= {"images": self.request.images, "model": self.request.model}
        return {"request": request, "samples": samples, "failures": list(map(asdict, self.failures))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, prompt: Any = None) -> "Group":
        """The inverse of `to_state`, also after JSON."""
        request = Request(**state["request"], prompt=prompt)
        ids = np.asarray(request.prompt_ids, np.int32)
        own_ids = [ids if one["prompt_ids"] is None else one["prompt_ids"] for one in state["samples"]]
        samples = tuple(
            Sample.from_state({**one, "prompt_ids": own}, prompt=prompt)
            for one, own in zip(state["samples"], own_ids, strict=True)
        )
        return cls(request=request, samples=samples, failures=tuple(Failure(**one) for one in state["failures"]))


def request_seed(run_seed: int, step: int, prompt_id: str) -> int:
    """A distinct seed for each prompt of each step: 62 bits of SHA-256, so that seed + sample index fits an int64."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def pack_routes(routes: RouteArray) -> str:
    """Base64 of a .npy file, as vLLM's servers send it."""
    with io.BytesIO() as file:
        np.save(file, routes, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode("ascii")


def unpack_routes(text: str) -> RouteArray:
    """The inverse of `pack_routes`. Raises ValueError or EOFError for other text."""
    array: RouteArray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    return array


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


def id_list(token_ids: Sequence[int] | IntArray) -> list[int]:
    """Token ids as Python integers, for JSON and for user code."""
    ids: list[int] = np.asarray(token_ids, np.int64).tolist()
    return ids
