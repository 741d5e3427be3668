"""ModelHandle and TrainBatch on dp x sp ranks: what is sent, how often, and how results come back.

The ranks are real `TrainerWorker`s in this process, with engines that compute simple functions of the token ids.
"""

import inspect
import math
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_samples import prompt, sample

from ds_engine import EngineConfig, LossOutput, StepSettings, StepStats, TokenOutputs
from plinth_testing import raises
from rl_core import Batch, BatchConfig
from rl_data import Demonstration
from rl_runtime.app.job import job_layout
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import DivergedError, InputError
from rl_runtime.job_config import JobConfig
from rl_runtime.ranks.model_handle import ModelHandle, SkippedUpdates, WithoutAdapters, run_concurrently
from rl_runtime.ranks.old_log_probs import OldLogProbs
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.samples import batch_of
from rl_runtime.training.metrics import update_metrics
from rl_runtime.training.reward_model import RewardModel
from rl_runtime.training.supervised import train_supervised
from rl_runtime.training.supervised_config import SupervisedConfig
from rollout_vllm import Sample


class EchoEngine:
    """Log-probs are the target ids, values half of them; without adapters, log-probs are the ids plus one half.

    A training step keeps the columns that it was given, and what its loss returns.
    """

    def __init__(self) -> None:
        self.shares_prefixes, self.copies_prefixes = True, False
        self.given: list[Any] = []
        self.trained: list[list[Any]] = []
        self.losses: list[list[LossOutput]] = []
        self.temperatures: list[float] = []

    def log_probs(self, micro_batches: list[Any], *, temperature: float, adapters: bool = True) -> list[TokenOutputs]:
        self.given = micro_batches
        self.temperatures.append(temperature)
        ids = [batch.target_ids_K.float() for batch in micro_batches]
        return [TokenOutputs(log_probs_K=k if adapters else k + 0.5, entropy_K=-k) for k in ids]

    def values(self, micro_batches: list[Any]) -> list[torch.Tensor]:
        return [batch.target_ids_K.float() / 2 for batch in micro_batches]

    def accumulate(
        self, micro_batches: list[Any], loss_fn: Any, *, temperature: float
    ) -> tuple[float, dict[str, float]]:
        self.train_mini_batch(micro_batches, loss_fn, temperature=temperature)
        return float(sum(output.loss for output in self.losses[-1])), {}

    def step(self, settings: StepSettings) -> tuple[float, bool]:
        self.settings = settings
        return 2.0, True

    def train_mini_batch(
        self, micro_batches: list[Any], loss_fn: Any, *, temperature: float, head_term: object = None
    ) -> StepStats:
        self.trained.append(micro_batches)
        ids = [(batch.to("cpu"), batch.target_ids_K.float()) for batch in micro_batches if batch.num_targets]
        self.losses.append([loss_fn(TokenOutputs(log_probs_K=k, entropy_K=-k), batch) for batch, k in ids])
        self.temperatures.append(temperature)
        return StepStats(
            loss=0.0, metrics={}, grad_norm=0.0, lr=0.0, num_micro_batches=len(micro_batches), num_empty_micro_batches=0
        )


class InProcessRanks:
    """A `WorkerGroup` without processes; arguments are pickled as on their way to a process."""

    def __init__(self, world_size: int, *roles: str) -> None:
        self.world_size = world_size
        self.workers = [TrainerWorker(rank, world_size, device="cpu", num_threads=1) for rank in range(world_size)]
        for worker in self.workers:
            worker._engines = {role: EchoEngine() for role in roles}  # type: ignore[misc]
        self.calls: list[str] = []
        self.columns_sent: list[tuple[int, str]] = []
        """(mini batch, column)."""
        self.built: dict[str, Any] = {}

    def run(self, method: Any, *args: Any) -> list[Any]:
        if method is TrainerWorker.build:
            self.built = inspect.signature(method).bind(self, *args).arguments
            return []
        self.calls.append(method.__name__)
        return [method(worker, *args) for worker in self.workers]

    def run_each(self, method: Any, first_args: list[Any], *args: Any, **options: Any) -> list[Any]:
        self.calls.append(method.__name__)
        if method is TrainerWorker.train:
            self.columns_sent += [(args[2], name) for name in first_args[0]]
        sent = [pickle.loads(pickle.dumps(one)) for one in first_args]
        return [method(worker, one, *args, **options) for worker, one in zip(self.workers, sent, strict=True)]

    def engines(self, role: str) -> list[Any]:
        return [worker._engines[role] for worker in self.workers]


def make_samples(lengths: list[int]) -> list[Sample]:
    return [
        sample([100 * number + t for t in range(length)], prompt=prompt((1, 2)), group=number)
        for number, length in enumerate(lengths)
    ]


def make_batch(lengths: list[int]) -> Batch:
    return batch_of(make_samples(lengths))


def handle(ranks: InProcessRanks, name: str, *, sp: int = 1, batch: BatchConfig | None = None) -> ModelHandle:
    model = ModelHandle(ranks, name, batch or BatchConfig(token_budget=16))  # type: ignore[arg-type]
    model.build("model", EngineConfig(sequence_parallel=sp), total_steps=1)
    return model


@pytest.mark.parametrize(
    ("batch", "tokens"), [(BatchConfig(token_budget=16), 16), (BatchConfig(micro_batch_size=2), 0)]
)
def test_layers_are_compiled_ahead_for_the_tokens_of_a_micro_batch(batch: BatchConfig, tokens: int) -> None:
    ranks = InProcessRanks(2, "actor")
    handle(ranks, "actor", batch=batch)
    assert ranks.built["ahead_tokens"] == tokens


def any_loss(_: TokenOutputs, batch: Any) -> LossOutput:
    """Returns the columns that it is given."""
    return LossOutput(loss=torch.zeros(()), metrics=dict(batch.columns))


def stats(*, norm: float = 1.0, scale: float = 1.0, loss: float = 0.5) -> StepStats:
    applied = math.isfinite(norm)
    return StepStats(
        loss=loss if applied else math.nan,
        metrics={"kl": loss if applied else math.nan},
        grad_norm=norm,
        lr=1.0,
        num_micro_batches=1,
        num_empty_micro_batches=0,
        step_applied=applied,
        loss_scale=scale,
    )


def test_metrics_of_a_step_are_means_over_its_updates_and_sums_of_counts() -> None:
    first = replace(stats(norm=2.0), loss=1.0, lr=0.5, metrics={"kl": 0.1}, num_micro_batches=2)
    second = replace(stats(norm=4.0), loss=4.0, lr=0.25, metrics={"kl": 0.2}, num_micro_batches=3)
    metrics = update_metrics("critic", [first, second])
    expected = {"loss": 2.5, "grad_norm": 3.0, "lr": 0.25, "kl": 0.15, "num_updates": 2, "num_micro_batches": 5}
    assert {name: metrics[f"critic/{name}"] for name in expected} == pytest.approx(expected)


def test_updates_that_are_skipped_are_counted_named_once_and_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    ranks = InProcessRanks(2, "actor")
    actor = ModelHandle(ranks, "actor", BatchConfig(token_budget=16), max_skipped_updates=3, report=lines.append)  # type: ignore[arg-type]
    norms = (math.inf, math.inf, 1.0, math.nan, math.inf, math.inf)
    results = (stats(norm=norm) for norm in norms for _ in ranks.workers)
    monkeypatch.setattr(EchoEngine, "train_mini_batch", lambda *_, **__: next(results))
    mini_batch = TrainBatch(make_batch([3, 9])).mini_batches[0]
    updates = [actor.update(mini_batch, any_loss) for _ in range(5)]
    assert lines == [
        "warning: skipped an update of the actor, because its gradient is not finite: loss nan, gradient norm inf"
    ]
    metrics = update_metrics("actor", updates)
    assert (metrics["actor/num_updates"], metrics["actor/num_skipped_updates"]) == (1, 4)
    assert (metrics["actor/loss"], metrics["actor/kl"], metrics["actor/grad_norm"]) == (0.5, 0.5, 1.0)
    assert math.isnan(update_metrics("actor", updates[:2])["actor/loss"]), "nothing was computed: a gap in the curve"
    for call in (lambda: actor.export("folder", "model"), lambda: actor.update(mini_batch, any_loss)):
        with raises(DivergedError, field="trainer.max_skipped_updates", value=3):
            call()


def test_fp16_may_search_its_loss_scale() -> None:
    lines: list[str] = []
    skipped = SkippedUpdates("critic", 2, lines.append)
    for power in range(16, 0, -1):
        skipped.count(stats(norm=math.inf, scale=2.0**power))
    skipped.check()
    assert len(lines) == 1
    assert "fp16 lowers its loss scale, 65536, which is normal at the start" in lines[0]
    skipped.count(stats(norm=math.inf))
    with raises(DivergedError, field="trainer.max_skipped_updates", value=2):
        skipped.count(stats(norm=math.inf))
    assert len(lines) == 2
    unlimited = SkippedUpdates("critic", 0, lines.append)
    for _ in range(50):
        unlimited.count(stats(norm=math.inf))
    unlimited.check()


@pytest.mark.parametrize(("world_size", "sp", "num_samples"), [(1, 1, 8), (2, 1, 7), (4, 2, 8), (2, 2, 3), (4, 1, 1)])
def test_a_reward_model_scores_every_sample_in_its_place(world_size: int, sp: int, num_samples: int) -> None:
    """Of any number, also less than there are ranks. The value of the echo is half of the last token."""
    ranks = InProcessRanks(world_size, "reward")
    model = RewardModel(handle(ranks, "reward", sp=sp), weight=2.0)
    items = [replace(item, score=0.25) for item in make_samples([3, 9, 1, 5, 7, 2, 8, 4])[:num_samples]]
    scored = model.score(items)
    last = [int(item.response_ids[-1]) for item in items]
    assert [item.reward_terms for item in scored] == [{"model": token / 2} for token in last]
    assert [item.score for item in scored] == [0.25 + token for token in last]
    assert [item.response_ids is other.response_ids for item, other in zip(scored, items, strict=True)]
    assert not any(worker._batches for worker in ranks.workers), "the ranks keep nothing"
    assert model.score([]) == []


@pytest.mark.parametrize(("world_size", "sp"), [(4, 1), (4, 2), (4, 4), (2, 2)])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_ranks_of_a_replica_get_the_same_micro_batches(world_size: int, sp: int, micro_batch_size: int | None) -> None:
    ranks = InProcessRanks(world_size, "actor")
    actor = handle(ranks, "actor", sp=sp, batch=BatchConfig(token_budget=16, micro_batch_size=micro_batch_size))
    batch = make_batch([3, 9, 1, 5, 7, 2, 8, 4])
    with TrainBatch(batch) as train_batch:
        assert actor.log_probs(train_batch).tolist() == batch.target_ids_K.tolist()
    given = [engine.given for engine in ranks.engines("actor")]
    for rank in range(world_size):
        ids = [[micro.input_ids_T.tolist() for micro in given[index]] for index in (rank, rank // sp * sp)]
        assert ids[0] == ids[1]
    tokens = [len(micro.input_ids_T) for micros in given[::sp] for micro in micros]
    assert sum(tokens) == batch.num_tokens
    sizes = [len(micro.cu_seqlens_S1) - 1 for micros in given for micro in micros]
    assert max(sizes) <= 2 * sp if micro_batch_size else max(tokens) <= 16 * sp


def groups_with_a_prompt(num_prompt_tokens: int) -> Batch:
    """Four groups of three samples; the groups of samples that follow each other differ."""
    prompts = [prompt(tuple(range(1000 * group, 1000 * group + num_prompt_tokens))) for group in range(4)] * 3
    return batch_of([sample([9000 + n, n, n], prompt=prompts[n], group=n % 4) for n in range(12)])


@pytest.mark.parametrize("limit", [{"token_budget": 60}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("reason", ["shared", "off", "a model cannot", "few tokens"])
def test_prompts_of_groups_are_computed_once_where_every_model_of_the_ranks_can(
    limit: dict[str, int], reason: str
) -> None:
    ranks = InProcessRanks(2, "actor", "critic")
    ranks.engines("critic")[1].shares_prefixes = reason != "a model cannot"
    config = BatchConfig(**limit, share_prefixes=reason != "off")
    actor, batch = handle(ranks, "actor", batch=config), groups_with_a_prompt(20 if reason == "few tokens" else 40)
    with TrainBatch(batch, mini_batches=[range(12)]) as train_batch:
        assert actor.log_probs(train_batch).tolist() == batch.target_ids_K.tolist()
        stats = actor.update(train_batch.mini_batches[0], any_loss)
    micros = [micro for engine in ranks.engines("actor") for micro in engine.given]
    shared = 4 * (40 + 3 * 3) if reason == "shared" else batch.num_tokens
    assert sum(micro.num_computed_tokens for micro in micros) == stats.metrics["computed_tokens_per_update"] == shared
    assert stats.metrics["tokens_per_update"] == batch.num_tokens
    assert {micro.prefixes is not None for micro in micros} == {reason == "shared"}
    assert max(micro.num_computed_tokens for micro in micros) <= limit.get("token_budget", 200)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_micro_batch_has_no_more_targets_than_its_budget_where_responses_are_equal(group_size: int) -> None:
    """The head computes each target, though equal responses are computed once."""
    ranks = InProcessRanks(1, "actor")
    actor = handle(ranks, "actor", batch=BatchConfig(token_budget=128))
    batch = batch_of([sample(list(range(40)), prompt=prompt((1, 2)), group=0)] * 12)
    with TrainBatch(batch, group_size=group_size) as train_batch:
        assert actor.log_probs(train_batch).tolist() == batch.target_ids_K.tolist()
    [engine] = ranks.engines("actor")
    assert [micro.num_computed_tokens for micro in engine.given] == [42] * len(engine.given)
    assert max(micro.num_targets for micro in engine.given) == {1: 120, 2: 80}[group_size], "below 128"


@pytest.mark.parametrize("copies", [False, True])
def test_where_attention_copies_prefixes_a_micro_batch_has_four_budgets_of_sequences(copies: bool) -> None:
    ranks = InProcessRanks(2, "actor", "critic")
    ranks.engines("critic")[1].copies_prefixes = copies
    actor = handle(ranks, "actor", batch=BatchConfig(token_budget=100))
    batch = batch_of([sample([900 + n], prompt=prompt(tuple(range(63))), group=0) for n in range(32)])
    with TrainBatch(batch) as train_batch:
        assert actor.log_probs(train_batch).tolist() == batch.target_ids_K.tolist()
    sizes = [micro.num_tokens for engine in ranks.engines("actor") for micro in engine.given]
    assert sizes == ([6 * 64, 5 * 64, 5 * 64] * 2 if copies else [16 * 64] * 2)


def test_log_probs_and_updates_use_the_temperature_of_the_rollout() -> None:
    ranks = InProcessRanks(2, "actor")
    actor = ModelHandle(ranks, "actor", BatchConfig(token_budget=16), temperature=0.7)  # type: ignore[arg-type]
    with TrainBatch(make_batch([3, 9])) as train_batch:
        actor.log_probs(train_batch)
        actor.update(train_batch.mini_batches[0], any_loss)
    assert [engine.temperatures for engine in ranks.engines("actor")] == [[0.7, 0.7]] * 2


def test_a_reference_without_adapters_is_computed_by_the_actors_engine() -> None:
    actor, batch = handle(InProcessRanks(2, "actor"), "actor"), make_batch([3, 9])
    with TrainBatch(batch) as train_batch:
        ours_K, theirs_K = actor.log_probs(train_batch), WithoutAdapters(actor).log_probs(train_batch)
    assert (theirs_K - ours_K).tolist() == [0.5] * 12


def test_supervised_steps_see_every_demonstration_once_an_epoch_and_weigh_its_tokens_alike() -> None:
    ranks, steps = InProcessRanks(2, "actor"), []
    demonstrations = [Demonstration((1,), (10 * number,) * number) for number in range(1, 6)]
    config = SupervisedConfig(steps=5, batch_size=2)
    steps += train_supervised(handle(ranks, "actor"), demonstrations, config, seed=3)
    assert [number for number, _ in steps] == [1, 2, 3, 4, 5]
    seen = []
    for step in range(5):
        micro_batches = [micro for engine in ranks.engines("actor") for micro in engine.trained[step]]
        tokens_K = torch.cat([micro.target_ids_K for micro in micro_batches])
        weights_K = torch.cat([micro.columns["weights"] for micro in micro_batches])
        assert weights_K.tolist() == pytest.approx([1 / len(tokens_K)] * len(tokens_K))
        seen += sorted(set(tokens_K.tolist()))
    assert sorted(seen) == sorted([10, 20, 30, 40, 50] * 2)
    assert len(set(seen[:4])) == 4


@pytest.mark.parametrize("separate", [False, True])
def test_a_train_batch_is_sent_once_to_each_rank_group(separate: bool) -> None:
    """Two epochs of PPO with a reference model: one send, each column once, nothing kept afterwards."""
    shared = InProcessRanks(2, "actor", "ref", "critic")
    critic_ranks = InProcessRanks(2, "critic") if separate else shared
    actor, ref, critic = handle(shared, "actor"), handle(shared, "ref"), handle(critic_ranks, "critic")
    batch = make_batch([3, 9, 1, 5, 7, 2, 8, 4])
    sent = set(batch.columns) | {"old_log_probs", "ref_log_probs", "values", "advantages"}
    with TrainBatch(batch, mini_batches=[range(4), range(4, 8)]) as train_batch:
        batch.add_columns(old_log_probs=actor.log_probs(train_batch))
        batch.add_columns(ref_log_probs=ref.log_probs(train_batch), values=critic.values(train_batch))
        batch.add_columns(advantages=torch.arange(39.0))
        for mini_batch in 2 * train_batch.mini_batches:
            critic.update(mini_batch, any_loss)
            actor.update(mini_batch, any_loss)
        assert all(len(worker._batches) == 1 for worker in shared.workers)
    assert batch.columns["values"].tolist() == [token / 2 for token in batch.target_ids_K.tolist()]

    groups = {id(ranks): ranks for ranks in (shared, critic_ranks)}.values()
    for ranks in groups:
        assert ranks.calls.count("hold_batch") == ranks.calls.count("drop_batch") == 1
        assert sorted(ranks.columns_sent) == sorted((mini, name) for mini in (0, 1) for name in sent)
        assert all(not worker._batches for worker in ranks.workers)

    for engine in shared.engines("actor"):
        first_epoch = [micro for mini in engine.trained[:2] for micro in mini]
        assert [m.input_ids_T.tolist() for m in first_epoch] == [m.input_ids_T.tolist() for m in engine.given]
        assert len(engine.trained) == 4
        for micro in first_epoch:
            assert micro.columns["old_log_probs"].tolist() == micro.columns["ref_log_probs"].tolist()
            assert micro.columns["old_log_probs"].long().tolist() == micro.target_ids_K.tolist()
            assert micro.columns["values"].tolist() == (micro.target_ids_K / 2).tolist()
            # Target ids are 100 * sample + place: the column numbers them from 0 to 38 in the order of the samples.
            starts = dict(zip(range(0, 800, 100), [0, 3, 12, 13, 18, 25, 27, 35], strict=True))
            expected = [starts[token // 100 * 100] + token % 100 for token in micro.target_ids_K.tolist()]
            assert micro.columns["advantages"].tolist() == expected


@pytest.mark.parametrize("defer_first", [False, True])
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    size=st.integers(1, 5),
    ranks=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
)
def test_old_log_probs_are_complete_for_every_loss_and_deferred_ones_cost_no_pass(
    defer_first: bool, lengths: list[int], size: int, ranks: tuple[int, int]
) -> None:
    world_size, sp = ranks
    group = InProcessRanks(world_size, "actor")
    actor, critic = handle(group, "actor", sp=sp), handle(InProcessRanks(1, "critic"), "critic")
    batch = make_batch(lengths)
    minis = [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    with TrainBatch(batch, mini_batches=minis) as train_batch:
        old = OldLogProbs(actor, train_batch, defer_first=defer_first)
        old.compute()
        critic.update(train_batch.mini_batches[0], any_loss)
        for mini_batch in 2 * train_batch.mini_batches:
            old.update(mini_batch, any_loss)
        critic.update(train_batch.mini_batches[0], any_loss)
    assert batch.columns["old_log_probs"].tolist() == batch.target_ids_K.tolist()
    for engine in group.engines("actor"):
        assert len(engine.given) == sum(map(len, engine.trained[int(defer_first) : len(minis)]))
        for micros, losses in zip(engine.trained, engine.losses, strict=True):
            for micro, loss in zip([m for m in micros if m.num_targets], losses, strict=True):
                assert loss.metrics["old_log_probs"].tolist() == micro.target_ids_K.tolist()
    before, after = critic.ranks.engines("critic")[0].losses  # type: ignore[attr-defined]
    assert {("old_log_probs" in loss.metrics) for loss in before} == {not defer_first}
    assert all("old_log_probs" in loss.metrics for loss in after)


def test_deferred_log_probs_need_the_update_of_their_mini_batch_first() -> None:
    actor = handle(InProcessRanks(1, "actor"), "actor")
    with TrainBatch(make_batch([2, 1]), mini_batches=[[0], [1]]) as train_batch:
        old = OldLogProbs(actor, train_batch, defer_first=True)
        old.compute()
        with pytest.raises(ValueError):
            old.update(train_batch.mini_batches[1], any_loss)


def doubled(engine: Any, micro_batches: list[Batch]) -> list[torch.Tensor]:
    return [2.0 * micro.target_ids_K for micro in micro_batches]


def test_a_function_of_a_module_computes_on_the_ranks() -> None:
    actor, batch = handle(InProcessRanks(2, "actor"), "actor"), make_batch([2, 1, 4])
    with TrainBatch(batch, mini_batches=[[0], [1, 2]]) as train_batch:
        assert actor.compute(train_batch, doubled).tolist() == [2 * token for token in batch.target_ids_K.tolist()]
        partly = actor.compute(train_batch, doubled, mini_batches=[1])
        assert partly[:2].isnan().all()
        assert partly[2:].tolist() == [200, 400, 402, 404, 406]


def own_loss(outputs: TokenOutputs, batch: Any) -> LossOutput:
    return LossOutput(loss=(batch.columns["weights"] * batch.columns["own"]).sum())


def test_a_gradient_that_waits_brings_its_log_probs_in_the_order_of_the_batch() -> None:
    ranks = InProcessRanks(2, "actor")
    actor, batch = handle(ranks, "actor"), make_batch([2, 9, 4])
    batch.add_columns(weights=torch.arange(batch.num_targets).float())
    with TrainBatch(batch) as train_batch:
        loss, _, own_K = actor.accumulate(train_batch, own_loss, column="own")
    assert own_K.tolist() == batch.target_ids_K.tolist()
    shares = [float(output.loss) for engine in ranks.engines("actor") for output in engine.losses[0]]
    assert sum(shares) == float((batch.columns["weights"] * own_K).sum())
    assert loss == sum(float(output.loss) for output in ranks.engines("actor")[0].losses[0]), "summed by the engine"
    settings = StepSettings(lr=0.5)
    assert actor.step(settings) == (2.0, True)
    assert [engine.settings for engine in ranks.engines("actor")] == [settings] * 2


def test_models_of_different_layouts_on_the_same_ranks_keep_copies_of_their_own() -> None:
    ranks = InProcessRanks(2, "actor", "critic")
    actor, critic, batch = handle(ranks, "actor"), handle(ranks, "critic", sp=2), make_batch([3, 9, 1])
    with TrainBatch(batch) as train_batch:
        for _ in range(2):
            assert actor.log_probs(train_batch).tolist() == batch.target_ids_K.tolist()
            assert critic.values(train_batch).tolist() == (batch.target_ids_K / 2).tolist()
        assert {len(worker._batches) for worker in ranks.workers} == {2}
    assert not any(worker._batches for worker in ranks.workers)


def test_the_batch_has_to_divide_by_dp_and_sp() -> None:
    def config(num_ranks: int, sp: int, mini: int) -> JobConfig:
        return JobConfig(
            trainer=TrainerConfig(num_ranks=num_ranks),
            actor=EngineConfig(sequence_parallel=sp),
            batch=BatchConfig(train_batch_size=mini, mini_batch_size=mini),
        )

    layout = job_layout(config(4, 2, 8))
    assert (layout.dp, layout.sp) == (2, 2)
    with raises(InputError, field="actor.sequence_parallel", value=3, allowed="1, 2, 4"):
        job_layout(config(4, 3, 8))
    with raises(InputError, field="critic.sequence_parallel", value=8):
        job_layout(config(4, 1, 8), section="critic", engine=EngineConfig(sequence_parallel=8))
    with raises(InputError, field="batch.mini_batch_size"):
        job_layout(config(64, 8, 4))


def test_models_on_different_ranks_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    actor, critic = (ModelHandle(object(), name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    assert run_concurrently(phase, ("a", actor, meeting.wait), ("b", critic, lambda: meeting.wait() + 10)) in (
        [0, 11],
        [1, 10],
    )
    assert phases == ["a", "b"]


def test_models_on_the_same_ranks_run_in_turn() -> None:
    ranks = object()
    actor, critic = (ModelHandle(ranks, name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    order: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        order.append(f"{name} begins")
        yield
        order.append(f"{name} ends")

    run_concurrently(phase, ("a", actor, lambda: order.append("a")), ("b", critic, lambda: order.append("b")))
    assert order == ["a begins", "a", "a ends", "b begins", "b", "b ends"]


def test_a_failure_on_some_ranks_is_raised_after_the_others_have_finished() -> None:
    actor, critic = (ModelHandle(object(), name, BatchConfig()) for name in ("actor", "critic"))  # type: ignore[arg-type]
    finished: list[str] = []

    def fail() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        run_concurrently(lambda _: nullcontext(), ("a", actor, fail), ("b", critic, lambda: finished.append("b")))
    assert finished == ["b"]
