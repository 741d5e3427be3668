"""Packed log-probs against ordinary Hugging Face ones: same numbers without padding, with any border."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from ds_engine_architectures import padded_loss
from ds_engine_testkit import make_batch, make_samples
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

from ds_engine import EngineConfig, EngineConfigError, ModelError, OffloadConfig, SimpleBatch, dense_log_prob
from ds_engine.config import Attention
from ds_engine.errors import BatchError
from ds_engine.model import attention
from ds_engine.model.attention import choose_kernel, packed_attention, packed_layout
from ds_engine.model.loading import abandoned_locks, check_offload, load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from ds_engine.model.recomputation import enable_checkpointing
from plinth_testing import raises, write_tiny_model

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "float32", log_prob_fn=dense_log_prob):
    model = load_model(str(folder), EngineConfig(dtype=dtype), device=CPU, ds_config={})
    install_packed_forward(model, log_prob_fn)
    return model


def test_packed_equals_padded_bf16(tiny_model: Path) -> None:
    samples = make_samples(9, seed=5)
    inputs, _ = packed_inputs(make_batch(samples), device=CPU, kernel="sdpa")
    with torch.no_grad():
        log_probs_K = load(tiny_model, "bfloat16")(packed=inputs)[0]
    exact, usual = (
        padded_loss(transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).eval(), samples)[1]
        for dtype in (torch.float32, torch.bfloat16)
    )
    # Both bf16 ways round; ours must not be further from the fp32 truth than the usual one by more than its own error.
    assert (log_probs_K - exact).abs().mean() <= 1.25 * (usual - exact).abs().mean()


def test_logits_are_never_computed(tiny_model: Path) -> None:
    """The head calls only the injected function: hidden states in, K log-probs out."""
    seen = []

    def spy(hidden_KH, weight_VH, targets_K, temperature):
        seen.append((tuple(hidden_KH.shape), tuple(weight_VH.shape)))
        return dense_log_prob(hidden_KH, weight_VH, targets_K, temperature)

    batch = make_batch(make_samples(3, seed=8))
    load(tiny_model, log_prob_fn=spy)(packed=packed_inputs(batch, device=CPU, kernel="sdpa")[0])
    assert seen == [((batch.target_ids_K.numel(), 32), (64, 32))]


def test_ordinary_calls_still_work(tiny_model: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    install_packed_forward(ours, dense_log_prob)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("seed", range(3))
def test_attention_per_sequence(seed: int) -> None:
    """Against one dense block-diagonal causal mask, forward and backward."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 12, (5,)).tolist()
    total = sum(lengths)
    tensors = [torch.randn(1, heads, total, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    packing = packed_layout(lengths, device=CPU, kernel="sdpa")
    out, _ = packed_attention(None, *tensors, None, scaling=0.3, packing=packing)
    segment = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    mask = (segment[:, None] == segment[None, :]).tril()
    q, k, v = tensors[0], *(t.repeat_interleave(2, dim=1) for t in tensors[1:])
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), tensors)
    theirs = torch.autograd.grad((expected * weight).sum(), tensors)
    torch.testing.assert_close(ours, theirs)


def test_missing_sequence_lengths_and_unknown_scores_are_refused() -> None:
    q = torch.randn(1, 2, 3, 4)
    packing = packed_layout([3], device=CPU, kernel="sdpa")
    with raises(ModelError):
        packed_attention(None, q, q, q, None)
    with raises(ModelError):
        packed_attention(None, q, q, q, None, packing=packing, softcap=30.0)


def test_kernel_choice() -> None:
    assert choose_kernel("auto", device_type="cpu", dtype=torch.bfloat16) == "sdpa"
    assert choose_kernel("auto", device_type="cuda", dtype=torch.float32) == "sdpa"
    assert choose_kernel("auto", device_type="cuda", dtype=torch.bfloat16) in ("flash4", "flash", "varlen")
    with raises(EngineConfigError, field="attention", value="varlen"):
        choose_kernel("varlen", device_type="cpu", dtype=torch.bfloat16)


def test_kernel_choice_by_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 alone also installs a folder flash_attn, which is not flash-attn."""
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(type(attention.KERNELS), "check", lambda self: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()

    def choose(wanted: Attention = "auto") -> str:
        importlib.invalidate_caches()
        sys.modules.pop("flash_attn", None)
        return choose_kernel(wanted, device_type="cuda", dtype=torch.bfloat16)

    assert choose() == choose("flash4") == "flash4"
    assert choose("varlen") == "varlen"
    with raises(EngineConfigError, field="attention", value="flash"):
        choose("flash")
    (tmp_path / "flash_attn" / "__init__.py").touch()
    assert choose() == "flash4"
    assert choose("flash") == "flash"
    capability = (10, 0)
    assert choose() == "flash"
    assert choose("flash4") == "flash4"
    capability = (8, 0)
    assert choose() == "flash"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose() == "flash"
    capability = (7, 5)
    assert choose() == choose("sdpa") == "sdpa"
    with raises(EngineConfigError, field="attention", value="varlen"):
        choose("varlen")
    capability = (8, 0)
    with raises(EngineConfigError, field="attention", value="flash4"):
        choose("flash4")
    sys.modules.pop("flash_attn", None)


def test_bad_model_folders(tmp_path: Path) -> None:
    with raises(ModelError, field="model_path", value=str(tmp_path)):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with raises(ModelError, field="model_path", value=str(tmp_path)):
        load(tmp_path)
    with raises(ModelError):
        install_packed_forward(torch.nn.Linear(2, 2), dense_log_prob)


def test_bad_sequence_lengths_are_refused() -> None:
    batch = make_batch(make_samples(2, seed=1))
    broken = type(batch)(**{**vars(batch), "cu_seqlens_S1": batch.cu_seqlens_S1 + 1})
    broken.cu_seqlens_S1[0] = 0
    with raises(BatchError, field="cu_seqlens_S1"):
        packed_inputs(broken, device=CPU, kernel="sdpa")


@pytest.mark.parametrize("to_cpu", [False, True])
def test_checkpointing_recomputes_every_layer(tmp_path: Path, to_cpu: bool) -> None:
    folder = write_tiny_model(tmp_path, num_hidden_layers=4)
    inputs, _ = packed_inputs(make_batch(make_samples(4, seed=3)), device=CPU, kernel="sdpa")
    gradients, calls = [], []
    for checkpointed in (False, True):
        model = load(folder).train()
        if checkpointed:
            enable_checkpointing(model, to_cpu=to_cpu)
            for layer in model.model.layers:
                layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        model(packed=inputs).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(calls) == 4 + 4
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_nvme_is_refused_before_loading(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    check_offload(OffloadConfig(optimizer="cpu"))
    with raises(EngineConfigError, field="zero.offload.nvme_path"):
        check_offload(OffloadConfig(optimizer="nvme", nvme_path=str(tmp_path / "missing")))
    if AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is installed here")
    with raises(EngineConfigError, field="zero.offload"):
        check_offload(OffloadConfig(optimizer="nvme", nvme_path=str(tmp_path)))


def test_an_abandoned_lock_of_a_compilation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left, compiling = tmp_path / "cpu_adam" / "lock", tmp_path / "async_io" / "lock"
    for lock in (left, compiling):
        lock.parent.mkdir()
    left.touch()  # as by a process that was killed while it compiled; another one compiles now
    baton = FileBaton(str(compiling))
    assert baton.try_acquire()
    assert abandoned_locks() == [left]
    check_offload(OffloadConfig(optimizer="cpu"))
    assert str(left) in caplog.text
    assert str(compiling) not in caplog.text
    baton.release()
    left.unlink()
    assert abandoned_locks() == []


def test_abandoned_locks_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = Path(_get_build_directory("cpu_adam", False))
    (built / "lock").touch()
    assert abandoned_locks() == [built / "lock"]


def test_simple_batch() -> None:
    batch = SimpleBatch.pack([([1, 2], [3, 4]), ([5], []), ([6], [7])], {"w": [0.1, 0.2, 0.3]})
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert batch.cu_seqlens_S1.tolist() == [0, 4, 5, 7]
    assert batch.target_index_K.tolist() == [1, 2, 5]
    assert batch.target_ids_K.tolist() == [3, 4, 7]
    with raises(BatchError):
        SimpleBatch.pack([([1], [2]), ([], [3])])


def test_batch_without_targets_becomes_one_token() -> None:
    inputs, num_targets = packed_inputs(make_batch([]), device=CPU, kernel="sdpa")
    assert num_targets == 0
    assert inputs.input_ids_1T.shape == (1, 1)


def test_a_bias_of_minus_infinity_takes_a_token_out_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((4, 6), (9, 6), (9,)))
    bias[5:] = -torch.inf
    targets = torch.tensor([0, 4, 2, 2])
    results = []
    for rows in (slice(None), slice(5)):
        leaf = hidden.clone().requires_grad_()
        outputs = dense_log_prob(leaf, weight[rows], targets, 0.7, bias=bias[rows])
        results.append([*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), leaf)])
    for masked, small in zip(*results, strict=True):
        torch.testing.assert_close(masked, small)
