"""What the server process replaces in vLLM: it exists, and clients get vLLM's own token strings."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.utils import system_utils
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from rollout_vllm.client.protocol import completion_body
from rollout_vllm.config import SamplingConfig
from rollout_vllm.servers import patch as patch_module
from rollout_vllm.servers._serve import skip_token_strings
from rollout_vllm.servers.patch import PATCHES, SKIP_STRINGS, TOKEN_STRINGS, Patch, records

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
    restore = skip_token_strings(TOKEN_STRINGS, SKIP_STRINGS)
    yield
    restore()


def decoded(tokenizer: Any, extra_args: dict[str, Any] | None) -> list[list[str | None]]:
    """The token strings of every position of TEXT, as vLLM's front end makes them for a request with log-probs."""
    params = SamplingParams(logprobs=1, extra_args=extra_args)
    processor = LogprobsProcessor.from_new_request(tokenizer, SimpleNamespace(sampling_params=params))  # type: ignore[arg-type]
    for token in tokenizer.encode(TEXT):
        ids = numpy.array([[token, (token + 1) % len(tokenizer)]])
        processor._update_sample_logprobs(LogprobsLists(ids, -ids / 100.0, numpy.array([1])))
    assert processor.logprobs is not None
    return [[entry.decoded_token for entry in position.values()] for position in processor.logprobs]


def test_other_clients_get_the_token_strings_of_stock_vllm(tokenizer: Any, request: pytest.FixtureRequest) -> None:
    stock = decoded(tokenizer, None)
    assert "".join(str(position[0]) for position in stock) == TEXT
    assert len(stock) > len(TEXT)
    before = LogprobsProcessor.from_new_request
    request.getfixturevalue("patched")
    assert LogprobsProcessor.from_new_request is not before
    assert decoded(tokenizer, None) == stock
    assert decoded(tokenizer, {"another": 1}) == stock


def test_clients_of_this_package_get_none(tokenizer: Any, patched: None) -> None:
    calls = TOKEN_STRINGS.calls["from_new_request"]
    extra_args = completion_body([1], SamplingConfig(), model=None, seed=None)["vllm_xargs"]
    assert {text for position in decoded(tokenizer, extra_args) for text in position} == {None}
    assert TOKEN_STRINGS.calls["from_new_request"] == calls + 1


def test_installed_vllm_has_every_declared_part() -> None:
    rows = records()
    assert {row["name"]: row["state"] for row in rows} == {patch.name: "active" for patch in PATCHES}
    assert all(row["reason"] and row["tested"] == "vllm>=0.26,<0.34" for row in rows)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_renamed_part_of_vllm_leaves_its_own_path(patch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    for table in ("replaces", "reads"):
        for owner, names in getattr(patch, table).items():
            for part in names:
                head = part.partition("(")[0]
                assert not replace(patch, **{table: {owner: (part.replace(head, f"{head}_renamed"),)}}).check()
                said = f"{patch.name}: vLLM's own path is used: {owner} has no {head}_renamed\n"
                assert capsys.readouterr().out == said
    changed = replace(patch, replaces={"vllm.utils.system_utils": ("get_mp_context(method)",)})
    assert changed.problem() == "vllm.utils.system_utils.get_mp_context takes (), not (method)"


def test_untested_vllm_runs_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_module, "_untested", lambda: "vllm 0.99 is not tested (>=0.26,<0.34 is)")
    before = LogprobsProcessor.from_new_request
    assert skip_token_strings(TOKEN_STRINGS, SKIP_STRINGS) is None
    assert LogprobsProcessor.from_new_request == before
    assert {row["state"] for row in records()} == {"stock path"}
    assert callable(system_utils.get_mp_context)
