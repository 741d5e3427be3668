"""What benchmarks/staleness/trl_async gives to TRL. flash-attn-4 needs a GPU, so plain torch stands in for it."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.random_model import ensure_random_model
from benchmarks.staleness import flash4_for_trl
from benchmarks.staleness.trl_async import conversation_tokenizer

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


@pytest.fixture(autouse=True)
def vllm_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing TRL silences the vLLM of this process, and of all that it starts, if no level is set."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")


def attention(*, first_key_aligned: bool) -> Any:
    """A function with the arguments of `flash_attn.cute.flash_attn_varlen_func`, in their order."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, *, softmax_scale: Any = None, causal: bool = False,
        window_size: tuple[Any, Any] = (None, None),
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (qv, causal, window_size) == (None, True, (-1, -1))
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max_seqlen_q, max_seqlen_k) == (max(lengths_q), max(lengths_k))
        out = []
        for parts in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
            rows, columns = len(parts[0]), len(parts[1])
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(0 if first_key_aligned else columns - rows)
            batched = [part.transpose(0, 1)[None] for part in parts]
            attended = scaled_dot_product_attention(*batched, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out), None

    return flash_attn_varlen_func


@pytest.mark.parametrize("first_key_aligned", [False, True])
def test_trl_attends_as_sdpa_does_and_a_wrong_mask_is_refused(
    first_key_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import packing

    kernel = ModuleType("flash_attn.cute")
    vars(kernel)["flash_attn_varlen_func"] = attention(first_key_aligned=first_key_aligned)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", kernel)
    monkeypatch.setattr(  # `kernels`, which looks the function up, is no dependency of the tests
        packing,
        "_flash_attn",
        lambda: SimpleNamespace(flash_attn_varlen_func=flash4_for_trl.flash_attn_varlen_func),
    )
    if first_key_aligned:
        with pytest.raises(RuntimeError, match="differs from SDPA"):
            flash4_for_trl.differences(4, 2, 32, device="cpu")
    else:
        found = flash4_for_trl.differences(4, 2, 32, device="cpu")
        assert set(found) == {"output", "dq", "dk", "dv"}
        assert max(found.values()) < flash4_for_trl.TOLERANCE / 2


def test_kernels_loads_the_folder_for_the_repository_that_trl_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kernels")
    from trl.experimental.async_grpo import packing

    monkeypatch.setenv("LOCAL_KERNELS", "")
    packing._flash_attn.cache_clear()
    flash4_for_trl.install(tmp_path)
    assert packing._flash_attn().flash_attn_varlen_func is flash4_for_trl.flash_attn_varlen_func
    packing._flash_attn.cache_clear()


def test_trl_reads_a_response_as_plain_text(tmp_path: Path) -> None:
    """TRL's rollouts end at once for a tokenizer whose chat template they do not know, without a response template."""
    from trl.chat_template_utils import parse_response

    ensure_random_model("qwen3-tiny", tmp_path / "model")
    tokenizer = conversation_tokenizer(tmp_path)
    assert tokenizer.response_template is not None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "one two"}], return_dict=False)
    assert tokenizer.decode(prompt) == "one two"
    ids = tokenizer("three\n four")["input_ids"]
    assert parse_response(tokenizer, [*ids, tokenizer.eos_token_id], prefix=prompt) == {
        "role": "assistant",
        "content": "three\n four",
    }
