"""Shared by tests and rank processes: a tiny model, batches, a reference, and a pool of ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_engine import EngineConfig, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.simple import SimpleBatch
from ds_engine.upstream import auto_class
from plinth_testing import RankPool, covering_table

VOCAB = 64
LR, EPS = 3e-3, 1e-4
"""Adam divides by |g| + eps: a small eps would turn rounding of near-zero gradients into whole steps."""
Reference = tuple[dict[str, Tensor], list[float], list[float]]
"""Weights, losses and gradient norms."""


def config(
    stage: int,
    *,
    optimizer: str = "none",
    param: str = "none",
    zero: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    **extra: Any,
) -> EngineConfig:
    """A float32 engine with the optimizer of `reference_training`, which shards every parameter.

    Args:
        optimizer, param: devices that they are offloaded to.
    """
    offload = OffloadConfig(optimizer=optimizer, param=param)
    sharding = {"stage": stage, "offload": offload, "param_persistence_elements": 0, **(zero or {})}
    settings = {"lr": LR, "eps": EPS, **(optim or {})}
    return EngineConfig(
        **{"zero": ZeroConfig(**sharding), "optim": OptimConfig(**settings), "dtype": "float32"} | extra
    )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Token ids, the first `num_prompt` of which are the prompt, and the loss weight of each response token."""

    ids: list[int]
    num_prompt: int
    weight: float
    images: Any = None


def make_samples(num: int, *, seed: int, longest: int = 24) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for _ in range(num):
        length = draw(4, longest)
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        weight = float(torch.randn(1, generator=generator)) / num
        samples.append(Sample(ids=ids, num_prompt=draw(1, length - 1), weight=weight))
    return samples


def make_batch(samples: Sequence[Sample]) -> SimpleBatch:
    sequences = [(s.ids[: s.num_prompt], s.ids[s.num_prompt :]) for s in samples]
    weights = [s.weight for s in samples for _ in range(len(s.ids) - s.num_prompt)]
    return SimpleBatch.pack(sequences, {"weights": weights}, [s.images for s in samples])


def token_loss(log_probs_K: Tensor, entropy_K: Tensor, weights_K: Tensor) -> Tensor:
    """Nonlinear in both outputs, so that a wrong gradient of either changes the result."""
    return (weights_K * (log_probs_K + 0.1 * log_probs_K.square() + 0.3 * entropy_K)).sum()


# ------------------------------------------------------------------ reference


def reference_training(
    model_path: Path,
    steps: Sequence[Sequence[Sample]],
    *,
    lr: float = LR,
    eps: float = EPS,
    grad_clip: float | None = 1.0,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    weight_decay: float = 0.0,
    adapters: Path | None = None,
    muon: bool = False,
    is_frozen: Callable[[str], bool] = lambda name: False,
) -> Reference:
    """(weights, losses, grad norms) of plain PyTorch: no packing, no DeepSpeed, full logits, one process.

    Weights decay unless they belong to a norm or are biases. With `adapters`, a PEFT folder, these alone are trained;
    the weights are then PEFT's own: adapters under the names of its files, and merged ones. With `muon`, torch's own
    steps the decayed weights except embeddings and head.
    """
    import transformers

    kind = auto_class(transformers.AutoConfig.from_pretrained(model_path), "lm")
    model = kind.from_pretrained(model_path, dtype=dtype, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    model.train()
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and "norm" not in n and "bias" not in n]
    others = [p for n, p in model.named_parameters() if p.requires_grad and ("norm" in n or "bias" in n)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizers = [torch.optim.AdamW(groups, lr=lr, eps=eps)]
    if muon:
        names = {p: n for n, p in model.named_parameters()}
        matrices = [p for p in decayed if not any(word in names[p] for word in ("embed", "lm_head"))]
        groups[0]["params"] = [p for p in decayed if p not in set(matrices)]
        rates = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers = [
            torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, eps=eps),
            torch.optim.Muon(matrices, **rates),
        ]
    losses, norms = [], []
    for samples in steps:
        total = torch.zeros(())
        for sample in samples:
            logits = model(**upstream_inputs(model, sample)).logits[0].float() / temperature
            log_p = logits[sample.num_prompt - 1 : -1].log_softmax(-1)
            targets = torch.tensor(sample.ids[sample.num_prompt :])
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = log_p.gather(1, targets[:, None])[:, 0]
            total = total + token_loss(chosen, entropy, torch.full_like(chosen, sample.weight))
        model.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf"))
        with fp32_newton_schulz():
            for optimizer in optimizers:
                optimizer.step()
        losses.append(total.item())
        norms.append(float(norm))
    weights = {}
    if adapters is not None:
        weights = {name: t.clone() for name, t in peft.get_peft_model_state_dict(model).items()}
        model = model.merge_and_unload()
    return weights | {name: p.detach().clone() for name, p in model.named_parameters()}, losses, norms


def upstream_inputs(model: Any, sample: Sample) -> dict[str, Any]:
    """Arguments of transformers' own forward for one sequence, with its images."""
    ids = torch.tensor([sample.ids])
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    if sample.images is None:
        return {"input_ids": ids}
    kinds = (ids == model.config.image_token_id).int()
    names = inspect.signature(type(model.model).forward).parameters
    known = inspect.signature(type(model.model).get_image_features).parameters
    images = {name: value for name, value in sample.images.items() if name in known}
    types = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    return {"input_ids": ids} | types | images


@contextmanager
def fp32_newton_schulz() -> Iterator[None]:
    """Context in which torch's Muon iterates in fp32 instead of bf16."""

    def iterate(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.T if grad.shape[0] > grad.shape[1] else grad
        x = x / max(float(x.norm()), eps)
        for _ in range(steps):
            x = a * x + (b * (x @ x.T) + c * (x @ x.T @ x @ x.T)) @ x
        return x.T if grad.shape[0] > grad.shape[1] else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", iterate)
        yield


def write_adapters(folder: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes an adapter folder in PEFT's format."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    return float((a - b).norm() / b.norm())


# ----------------------------------------------------------------------- ranks


@contextmanager
def used(pool: RankPool, *patches: str, but: Sequence[str] = ()) -> Iterator[None]:
    """Context in which every rank must call all that these patches replace, `but` for some: an inert patch passes every
    comparison with upstream."""
    pool.run("take_calls")
    yield
    for calls in pool.run("take_calls"):
        inert = [(patch, n) for patch in patches for n, number in calls[patch].items() if not number and n not in but]
        assert not inert, "never called (or the ranks raised before)"


def pairwise_cases(setups: Mapping[str, Sequence[Any]], num_short: int) -> list[Any]:
    """Rows that hold every pair of values; those after `num_short` are for `make test-long`."""
    rows = covering_table(setups)
    names = ["-".join(map(str, row.values())) for row in rows]
    marks = [[]] * num_short + [[pytest.mark.long]] * (len(rows) - num_short)
    return [pytest.param(row, id=name, marks=mark) for row, name, mark in zip(rows, names, marks, strict=True)]


def assert_equal(results: Sequence[Any], expected: Reference, *, within: float = 1e-5, key: str = "weights") -> None:
    """Losses and norms of every rank, and the tensors of the first, are those of one process.

    Adapters to 2e-5: B begins at zero, so all of it is change, in which AdamW magnifies the rounding of small gradients
    (up to 1.2e-5 on one CPU, 4e-6 for all other tensors there).
    """
    within = 2e-5 if key == "adapters" else within
    tensors, losses, norms = expected
    for result in results:
        assert [s.loss for s in result["stats"]] == pytest.approx(losses, rel=within)
        assert [s.grad_norm for s in result["stats"]] == pytest.approx(norms, rel=within)
    assert results[0][key].keys() <= tensors.keys()
    assert results[0][key]
    for name, tensor in results[0][key].items():
        assert distance(tensor, tensors[name]) < within, name
