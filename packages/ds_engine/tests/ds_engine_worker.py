"""Training and answers of ranks, for tests that compare them. Run by ds_engine_rank.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from ds_engine_reshape_check import MemorySource, hand_over, state_of
from ds_engine_testkit import Sample, make_batch, make_samples, token_loss
from ds_engine_trees import routed_batch, tree_batch

import ds_engine
import ds_engine.model.loading
import ds_engine.zero.optimizer
from ds_engine import EngineConfig, LossOutput, SharedBase, StepSettings, TokenOutputs, ZeroEngine, dense_log_prob
from ds_engine.micro_batch import MicroBatches
from ds_engine.model.compilation import compile_layers
from ds_engine.model.nf4 import Nf4Linear

CPU = torch.device("cpu")


def weighted_loss(outputs: Any, batch: Any) -> LossOutput:
    loss = token_loss(outputs.log_probs_K, outputs.entropy_K, batch.columns["weights"])
    metrics = {"entropy_sum": outputs.entropy_K.sum(), "tokens": torch.tensor(float(outputs.log_probs_K.numel()))}
    return LossOutput(loss=loss, metrics=metrics)


def build(model_path: str, config: EngineConfig, **kwargs: Any) -> ZeroEngine:
    # torch computes in fp16 on any CPU, only slowly, which is why DeepSpeed asks for instructions this one may lack.
    get_accelerator().is_fp16_supported = lambda: True
    return ZeroEngine.from_pretrained(model_path, config, log_prob_fn=dense_log_prob, device=CPU, **kwargs)


def weights_of(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_parameters(torch.float32)}


def refusals(*calls: Callable[[], object]) -> list[str]:
    """Messages of the calls that the engine refuses."""
    refused = []
    for call in calls:
        try:
            call()
        except ds_engine.EngineError as error:
            refused.append(str(error))
    return refused


def train(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    log_prob_samples: list[list[Sample]] | None = None,
    save_to: str | None = None,
    load_from: str | None = None,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Train on `steps` (of this rank: a list of micro batches each); everything a test may compare."""
    with closing(build(model_path, config)) as engine:
        if load_from is not None:
            engine.load_checkpoint(load_from, "tag")
        stats = [
            engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss, temperature=temperature)
            for micro in steps
        ]
        outputs = None
        if log_prob_samples is not None:
            outputs = engine.log_probs([make_batch(m) for m in log_prob_samples], temperature=temperature)
        if save_to is not None:
            engine.save_checkpoint(save_to, "tag")
        weights = weights_of(engine)
        return {"stats": stats, "weights": weights, "outputs": outputs}


def train_in_parts(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], settings: StepSettings
) -> dict[str, Any]:
    """`train` by `accumulate` and `step`: each micro batch but the first two is a call, with log-probs in between."""
    with closing(build(model_path, config)) as engine:
        losses, norms = [], []
        for micro in steps:
            batches = [make_batch(m) for m in micro]
            loss = engine.accumulate(batches[:2], weighted_loss)[0]
            for batch in batches[2:]:
                engine.log_probs([batch])
                loss += engine.accumulate([batch], weighted_loss)[0]
            losses.append(loss)
            norms.append(engine.step(settings)[0])
        weights = weights_of(engine)
        return {"losses": losses, "norms": norms, "weights": weights}


def train_side_by_side(
    model_path: str, configs: list[EngineConfig], steps: list[list[list[Sample]]], folder: str, alternates: bool
) -> list[dict[str, Any]]:
    """Steps of one engine per config, over one base: in turns that end within steps, or one engine after the other.

    Each saves its state after all but the last step, which it repeats from there.
    """
    base = SharedBase()
    engines = [build(model_path, config, base=base) for config in configs]
    results: list[dict[str, Any]] = [{"losses": [], "norms": []} for _ in engines]

    def work(index: int, number: int, stepping: bool) -> None:
        engine, result = engines[index], results[index]
        if not stepping:
            result["losses"] += [engine.accumulate([make_batch(m)], weighted_loss)[0] for m in steps[number + index]]
            return
        settings = StepSettings(lr=1e-2 * (1 + index), grad_clip=0.05)
        result["norms"].append(engine.step(settings)[0])
        if number == len(steps) - len(engines) - 1:
            engine.save_checkpoint(folder, f"engine{index}")

    numbers = range(len(steps) - len(engines) + 1)
    plan = [(index, number, stepping) for index in range(len(engines)) for number in numbers for stepping in (0, 1)]
    if alternates:
        plan.sort(key=lambda one: (one[1], one[2]))
    try:
        for index, number, stepping in plan:
            work(index, number, bool(stepping))
        for index, engine in enumerate(engines):
            weights = {name: tensor.clone() for name, tensor in engine.export_adapters(torch.float32)}
            engine.load_checkpoint(folder, f"engine{index}")
            results[index]["again"] = engine.accumulate(
                [make_batch(m) for m in steps[numbers[-1] + index]], weighted_loss
            )[0]
            whole = engine.whole_tensors(merged=False)
            results[index] |= {"weights": weights, "places": {t.name: t.parameter.data_ptr() for t in whole}}
        return results
    finally:
        for engine in engines:
            engine.close()


def step_after_another(model_path: str, config: EngineConfig, samples: list[list[Sample]], forgets: bool | None) -> Any:
    """Weights after a step on the second samples; before it a step on the first at a rate of 0, which moves the moments
    alone, and `forget_optimizer` if `forgets`. None: no step before it."""
    with closing(build(model_path, config)) as engine:
        for batch, lr in zip(map(make_batch, samples), (0.0, 1e-2), strict=True):
            if forgets is not None or lr:
                engine.accumulate([batch], weighted_loss)
                engine.step(StepSettings(lr=lr))
            if forgets and not lr:
                engine.forget_optimizer()
        return weights_of(engine)


def train_and_go_back(model_path: str, config: EngineConfig, samples: list[Sample], folder: str) -> dict[str, Any]:
    """Log-probs, each with the number of second shards (hpZ) at its end: at the start, after a step, after another one
    and the return to the state of the first, after the checkpoint of the start, and of a frozen second engine."""
    batch, opened = make_batch(samples), build(model_path, config)

    def look(used: ZeroEngine = opened) -> tuple[torch.Tensor, int]:
        log_probs_K = used.log_probs([batch])[0].log_probs_K
        return log_probs_K, sum(getattr(p, "ds_secondary_tensor", None) is not None for p in used.module.parameters())

    with closing(opened) as engine:
        result = {"start": look()}
        engine.save_checkpoint(folder, "tag")
        engine.train_mini_batch([batch, batch], weighted_loss)
        result["moved"] = look()
        source = MemorySource(state=state_of(engine), optimizer_steps=1, client_state={"num_steps": 1})
        engine.train_mini_batch([batch, batch], weighted_loss)
        result["moved on"] = look()
        engine.load_state(source)
        result["returned"] = look()
        engine.load_checkpoint(folder, "tag")
        result["loaded"] = look()
        second = build(model_path, config, trainable=False)
        result["second"] = look(second)
        second.close()
        return result


def train_trees(
    model_path: str, config: EngineConfig, steps: list[list[Any]], share: bool, routed: bool = False
) -> dict[str, Any]:
    """Train on `steps` (of this rank: a list of micro batches each, (parents, lengths, seed) of a tree). With R2 the
    routes of a `routed` batch are those of the log-probs."""
    with closing(build(model_path, config)) as engine:
        make = routed_batch if routed else tree_batch
        batches = [[make(*tree[:2], seed=tree[2]) for tree in micro] for micro in steps]
        if not share:
            batches = [[replace(batch, prefixes=None) for batch in micro] for micro in batches]
        outputs = [engine.log_probs(micro) for micro in (batches if routed else batches[:1])]
        if config.router_replay == "R2":
            batches = [
                [replace(b, per_token={"routes": o.routes_TLk}) for b, o in zip(*each, strict=True)]
                for each in zip(batches, outputs, strict=True)
            ]
        stats = [engine.train_mini_batch(micro, weighted_loss) for micro in batches]
        return {
            "shares": engine.shares_prefixes,
            "copies": engine.copies_prefixes,
            "stats": [(s.loss, s.grad_norm) for s in stats],
            "differ": [s.metrics.get("routes_differ") for s in stats],
            "outputs": torch.cat(
                [torch.stack([o.log_probs_K, o.entropy_K]) for micro in outputs for o in micro], dim=1
            ),
            "weights": weights_of(engine),
        }


def train_without_empty(**options: Any) -> dict[str, Any]:
    """`train` with an engine that skips micro batches without targets."""
    backward = MicroBatches.backward

    def skip(self: MicroBatches, outputs: Any, *arguments: Any) -> torch.Tensor:
        return backward(self, outputs, *arguments) if outputs[0].numel() else torch.zeros(())

    with patch.object(MicroBatches, "backward", skip):
        return train(**options)


def train_traced(**options: Any) -> tuple[dict[str, Any], int]:
    """(what `train` or, with lora, `train_adapters` gives; compiled graphs) with compile=True, and without a C++
    compiler: graphs run one operator after the other."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ds_engine.model.loading.compile_layers = partial(compile_layers, backend="aot_eager")
    try:
        result = (train_adapters if options["config"].lora else train)(**options)
    finally:
        ds_engine.model.loading.compile_layers = compile_layers
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_compiled_ahead(**options: Any) -> tuple[dict[str, Any], int, int]:
    """Results of `train_traced`, with `compile_ahead` right after the engine is built; and graphs compiled by that."""
    compiled: list[int] = []
    build_only = build

    def build_ahead(*args: Any, **kwargs: Any) -> ZeroEngine:
        engine = build_only(*args, **kwargs)
        engine.compile_ahead()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return engine

    with patch.dict(globals(), {"build": build_ahead}):
        return *train_traced(**options), compiled[0]


def train_with_deepspeeds_norms(**options: Any) -> dict[str, Any]:
    with patch.object(ds_engine.zero.optimizer, "fuse_grad_norm", lambda _: None):
        return train(**options)


def train_with_bad_losses(model_path: str, config: EngineConfig, samples: list[Sample]) -> list[Any]:
    """StepStats or the error of six calls with two micro batches: the second is malformed, the loss of the first is
    malformed, good, the loss of the second is malformed, good, good."""
    engine = build(model_path, config)
    micro_batches = [make_batch(samples[:2]), make_batch(samples[2:])]
    results: list[Any] = []
    short = replace(micro_batches[1], cu_seqlens_S1=micro_batches[1].cu_seqlens_S1[:-1])
    for second, bad in ((short, None), *((micro_batches[1], bad) for bad in (0, None, 1, None, None))):
        calls: list[int] = []

        def loss_fn(outputs: Any, batch: Any, bad: int | None = bad, calls: list[int] = calls) -> LossOutput:
            calls.append(len(calls))
            return LossOutput(loss=outputs.log_probs_K) if calls[-1] == bad else weighted_loss(outputs, batch)

        try:
            results.append(engine.train_mini_batch([micro_batches[0], second], loss_fn))
        except ds_engine.EngineError as error:
            results.append(error)
    engine.close()
    return results


def train_adapters(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    samples: list[Sample],
    save_to: str | None = None,
    load_from: str | None = None,
) -> dict[str, Any]:
    """With LoRA: log-probs with and without adapters between steps, the exports, and the content of a checkpoint."""
    batch = [make_batch(samples)]
    with closing(build(model_path, config)) as engine:
        if load_from is not None:
            engine.load_checkpoint(load_from, "tag")
        base = [engine.log_probs(batch, adapters=False)[0].log_probs_K]
        stats = []
        for micro in steps:
            stats.append(engine.train_mini_batch([make_batch(m) for m in micro], weighted_loss))
            base.append(engine.log_probs(batch, adapters=False)[0].log_probs_K)
        if save_to is not None:
            engine.save_checkpoint(save_to, "tag")
        return {
            "stats": stats,
            "base": base,
            "outputs": engine.log_probs(batch)[0],
            "merged": {name: tensor.clone() for name, tensor in engine.export_parameters()},
            "adapters": {name: tensor.clone() for name, tensor in engine.export_adapters()},
            "settings": engine.adapter_config(),
            "packed_bytes": sum(_held(m.weight) for m in engine.module.modules() if isinstance(m, Nf4Linear)),
            "num_states": sum(s["exp_avg"].numel() for s in engine._optimizer.state.values() if "exp_avg" in s),
        }


def _held(parameter: Any) -> int:
    """Bytes of what this rank keeps of a parameter between steps: its storage, and stage 3's shard."""
    held = [parameter.data, *([parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else [])]
    return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor.numel() > 0)


def train_with_overflow(
    model_path: str,
    config: EngineConfig,
    steps: list[list[list[Sample]]],
    factors: list[float],
    window: int,
    upstream_window: int | None = None,
) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """(stats, weights after it) of each step, the loss of step i multiplied by factors[i].

    The scale rises after `window` good steps between steps, as the engine does it; after `upstream_window` as DeepSpeed
    does it.
    """
    engine = build(model_path, config)
    engine._loss_scale._window = window
    if upstream_window is not None:
        engine._deepspeed.optimizer.loss_scaler.scale_window = upstream_window
    stats, weights = [], []
    for micro_batches, factor in zip(steps, factors, strict=True):

        def loss_fn(outputs: Any, batch: Any, factor: float = factor) -> LossOutput:
            return LossOutput(loss=weighted_loss(outputs, batch).loss * factor)

        stats.append(engine.train_mini_batch([make_batch(m) for m in micro_batches], loss_fn))
        weights.append(weights_of(engine))
    engine.close()
    return stats, weights


DIVERGENCE_TEMPERATURE = 0.7


def reverse_kl(student_KV: torch.Tensor, teacher_KV: torch.Tensor) -> torch.Tensor:
    return (student_KV.exp() * (student_KV - teacher_KV)).sum(-1)


def train_on_a_teacher(
    model_path: str, teacher_path: str, config: EngineConfig, parts: list[list[Sample]]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(stats, weights) of a step on the divergence to a frozen teacher of another hidden size."""
    student, teacher = build(model_path, config), build(teacher_path, config, trainable=False)
    head = teacher.lm_head()

    def term(hidden_KH: Any, weight_VH: Any, columns: Any, temperature: float) -> torch.Tensor:
        of_teacher = (columns["hidden"] @ head.weight_VH.T / temperature).log_softmax(-1)
        return reverse_kl((hidden_KH @ weight_VH.T / temperature).log_softmax(-1), of_teacher)

    def loss(outputs: Any, batch: Any) -> LossOutput:
        total = (batch.columns["weights"].abs() * outputs.term_K).sum() + 0.1 * outputs.log_probs_K.sum()
        return LossOutput(loss=total, metrics={"kl": outputs.term_K.sum().detach()})

    batches = [make_batch(part) for part in parts]
    hidden = teacher.hidden_states(batches)
    batches = [replace(b, columns={**b.columns, "hidden": h}) for b, h in zip(batches, hidden, strict=True)]
    stats = student.train_mini_batch(batches, loss, temperature=DIVERGENCE_TEMPERATURE, head_term=term)
    weights = {name: tensor.clone() for name, tensor in student.export_parameters()}
    student.close()
    teacher.close()
    return stats, weights


def squared_error(outputs: Any, batch: Any) -> LossOutput:
    """Squared error between each value and the weight of its token."""
    loss = (outputs.values_K - batch.columns["weights"]).square().sum()
    return LossOutput(loss=loss, metrics={"values_sum": outputs.values_K.detach().sum()})


def train_values(
    model_path: str, config: EngineConfig, steps: list[list[list[Sample]]], value_samples: list[list[Sample]]
) -> dict[str, Any]:
    """`train` for a value head: values before and after training, and the errors of unsupported calls."""
    engine = build(model_path, config, head="value")
    batches = [make_batch(m) for m in value_samples]
    before = engine.values(batches)
    stats = [engine.train_mini_batch([make_batch(m) for m in micro], squared_error) for micro in steps]
    weights = weights_of(engine)
    refused = "".join(refusals(lambda: engine.log_probs(batches)))
    after = engine.values(batches)
    engine.close()
    return {"before": before, "after": after, "stats": stats, "weights": weights, "refused": refused}


def frozen_log_probs(
    model_path: str, config: EngineConfig, samples: list[Sample]
) -> tuple[TokenOutputs, list[str], int]:
    """(outputs, error messages of unsupported calls, number of exported tensors) of a reference model."""
    engine = build(model_path, config, trainable=False)
    batch = make_batch(samples)
    outputs = engine.log_probs([batch])[0]
    refused = refusals(
        lambda: engine.train_mini_batch([batch], weighted_loss),
        lambda: engine.save_checkpoint("/nowhere", "tag"),
        lambda: engine.load_checkpoint("/nowhere", "tag"),
    )
    engine.offload()
    engine.reload()
    assert not any(p.requires_grad for p in engine.module.parameters())
    num_exported = len(list(engine.export_parameters()))
    engine.close()
    return outputs, refused, num_exported


def export_tensors(model_path: str, config: EngineConfig) -> dict[str, torch.Tensor]:
    engine = build(model_path, config)
    tensors = {name: tensor.clone() for name, tensor in engine.export_parameters()}
    engine.close()
    return tensors


def train_steps(engine: ZeroEngine, steps: range) -> list[list[float]]:
    """(loss, norm) of each step on samples of this rank's own."""
    stats = [
        engine.train_mini_batch([make_batch(make_samples(3, seed=10 * step + dist.get_rank()))], weighted_loss)
        for step in steps
    ]
    return [[each.loss, each.grad_norm] for each in stats]


def hand_over_state(model_path: str, first: EngineConfig, second: EngineConfig) -> dict[str, Any]:
    return hand_over(lambda: build(model_path, first), lambda: build(model_path, second), train_steps)


def refuse_state(model_path: str, config: EngineConfig) -> dict[str, Any]:
    engine = build(model_path, config)
    train_steps(engine, range(1))
    before = state_of(engine)
    source = MemorySource(state=before, optimizer_steps=7, client_state={"num_steps": 7})

    def fail() -> None:
        raise OSError("the disk is gone")

    if dist.get_rank() == 1:
        source.check = fail
    error = None
    try:
        engine.load_state(source)
    except ds_engine.CheckpointError as raised:
        error = raised
    after = state_of(engine)
    unchanged = all(torch.equal(after[n][kind], t) for n, kinds in before.items() for kind, t in kinds.items())
    unchanged = unchanged and engine._num_steps == 1
    engine.close()
    return {"error": error, "unchanged": unchanged}


def offload_cycle(model_path: str, config: EngineConfig) -> Any:
    engine = build(model_path, config)
    moved_bytes = engine.offload()
    refused = refusals(
        lambda: engine.log_probs([]),
        lambda: engine.train_mini_batch([], weighted_loss),
        lambda: engine.save_checkpoint("nowhere", "tag"),
        lambda: engine.load_checkpoint("nowhere", "tag"),
    )
    num_exported = len(list(engine.export_parameters()))
    engine.reload()
    train_steps(engine, range(1))
    engine.close()
    return moved_bytes, refused, num_exported


def moved_states(model_path: str, config: EngineConfig) -> dict[str, Any]:
    """Two steps; the states moved to other CPU memory, as an offload from a GPU does; the weights exported meanwhile;
    two more steps; the same with the weights moved too."""
    plain = build(model_path, config)
    expected = train_steps(plain, range(6))
    exported = {name: tensor.clone() for name, tensor in plain.export_parameters()}
    plain.close()
    engine = build(model_path, config)
    losses = train_steps(engine, range(2))
    storages = engine._memory._storages
    moved = storages.offload(engine._memory.movable("cpu", include_params=False))
    during = {name: tensor.clone() for name, tensor in engine.export_parameters()}
    back = storages.reload()
    losses += train_steps(engine, range(2, 4))
    moved_all = storages.offload(engine._memory.movable("cpu", include_params=True))
    storages.reload()
    losses += train_steps(engine, range(4, 6))
    after = dict(engine.export_parameters())
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    engine.close()
    return {
        "expected": expected,
        "losses": losses,
        "moved": [moved, back, moved_all],
        "numel": numel,
        "same": all(torch.equal(after[name], tensor) for name, tensor in exported.items()),
        "exported_during": len(during) == len(exported) and all(bool(t.any()) for t in during.values()),
    }


def train_architectures(
    folders: dict[str, str], config: EngineConfig, mine: list[Sample], samples: list[Sample]
) -> dict[str, tuple[torch.Tensor, float, torch.Tensor]]:
    """By architecture: log-probs of `samples`, gradient norm of a step on this rank's `mine`, log-probs after it."""
    results = {}
    for name, folder in folders.items():
        engine = build(folder, config)
        before = engine.log_probs([make_batch(samples)])[0].log_probs_K
        # The second micro batch has no targets: one token runs every module.
        stats = engine.train_mini_batch([make_batch(mine), make_batch([])], weighted_loss)
        after = engine.log_probs([make_batch(samples)])[0].log_probs_K
        results[name] = (before, stats.grad_norm, after)
        engine.close()
    return results
