"""Router replay: given routes are the only source of a mixture's routes, in every layout of its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_engine_architectures import PACKED, ROWS, tiny_architecture, write_architecture
from ds_engine_testkit import distance, token_loss
from ds_engine_trees import DEEP, GROUP, draw_tree, routed_batch, tree_batch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_engine import BatchError, EngineConfig, EngineConfigError, OptimConfig, ZeroConfig, check_model, dense_log_prob
from ds_engine.micro_batch import MicroBatches
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from ds_engine.model.recomputation import enable_checkpointing
from ds_engine.model.router_replay import ROUTERS, RouterReplay, given_routes, install_replay, routes_of_tokens
from ds_engine.model.trial import Trial, try_replay
from plinth_testing import RankPool, raises

CPU = torch.device("cpu")


@given(data=st.data())
def test_a_shared_token_has_the_routes_of_its_first_sequence_and_a_last_token_its_own(data: st.DataObject) -> None:
    parents = draw_tree(data)
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(parents), max_size=len(parents)))
    batch = tree_batch(parents, [n + (parent < 0) for n, parent in zip(lengths, parents, strict=True)], seed=0)
    assert batch.prefixes is not None
    rows_T, num_rows = batch.prefixes.place_T, len(batch.prefixes.computed_U)
    ends = batch.cu_seqlens_S1[1:].long() - 1
    routes_TLk = torch.arange(len(rows_T))[:, None, None]
    given_PLk = given_routes(routes_TLk, ends, rows_T, num_rows)
    for row in range(num_rows):
        tokens = [t for t in (rows_T == row).nonzero()[:, 0].tolist() if t not in ends.tolist()]
        assert int(given_PLk[row]) == (tokens[0] if tokens else -1)
    first, count = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(1, num_rows))
    part = routes_of_tokens(torch.arange(num_rows)[first : first + count, None, None], rows_T - first)
    assert part.flatten().tolist() == [row if first <= row < first + count else -1 for row in rows_T.tolist()]


@pytest.mark.parametrize(("family", "way"), [("qwen3_moe", "packed"), ("deepseek_v3", "packed"), ("gpt_oss", "rows")])
def test_routers_that_take_their_routes_from_outside_pass_the_trial(family: str, way: Any) -> None:
    changes = PACKED.get(family) or {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    try_replay(tiny_architecture(family, changes), trial(way))


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("phimoe", ROWS["phimoe"])])
def test_a_model_without_routers_that_can_replay_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = write_architecture(tmp_path / family, family, changes)
    with raises(EngineConfigError, field="router_replay", allowed="off"):
        check_model(str(folder), EngineConfig(router_replay="R3"))


@pytest.mark.parametrize("ignored_layer", [0, 1])
def test_a_router_that_ignores_its_routes_is_found(monkeypatch: pytest.MonkeyPatch, ignored_layer: int) -> None:
    choose = RouterReplay.choose
    monkeypatch.setattr(
        RouterReplay,
        "choose",
        lambda self, layer, scores, own: own if layer == ignored_layer else choose(self, layer, scores, own),
    )
    with raises(EngineConfigError, field="router_replay"):
        try_replay(tiny_architecture("qwen3_moe", PACKED["qwen3_moe"]), trial("packed"))


@pytest.mark.parametrize(("field", "value"), [("compile", True), ("tiled_mlp", 8)])
def test_layers_that_cannot_replay_are_refused(field: str, value: Any) -> None:
    EngineConfig(**{field: value})
    with raises(EngineConfigError, field=field, value=value):
        EngineConfig(**{field: value}, router_replay="R2")


def trial(way: Any) -> Trial:
    return Trial(
        architecture="a model",
        way=way,
        why_not_packed="",
        why_not_shared="",
        why_not_tiled="",
        recurrent="",
        seconds=0.0,
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture(tmp_path_factory.mktemp("mixture"), "qwen3_moe", PACKED["qwen3_moe"])


def loaded(folder: Path, *, recomputes: bool = False) -> tuple[Any, RouterReplay]:
    model: Any = load_model(str(folder), EngineConfig(dtype="float32"), device=CPU, ds_config={}).train()
    if recomputes:
        enable_checkpointing(model)
    install_packed_forward(model, dense_log_prob)
    return model, install_replay(model)


def replayed(model: Any, replay: RouterReplay, batch: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, _ = packed_inputs(batch, device=CPU, routes_TLk=batch.per_token["routes"], **options)
    replay.begin(inputs.routes_PLk)
    model.zero_grad()
    rows_RK = model(packed=inputs)
    token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"]).backward()
    return rows_RK.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packing_shared_prefixes_and_recomputation_replay_the_same_routes(mixture: Path) -> None:
    model, replay = loaded(mixture)
    batch = routed_batch(*DEEP, 3)
    expected = replayed(model, replay, replace(batch, prefixes=None), kernel="sdpa")
    replay.begin()
    own = model(packed=packed_inputs(batch, device=CPU, kernel="sdpa")[0]).detach()
    assert distance(own, expected[0]) > 1e-2, "the routes are not the model's own"
    assert float(expected[1]["model.layers.1.mlp.gate.weight"].abs().max()) > 1e-3
    shared = replayed(model, replay, batch, kernel="sdpa", prefixes=batch.prefixes)
    recomputed = replayed(*loaded(mixture, recomputes=True), replace(batch, prefixes=None), kernel="sdpa")
    for outputs, gradients in (shared, recomputed):
        assert distance(outputs, expected[0]) < 1e-5
        for name, gradient in expected[1].items():
            assert distance(gradients[name], gradient) < 1e-5, name


def test_replayed_experts_have_the_scores_that_the_router_has_for_them(mixture: Path) -> None:
    """Normalized as the model does it: over the chosen experts alone."""
    model, replay = loaded(mixture)
    router = model.model.layers[1].mlp.gate
    router.norm_topk_prob = True
    hidden_TH = torch.randn(6, router.hidden_dim, generator=torch.Generator().manual_seed(0))
    experts_T2 = torch.tensor([[3, 1], [0, 2], [2, 1], [1, 0], [3, 0], [2, 3]])
    replay.begin(experts_T2[:, None].expand(-1, 2, -1).short())
    logits_TE, weights_T2, chosen_T2 = router(hidden_TH)
    assert chosen_T2.equal(experts_T2)
    torch.testing.assert_close(weights_T2, logits_TE.gather(1, experts_T2).softmax(-1))


def test_gradients_of_the_router_are_those_of_the_replayed_scores(mixture: Path) -> None:
    """A central difference of the loss in one weight of a router, in fp64 and with fixed routes."""
    model, replay = loaded(mixture)
    model.double().set_experts_implementation("eager")
    batch = routed_batch(*GROUP, 1)
    weight = model.model.layers[0].mlp.gate.weight
    _, gradients = replayed(model, replay, replace(batch, prefixes=None), kernel="sdpa")
    place = int(gradients["model.layers.0.mlp.gate.weight"].abs().argmax())
    losses = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            weight.view(-1)[place] += step
            inputs, _ = packed_inputs(batch, device=CPU, kernel="sdpa", routes_TLk=batch.per_token["routes"])
            replay.begin(inputs.routes_PLk)
            rows_RK = model(packed=inputs)
            losses.append(token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"]))
            weight.view(-1)[place] -= step
    slope = float(losses[0] - losses[1]) / 2e-3
    assert slope == pytest.approx(float(gradients["model.layers.0.mlp.gate.weight"].view(-1)[place]), rel=2e-3)


def test_a_batch_without_routes_of_each_token_is_refused(mixture: Path) -> None:
    _, replay = loaded(mixture)
    micro = MicroBatches(
        deepspeed=None, head="lm", device=CPU, kernel="sdpa", sp_group=None, step_each_micro=False, replay=replay
    )
    batch = routed_batch(*GROUP, 1)
    for per_token in ({}, {"routes": batch.per_token["routes"][1:]}, {"routes": batch.per_token["routes"][..., :1]}):
        with raises(BatchError, field="per_token.routes", allowed=f"({batch.input_ids_T.numel()}, 2, 2)"):
            micro.to_device(replace(batch, per_token=per_token))


def test_every_patched_router_is_a_class_with_the_parts_that_replay_reads() -> None:
    assert [name for name, patch in ROUTERS.items() if patch.problem()] == []


SETUPS: dict[str, dict[str, Any]] = {
    "stage-1": {"zero": ZeroConfig(stage=1, param_persistence_elements=0)},
    "stage-2-sp": {"zero": ZeroConfig(stage=2), "sequence_parallel": 2},
    "stage-3-recomputation": {
        "zero": ZeroConfig(stage=3, param_persistence_elements=0),
        "gradient_checkpointing": True,
        "collective_guard": "lockstep",
    },
}
OPTIM = OptimConfig(lr=3e-3, eps=1e-4, grad_clip=1.0)
TREES = [[(*GROUP, 1), (*DEEP, 2)], [(*DEEP, 3), (*GROUP, 4)]]


def run(pool: RankPool, folder: Path, mode: str, setup: str, *, share: bool = True) -> Any:
    config = EngineConfig(optim=OPTIM, dtype="float32", router_replay=mode, **SETUPS[setup])  # type: ignore[arg-type]
    rows = [TREES[0 if config.sequence_parallel > 1 else rank] for rank in range(2)]
    per_rank = [{"steps": [[tree] for tree in row]} for row in rows]
    return pool.run("train_trees", per_rank, model_path=str(folder), config=config, share=share, routed=True)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_real_ranks_replay_given_routes_at_every_stage(two_ranks: RankPool, mixture: Path, setup: str) -> None:
    """Against whole sequences at stage 1, in one process each; and R2 against the routers' own choice."""
    plain = "stage-1"
    expected = run(two_ranks, mixture, "R3", plain, share=False)
    ours = run(two_ranks, mixture, "R3", setup)
    assert 0.2 < ours[0]["differ"][0] < 1, "random routes"
    if setup != "stage-2-sp":  # there both ranks have the sequences of the first
        for rank, other in zip(ours, expected, strict=True):
            assert distance(rank["outputs"], other["outputs"]) < 1e-5
            torch.testing.assert_close(rank["stats"], other["stats"], rtol=1e-4, atol=1e-6)
    else:
        assert distance(ours[0]["outputs"], expected[0]["outputs"]) < 1e-5
    recorded, own = (run(two_ranks, mixture, mode, setup) for mode in ("R2", "off"))
    assert recorded[0]["differ"][0] == 0.0
    assert recorded[0]["stats"][0] == own[0]["stats"][0], "the first update replays what the routers choose"
    assert distance(own[0]["outputs"], ours[0]["outputs"]) > 1e-2
