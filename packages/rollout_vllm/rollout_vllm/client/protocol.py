"""JSON of the completion request and its response: pure functions (OpenAI API of vLLM 0.26 to 0.32).

The request is /v1/completions with token ids as the prompt. It uses these vLLM extensions: `return_token_ids` (token
ids of the response), `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`, `min_tokens`, `repetition_penalty`, and
`vllm_xargs`, which tells this package's servers that only ids and log-probs are read (other servers ignore it). Their
responses have both as `packed` in place of lists (base64 of little-endian int32 and float32), and `policy_versions` of
each choice: [version, number of tokens] in order, -1 for a version that the server does not know. Any server that was
started for it returns `routed_experts` of each choice: base64 of a .npy file, uint8 or uint16 [tokens, layers,
experts], of all tokens of prompt and response but the last one.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy

from ..config import SamplingConfig
from ..samples import FinishReason, FloatArray, IntArray, RouteArray, id_list, unpack_routes

_FINISH_REASONS = ("stop", "length", "abort")


class MalformedAnswerError(ValueError):
    """The server's JSON is not a complete response to the request."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One response, as parsed from JSON."""

    response_ids: IntArray
    log_probs: FloatArray | None
    finish_reason: FinishReason
    spans: tuple[tuple[int | None, int], ...] = ()
    """(policy version, number of tokens) of all tokens in order, from this package's servers; () from others. None: the
    server's weights were never published with a version."""
    routes: RouteArray | None = None
    """Experts of prompt and response tokens, but the last one; None: not asked for, or without response tokens."""


def completion_body(
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    *,
    model: str | None,
    seed: int | None,
    log_probs: bool = True,
    images: str | None = None,
) -> dict[str, Any]:
    """The JSON of one request for `sampling.n` samples. It sets every sampling value, so no server default applies.

    log_probs: ask for the log-prob of every token. images: the file of the prompt's images.
    """
    with_images = {} if images is None else {"plinth_images": images}
    model = model if images is None else f"{model}+images"  # unknown to servers that would not see them
    optional = {"model": model, "seed": seed, "logprobs": 0 if log_probs else None}
    return {
        "prompt": id_list(prompt_ids),
        **vars(sampling),  # its fields have the names of vLLM's parameters
        "n": sampling.num_samples,
        "max_tokens": sampling.response_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "skip_special_tokens": not sampling.stop,  # those of a stop string are text too; nobody reads the text
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "vllm_xargs": {"plinth_ids_only": 2, **with_images},  # 2: `packed` is read
        "stream": False,
        **{name: value for name, value in optional.items() if value is not None},
    }


def parse_completion(answer: Any, n: int, *, log_probs: bool = True, num_routed: int | None = None) -> list[Choice]:
    """The n choices in index order.

    log_probs: whether they were asked for. num_routed: tokens of the prompt, if the experts of all tokens are needed.

    Raises MalformedAnswerError unless every index 0..n-1 is present once, with token ids and, if asked for, one finite
    log-prob per token and the experts of each computed token.
    """
    if not isinstance(answer, Mapping) or not isinstance(answer.get("choices"), list):
        raise MalformedAnswerError("the answer has no list of choices")
    choices: dict[int, Choice] = {}
    for raw in answer["choices"]:
        if not isinstance(raw, Mapping) or not isinstance(raw.get("index"), int):
            raise MalformedAnswerError("a choice has no index")
        index = raw["index"]
        if index in choices or not 0 <= index < n:
            raise MalformedAnswerError(f"choice index {index} is repeated or not in 0..{n - 1}")
        choice = _parse_choice(raw, index, log_probs)
        if num_routed is not None and choice.response_ids.size:
            routes = _parse_routes(raw.get("routed_experts"), index, num_routed + choice.response_ids.size - 1)
            choice = replace(choice, routes=routes)
        choices[index] = choice
    if len(choices) != n:
        raise MalformedAnswerError(f"{len(choices)} choices for n={n}")
    return [choices[index] for index in range(n)]


def _parse_choice(raw: Mapping[str, Any], index: int, asked: bool) -> Choice:
    reason = raw.get("finish_reason")
    if reason not in _FINISH_REASONS:
        raise MalformedAnswerError(
            f"choice {index}: finish_reason {reason!r} is not one of {', '.join(_FINISH_REASONS)}"
        )
    ids, values = (_packed_numbers if "packed" in raw else _listed_numbers)(raw, index, asked)
    spans = _parse_spans(raw.get("policy_versions", []), index, len(ids))
    if values is not None and len(values) != len(ids):
        raise MalformedAnswerError(f"choice {index}: {len(values)} log-probs for {len(ids)} tokens")
    return Choice(ids, values, cast(FinishReason, reason), spans)


def _packed_numbers(raw: Mapping[str, Any], index: int, asked: bool) -> tuple[IntArray, FloatArray | None]:
    """Ids and log-probs of this package's servers. asked: whether log-probs were."""
    try:
        ids, values = (
            numpy.frombuffer(base64.b64decode(raw["packed"][name], validate=True), dtype)
            for name, dtype in (("token_ids", "<i4"), ("log_probs", "<f4"))
        )
    except (LookupError, TypeError, ValueError) as error:
        raise MalformedAnswerError(f"choice {index}: packed ids and log-probs: {error!r}") from None
    if not numpy.isfinite(values).all():
        raise MalformedAnswerError(f"choice {index}: a log-prob is not finite")
    return ids, values if asked else None


def _listed_numbers(raw: Mapping[str, Any], index: int, asked: bool) -> tuple[IntArray, FloatArray | None]:
    """Ids and log-probs of other servers. asked: whether log-probs were."""
    logprobs = raw.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    ids = raw.get("token_ids")
    if values is None and ids == []:
        values = []
    # A large step has a million tokens: use built-in functions over whole lists instead of a Python loop.
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise MalformedAnswerError(
            f"choice {index}: no token ids (does the server support return_token_ids, or does a proxy drop `packed`?)"
        )
    if not asked:
        return numpy.array(ids, numpy.int32), None
    if not isinstance(values, list):
        raise MalformedAnswerError(f"choice {index}: no log-probs")
    if not set(map(type, values)) <= {int, float} or not all(map(math.isfinite, values)):
        raise MalformedAnswerError(f"choice {index}: a log-prob is missing or is not finite")
    return numpy.array(ids, numpy.int32), numpy.array(values, numpy.float32)


def _parse_spans(raw: Any, index: int, num_tokens: int) -> tuple[tuple[int | None, int], ...]:
    if raw == []:
        return ()
    try:
        spans = tuple((None if version < 0 else int(version), int(count)) for version, count in raw)
        if sum(count for _, count in spans) == num_tokens and all(count > 0 for _, count in spans):
            return spans
    except (TypeError, ValueError):
        pass
    problem = f"{str(raw)[:100]} is not a list of [version, number of tokens] of {num_tokens} tokens"
    raise MalformedAnswerError(f"choice {index}: policy_versions {problem}")


def _parse_routes(raw: Any, index: int, num_rows: int) -> RouteArray:
    if raw is None:
        raise MalformedAnswerError(f"choice {index}: no routed_experts (was the server started with rollout.routes?)")
    try:
        routes = unpack_routes(raw)
    except (TypeError, ValueError, EOFError) as error:
        raise MalformedAnswerError(f"choice {index}: routed_experts: {error!r}") from None
    if routes.ndim != 3 or len(routes) != num_rows or routes.dtype.kind != "u":
        problem = f"{routes.dtype} {list(routes.shape)}, not unsigned [{num_rows}, layers, experts]"
        raise MalformedAnswerError(f"choice {index}: routed_experts are {problem}")
    return routes
