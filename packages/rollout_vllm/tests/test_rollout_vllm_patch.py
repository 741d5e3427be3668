"""Parts of vLLM that the server process replaces: they exist, and requests of other clients take vLLM's own path."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from rollout_vllm_helpers import restoring
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import RequestOutputKind
from vllm.utils import system_utils
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from rollout_vllm.client.protocol import completion_body, parse_completion
from rollout_vllm.config import SamplingConfig
from rollout_vllm.servers.fast.buffering import DIRECT, PACKED, buffer_in_front_end, packed_answer
from rollout_vllm.servers.patch import BUFFERING, FENCE, IDS_ONLY, records

TEXT = "a\u00e9\u20ac \U0001f642z\u4e2d"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte: characters beyond ASCII have two to four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: token for token, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def patched() -> Iterator[None]:
    assert BUFFERING.check()
    with restoring() as replace:
        buffer_in_front_end(replace(BUFFERING), IDS_ONLY)
        yield


def front_end(
    tokenizer: Any,
    extra_args: dict[str, Any] | None,
    *,
    log_probs: bool = True,
    stop: str | None = None,
    text: str = TEXT,
) -> tuple[OutputProcessor, Any]:
    """vLLM's front end with one request, to which the tokens of the text and their log-probs were sent."""
    params = SamplingParams(
        logprobs=0 if log_probs else None, extra_args=extra_args, output_kind=RequestOutputKind.FINAL_ONLY, stop=stop
    )
    request: Any = SimpleNamespace(
        request_id="cmpl-r-1",
        external_req_id="cmpl-r",
        sampling_params=params,
        pooling_params=None,
        resumable=False,
        prompt_token_ids=[1, 2],
        prompt_embeds=None,
        lora_request=None,
        arrival_time=0.0,
    )
    processor = OutputProcessor(tokenizer, log_stats=False)
    processor.add_request(request, None)
    state = processor.request_states["cmpl-r-1"]
    for token in tokenizer.encode(text):
        row = numpy.array([[token]])
        marked = extra_args and IDS_ONLY in extra_args
        ids = numpy.array([[3, 1]]) if marked else row  # (policy version, tokens)
        values = (-row / 128).astype(numpy.float32)
        lists = LogprobsLists(ids, values if log_probs else values[:0], numpy.array([1]))
        sent = lists if log_probs or marked else None
        assert state.detokenizer is not None
        assert state.logprobs_processor is not None
        state.detokenizer.update([token], False)
        state.logprobs_processor.update_from_output(
            SimpleNamespace(new_logprobs=sent, new_prompt_logprobs_tensors=None, prompt_token_id_logprobs=None)
        )
    return processor, state


def response(state: Any) -> tuple[str, list[int], Any]:
    output = state.make_request_output([], None, "length", None).outputs[0]
    return output.text, output.token_ids, output.logprobs


def test_other_clients_get_the_text_and_token_strings_of_stock_vllm(
    tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    stock = response(front_end(tokenizer, None)[1])
    assert stock[0] == TEXT
    assert "".join(str(next(iter(position.values())).decoded_token) for position in stock[2]) == TEXT
    request.getfixturevalue("patched")
    assert response(front_end(tokenizer, None)[1]) == stock
    assert response(front_end(tokenizer, {"another": 1})[1]) == stock


def test_clients_of_this_package_get_ids_and_log_probs(
    tokenizer: Any, patched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    extra_args = completion_body([1], SamplingConfig(), model=None, seed=None)["vllm_xargs"]
    assert extra_args == {IDS_ONLY: PACKED}
    text, ids, log_probs = response(front_end(tokenizer, extra_args)[1])
    assert (text, ids) == ("", tokenizer.encode(TEXT))
    assert log_probs == [-token / 128 for token in ids]
    assert log_probs.spans == [[3, 1]] * len(ids)
    assert "buffered tokens: from_new_request is replaced and in use\n" in capsys.readouterr().out


def test_a_stop_string_ends_a_response_after_its_last_token(tokenizer: Any, patched: None) -> None:
    """As in stock vLLM; and every token keeps its log-prob and its policy version."""
    stop = TEXT[2:5]  # seven bytes, which are seven tokens
    marked = {IDS_ONLY: PACKED}
    answers = {}
    for extra_args in (None, marked):
        processor, _ = front_end(tokenizer, extra_args, stop=stop, text="")
        for number, token in enumerate(tokenizer.encode(TEXT)):
            ids = numpy.array([[number // 4, 1]]) if extra_args else numpy.array([[token]])
            lists = LogprobsLists(ids, numpy.array([[-token / 128]], numpy.float32), numpy.array([1]))
            done = processor.process_outputs([EngineCoreOutput("cmpl-r-1", [token], new_logprobs=lists)])
            if done.request_outputs:
                break
        assert done.reqs_to_abort == ["cmpl-r-1"], "the engine core samples no more for it"
        [choice] = done.request_outputs[0].outputs
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        answers[extra_args is not None] = choice.token_ids
    assert answers[True] == answers[False] == tokenizer.encode(TEXT[:5])
    assert choice.logprobs == [-token / 128 for token in answers[True]]
    assert choice.logprobs.spans == [[number // 4, 1] for number in range(len(answers[True]))]


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize("mark", [None, PACKED, DIRECT])
def test_answer_has_what_its_client_reads(tokenizer: Any, patched: None, mark: int | None, log_probs: bool) -> None:
    marks = {} if mark is None else {IDS_ONLY: mark}
    _, state = front_end(tokenizer, marks, log_probs=log_probs)
    result = state.make_request_output([], None, "length", None)
    request = CompletionRequest(
        prompt=[1, 2],
        max_tokens=99,
        logprobs=0 if log_probs and mark else None,
        return_token_ids=True,
        vllm_xargs=marks,
    )
    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.enable_prompt_tokens_details = serving.enable_per_request_metrics = False
    serving.system_fingerprint = None
    to_response = serving.request_output_to_completion_response
    answer = to_response([result], request, "cmpl-r", 0, "policy", tokenizer, SimpleNamespace())  # type: ignore[arg-type]
    ids = tokenizer.encode(TEXT)
    body = json.loads(answer if isinstance(answer, bytes) else answer.model_dump_json())
    [raw] = body["choices"]
    if mark != DIRECT:
        assert body["usage"]["completion_tokens"] == len(ids)
        assert raw["token_ids"] == (None if mark else ids)
    assert ("packed" in raw) == (mark is not None)
    assert raw.get("policy_versions") == ([[3, 1]] * len(ids) if mark else None)
    [choice] = parse_completion(body, 1, log_probs=log_probs and mark is not None)
    assert choice.response_ids.tolist() == ids
    values = None if choice.log_probs is None else choice.log_probs.tolist()
    assert values == ([-token / 128 for token in ids] if log_probs and mark else None)


def test_an_answer_with_an_error_or_routes_is_that_of_vllm() -> None:
    plain = SimpleNamespace(
        finish_reason="stop", routed_experts=None, token_ids=[7], logprobs=SimpleNamespace(spans=[])
    )
    for changes in ({"finish_reason": "error"}, {"routed_experts": numpy.zeros(1)}):
        assert packed_answer([plain, SimpleNamespace(**{**vars(plain), **changes})]) is None


@pytest.mark.parametrize("internal", [True, False])
def test_aborted_request_ends_with_the_tokens_that_the_engine_core_still_held(
    tokenizer: Any, patched: None, internal: bool
) -> None:
    processor, state = front_end(tokenizer, {IDS_ONLY: PACKED})
    ids = tokenizer.encode(TEXT)
    assert processor.abort_requests(["cmpl-r-1" if internal else "cmpl-r"], internal) == ["cmpl-r-1"]
    assert processor.request_states == {"cmpl-r-1": state}
    lists = LogprobsLists(numpy.array([[4, 1]]), numpy.array([[-0.5]], numpy.float32), numpy.empty(0))
    rest = EngineCoreOutput("cmpl-r-1", [7], new_logprobs=lists)
    end = EngineCoreOutput("cmpl-r-1", [], finish_reason=FinishReason.ABORT)
    [answer] = processor.process_outputs([rest, end]).request_outputs
    [choice] = answer.outputs
    assert (choice.token_ids, choice.finish_reason) == ([*ids, 7], "abort")
    assert choice.logprobs == [*(-token / 128 for token in ids), -0.5]
    assert choice.logprobs.spans == [*[[3, 1]] * len(ids), [4, 1]]
    assert not processor.request_states
    assert not processor.external_req_ids


@pytest.mark.parametrize("internal", [True, False])
def test_abort_of_other_requests_is_that_of_stock_vllm(tokenizer: Any, patched: None, internal: bool) -> None:
    processor, _ = front_end(tokenizer, None)
    assert processor.abort_requests(["cmpl-r-1" if internal else "cmpl-r", "unknown"], internal) == ["cmpl-r-1"]
    assert not processor.request_states
    assert not processor.external_req_ids


def test_installed_vllm_has_every_declared_part() -> None:
    rows = records()
    assert {row["name"]: row["state"] for row in rows} == {patch.name: "active" for patch in FENCE.patches}
    assert all(row["reason"] and row["tested"] == "vllm>=0.26,<0.33" for row in rows)


def test_untested_vllm_runs_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FENCE.tested, "vllm", ">=99")
    assert not BUFFERING.check()
    assert all(row["state"] == row["otherwise"] for row in records())
    assert callable(system_utils.get_mp_context)
