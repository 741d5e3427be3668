"""Buffers tokens and log-probs in vLLM's engine core, for clients that read nothing else of a response.

Stock vLLM sends every token from the engine core to the front end as it is sampled, its log-prob as three arrays, and
the front end makes Python objects and text of each. That work takes longer than a decoding step of a small model. Here
the engine core collects the tokens and log-probs of a request and sends them every `INTERVAL` tokens, when the request
ends and when it is aborted; the front end appends them to two lists. Values and tokens are the same. The answer
has them as two base64 texts if the client reads those, because pydantic and JSON would handle every number in Python.

The engine core also notes the policy version that samples each token: `policy_versions.py` tells it the version when
new weights are published. The versions travel with the tokens, so they are exact whatever is in flight between the
processes.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from plinth_base.fence import Replace

from .decoding import tables_of

INTERVAL = 32
"""Tokens of a request per message. Counters such as `vllm:generation_tokens` advance in these steps. A request with
stop strings has one token per message: the front end makes text of them, looks for the strings and ends the request."""

PACKED = 2
"""Value of the marker of this package's client, which reads `packed_choice`."""
DIRECT = 3
"""PACKED, and `completions.py` sends the answer: it may be `packed_answer`."""

UNKNOWN_VERSION = -1
"""Policy version of a server whose weights were never published with a version."""

_COMPLETION = re.compile(r"(\d+_)?cmpl-")
"""Beginning of vLLM's ids of /v1/completions: the only route whose answer is made of buffered tokens."""


def is_buffered(request: Any, marker: str) -> bool:
    """True if the client of `request` asked for ids only, and nothing in its sampling parameters needs more than that.

    request: vLLM's `Request` (engine core) or `EngineCoreRequest` (front end).
    """
    params = request.sampling_params
    if params is None or marker not in (params.extra_args or {}) or request.resumable:
        return False
    if not _COMPLETION.match(request.request_id):
        return False
    needs = (params.logprobs, params.prompt_logprobs, params.logprob_token_ids)
    return params.output_kind.name == "FINAL_ONLY" and not any(needs) and params.prompt_logprobs is None


def packed_choice(token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, str]:
    """Ids (int32) and log-probs (float32, as vLLM computes them) as base64 of little-endian numbers.

    log_probs: empty if they were not asked for.
    """
    arrays = {
        "token_ids": numpy.asarray(token_ids, dtype="<i4"),
        "log_probs": numpy.maximum(numpy.asarray(log_probs, dtype="<f4"), numpy.float32(-9999.0)),
    }
    return {name: base64.b64encode(array.tobytes()).decode("ascii") for name, array in arrays.items()}


def packed_answer(outputs: Sequence[Any]) -> bytes | None:
    """The JSON of an answer with all that its client reads of these `CompletionOutput`s, in order.

    None if vLLM has more to say: an error or routed experts.
    """
    if any(output.routed_experts is not None or output.finish_reason == "error" for output in outputs):
        return None
    choices = [
        {
            "index": index,
            "finish_reason": output.finish_reason,
            "policy_versions": output.logprobs.spans,
            "packed": packed_choice(output.token_ids, output.logprobs),
        }
        for index, output in enumerate(outputs)
    ]
    return json.dumps({"choices": choices}, separators=(",", ":")).encode()


def ending_tokens(request: Any) -> frozenset[int] | None:
    """The ids that end a request of the engine core; None if vLLM itself has to look at each of its tokens."""
    params = request.sampling_params
    if request.structured_output_request is not None or request.mm_features or params.repetition_detection is not None:
        return None
    return frozenset([*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])])


@dataclass(slots=True)
class _Unsent:
    """Tokens that were sampled for a request since its last message.

    spans: (policy version, number of tokens) of the first tokens; the others are of the current version.
    """

    client_index: int
    ends: frozenset[int] | None = None
    """Tokens that end the request; None: vLLM looks at each of its tokens."""
    interval: int = INTERVAL
    """Tokens per message."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    room: int | None = None
    """The number of tokens from which on vLLM looks at each again; None: not known yet."""
    scored: bool = False
    """True if the client asked for log-probs; known with `room`."""
    routes: list[numpy.ndarray] = field(default_factory=list)
    """Routed experts, if the server returns them: [tokens, layers, experts] each."""

    def end_span(self, version: int) -> None:
        """The tokens that belong to no span yet are of `version`."""
        count = len(self.token_ids) - sum(count for _, count in self.spans)
        self.spans += [(version, count)] if count else []


def _room(unsent: _Unsent, request: Any, scheduler: Any) -> int:
    """Sets and returns `unsent.room`: the next token completes a message or may be the last of its request."""
    unsent.scored = request.sampling_params.logprobs is not None
    left = min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - request.num_tokens)
    unsent.room = min(unsent.interval, len(unsent.token_ids) + left) - 1
    return unsent.room


class TokenBuffer:
    """The tokens and log-probs of requests that the engine core has sampled and not sent yet.

    version: policy version of the tokens that are sampled now.
    """

    def __init__(self) -> None:
        self.version = UNKNOWN_VERSION
        self._unsent: dict[str, _Unsent] = {}

    def publish(self, version: int) -> None:
        """Tokens that `filter` receives from now on are of `version`."""
        for unsent in self._unsent.values():
            unsent.end_span(self.version)
        self.version = version

    def open(
        self, request_id: str, client_index: int, ends: frozenset[int] | None = None, *, interval: int = INTERVAL
    ) -> None:
        """Buffer a request of front end number `client_index`. ends: `ending_tokens`. interval: tokens per message."""
        self._unsent[request_id] = _Unsent(client_index, ends, interval)

    def client_of(self, request_id: str) -> int | None:
        """The front end of a request; None if the request is not buffered."""
        unsent = self._unsent.get(request_id)
        return None if unsent is None else unsent.client_index

    def close(self, request_id: str) -> Any:
        """Stop buffering a request. Returns an unfinished output with what was not sent, None if there is none."""
        from vllm.v1.engine import EngineCoreOutput

        unsent = self._unsent.pop(request_id)
        if not unsent.token_ids:
            return None
        routes = _joined(unsent.routes)
        return EngineCoreOutput(request_id, unsent.token_ids, new_logprobs=self._message(unsent), routed_experts=routes)

    def note(
        self, scheduler: Any, scheduled: dict[str, int], sampled: Any, column: list[float] | None
    ) -> dict[str, int]:
        """Note the tokens that neither end their request nor complete a message, as vLLM's scheduler would.

        For them vLLM would make an output that `filter` drops.

        scheduled: number of tokens by request. sampled: the ModelRunnerOutput. column: log-probs by row, if any.
        Returns the requests that vLLM still has to look at.
        """
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        running, rest = RequestStatus.RUNNING, dict[str, int]()
        tokens_of, row_of, requests = sampled.sampled_token_ids, sampled.req_id_to_index, scheduler.requests
        manager = scheduler.kv_cache_manager
        is_ahead, tables = isinstance(scheduler, AsyncScheduler), tables_of(manager)
        size = 1 if tables is None else tables.block_size  # tokens from one block that is hashed and cached to the next
        for name, count in scheduled.items():
            unsent, request = self._unsent.get(name), requests.get(name)
            if (
                unsent is None
                or unsent.ends is None
                or request is None
                or count != 1
                or request.status is not running
                or request.num_preemptions  # its tokens may be stale
                or request.prefill_stats is not None
                or request.events
                or len(unsent.token_ids) >= (_room(unsent, request, scheduler) if unsent.room is None else unsent.room)
                or len(tokens := tokens_of[row := row_of[name]]) != 1
                or (token := tokens[0]) in unsent.ends
            ):
                rest[name] = count
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if not request.num_tokens % size:
                request.update_block_hashes()
            if is_ahead:
                request.num_output_placeholders -= 1
                known = request.num_computed_tokens - request.num_output_placeholders
                if not known % size:
                    manager.cache_blocks(request, known)
            unsent.token_ids.append(token)
            if column is not None and unsent.scored:
                unsent.log_probs.append(column[row])
        return rest

    def filter(self, outputs: Iterable[Any], log_probs: Any, column: list[float] | None) -> list[Any]:
        """The outputs to send after a step, in order.

        outputs: of the requests that took part in the step, with `_Rows`' positions in place of log-probs.
        log_probs: the step's LogprobsLists, or None. column: its first column.
        """
        return [output for output in outputs if self._ready(output, log_probs, column)]

    def _ready(self, output: Any, log_probs: Any, column: list[float] | None) -> bool:
        unsent, position = self._unsent.get(output.request_id), output.new_logprobs
        if unsent is None:
            if position is not None:
                output.new_logprobs = log_probs.slice_request(*position)
            return True
        unsent.token_ids += output.new_token_ids
        if position is not None:
            assert column is not None
            starts, (row, length) = log_probs.cu_num_generated_tokens, position
            first = row if starts is None else starts[row]
            unsent.log_probs += column[first : first + length]
        if output.routed_experts is not None:
            unsent.routes.append(output.routed_experts)
        if len(unsent.token_ids) < unsent.interval and not _carries_more(output):
            return False
        output.routed_experts = _joined(unsent.routes)
        output.new_token_ids, output.new_logprobs = unsent.token_ids, self._message(unsent)
        if output.finish_reason is None:
            self._unsent[output.request_id] = _Unsent(unsent.client_index, unsent.ends, unsent.interval)
        else:
            del self._unsent[output.request_id]
        return True

    def _message(self, unsent: _Unsent) -> Any:
        """LogprobsLists of one float32 column (empty if log-probs were not requested).

        In place of token ids it has the int64 rows (policy version, number of tokens).
        """
        from vllm.v1.outputs import LogprobsLists

        unsent.end_span(self.version)
        spans = numpy.array(unsent.spans, numpy.int64).reshape(-1, 2)
        return LogprobsLists(spans, numpy.array(unsent.log_probs, numpy.float32)[:, None], numpy.empty(0, numpy.int32))


def _carries_more(output: Any) -> bool:
    """True if an output has content besides tokens: the first and the last of a request, and rare events."""
    if output.finish_reason is not None or output.prefill_stats is not None or output.events is not None:
        return True
    return getattr(output, "new_sampling_mask", None) is not None


def _joined(routes: list[numpy.ndarray]) -> numpy.ndarray | None:
    return numpy.concatenate(routes) if routes else None


class _Rows:
    """Replaces a step's LogprobsLists: a request's slice is its position (row, number of tokens), not three arrays."""

    def slice_request(self, row: int, length: int) -> tuple[int, int]:
        return row, length


def _is_plain_step(scheduler: Any, scheduled: Any, sampled: Any, log_probs: Any) -> bool:
    """True if a step has nothing but tokens and log-probs of decoder requests, one token each."""
    if scheduled.scheduled_spec_decode_tokens or not sampled.sampled_token_ids or sampled.num_nans_in_logits:
        return False
    if log_probs is not None and log_probs.cu_num_generated_tokens is not None:
        return False
    if any(getattr(scheduler, name, None) for name in ("connector", "ec_connector", "perf_metrics")):
        return False
    # vLLM makes the outputs with routed experts: of 0.26 or routes.py, and of 0.32.
    if any(getattr(sampled, name, None) for name in ("routed_experts", "aux_output_connector_output")):
        return False
    return not getattr(scheduler, "return_sampling_mask", False)


def buffer_in_engine_core(replace: Replace, marker: str, publish_name: str) -> None:
    """Buffer in this process's engine core.

    publish_name: name of the engine core's new method that sets the policy version.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    buffer = TokenBuffer()
    add, update = Scheduler.add_request, Scheduler.update_from_output
    abort, send_finished = EngineCore.abort_requests, EngineCoreProc._send_finish_outputs_to_client

    def add_request(self: Any, request: Any) -> None:
        if is_buffered(request, marker):
            interval = 1 if request.sampling_params.stop else INTERVAL
            buffer.open(request.request_id, request.client_index, ending_tokens(request), interval=interval)
        add(self, request)

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        log_probs = model_runner_output.logprobs
        column = None if log_probs is None else log_probs.logprobs[:, 0].tolist()
        if log_probs is not None:
            model_runner_output.logprobs = _Rows()
        if _is_plain_step(self, scheduler_output, model_runner_output, log_probs):
            rest = buffer.note(self, scheduler_output.num_scheduled_tokens, model_runner_output, column)
            scheduler_output = dataclasses.replace(scheduler_output, num_scheduled_tokens=rest)
        per_client = update(self, scheduler_output, model_runner_output)
        for outputs in per_client.values():
            outputs.outputs = buffer.filter(outputs.outputs, log_probs, column)
        return per_client

    def abort_requests(self: Any, request_ids: list[str]) -> None:
        """Unlike vLLM's, answers the requests: the front end waits for their last tokens."""
        by_client: dict[int, list[str]] = {}
        for request_id in request_ids:
            client = buffer.client_of(request_id)
            if client is not None:
                by_client.setdefault(client, []).append(request_id)
        abort(self, request_ids)
        for client, aborted in by_client.items():
            self._send_abort_outputs_to_client(aborted, client)

    def send_finish_outputs(self: Any, req_ids: list[str], client_index: int, finish_reason: Any) -> None:
        rest = [buffer.close(i) for i in dict.fromkeys(req_ids) if buffer.client_of(i) is not None]
        outputs = EngineCoreOutputs(outputs=[output for output in rest if output is not None])
        if outputs.outputs:
            self.output_queue.put_nowait((client_index, outputs))
        send_finished(self, req_ids, client_index, finish_reason)

    def publish(self: Any, version: int | None) -> int:
        """Between two steps. Paused engines have no step in flight, so no token gets the version of the next."""
        if version is not None:
            buffer.publish(version)
        return buffer.version

    setattr(EngineCoreProc, publish_name, publish)
    replace(Scheduler, add_request=add_request, update_from_output=update_from_output)
    replace(EngineCore, abort_requests=abort_requests)
    replace(EngineCoreProc, _send_finish_outputs_to_client=send_finish_outputs)


def buffer_in_front_end(replace: Replace, marker: str) -> None:
    """The other half, in the API server's process."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    class SampledLogProbs(list[float]):
        """One log-prob per token, or none at all. spans: [policy version, number of tokens], in order."""

        def __init__(self) -> None:
            super().__init__()
            self.spans: list[list[int]] = []

    class SampledProcessor(LogprobsProcessor):  # vLLM is not typed here
        """Collects log-probs and policy versions as they are."""

        def update_from_output(self, output: Any) -> None:
            if output.new_logprobs is not None:
                self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                self.logprobs.spans.extend(output.new_logprobs.logprob_token_ids.tolist())

    new_state, abort = RequestState.from_new_request, OutputProcessor.abort_requests
    to_response = OpenAIServingCompletion.request_output_to_completion_response

    def from_new_request(**given: Any) -> Any:
        request = given["request"]
        if not is_buffered(request, marker):
            return new_state(**given)
        needs_text = bool(request.sampling_params.stop)
        state = new_state(**(given if needs_text else given | {"tokenizer": None}))
        values: Any = SampledLogProbs()
        state.logprobs_processor = SampledProcessor(None, values, None, None, request.sampling_params.logprobs, None)
        return state

    def is_open(self: Any, request_id: str) -> bool:
        state = self.request_states.get(request_id)
        return state is not None and isinstance(state.logprobs_processor, SampledProcessor)

    def abort_requests(self: Any, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Unlike vLLM's, leaves the states of buffered requests: the engine core answers with their last tokens."""
        waiting, others = list[str](), list[str]()
        for request_id in request_ids:
            ids = [request_id] if internal else list(self.external_req_ids.get(request_id, ()))
            buffered = bool(ids) and all(is_open(self, i) for i in ids)
            waiting += ids if buffered else []
            others += [] if buffered else [request_id]
        return [*waiting, *abort(self, others, internal)]

    def request_output_to_completion_response(
        self: Any, results: list[Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        outputs = [output for result in results for output in result.outputs]
        if not all(isinstance(one.logprobs, SampledLogProbs) for one in outputs):
            return to_response(self, results, request, *args, **kwargs)
        if request.vllm_xargs[marker] == DIRECT and (answer := packed_answer(outputs)) is not None:
            return answer
        request = request.model_copy(update={"logprobs": None, "return_token_ids": False})
        response = to_response(self, results, request, *args, **kwargs)
        for choice, output in zip(response.choices, outputs, strict=True):
            choice.policy_versions = output.logprobs.spans
            choice.packed = packed_choice(output.token_ids, output.logprobs)
        return response

    replace(RequestState, from_new_request=from_new_request)
    replace(OutputProcessor, abort_requests=abort_requests)
    replace(
        OpenAIServingCompletion,
        request_output_to_completion_response=request_output_to_completion_response,
    )
