"""Reward models and preference training: exact means whatever the split, bad input, and real ranks."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given

import apps.dpo.main as dpo
import apps.reward.main as reward
import rl_core
import rl_runtime
from apps.dpo.config import AlgorithmConfig, DpoConfig
from apps.reward.config import AlgorithmConfig as RewardAlgorithm
from apps.reward.config import RewardConfig
from ds_engine import TokenOutputs, ValueOutputs
from plinth_testing import raises, run_script, write_tiny_model
from rl_core import Batch, BatchConfig
from rl_data import DataConfig, Demonstration, LabeledResponse, PreferencePair, build_tiny_model, load_pairs
from rl_runtime.config import ModelConfig, PreferenceTaskSize
from rl_runtime.errors import InputError
from rl_runtime.ranks.train_batch import TrainBatch, assignment
from rl_runtime.training.supervised_config import PreferenceTrainingConfig, SupervisedConfig
from rollout_vllm import RolloutConfig, ServerGroup, classification_reward
from tests.run_folders import metrics_rows


def make_pairs(lens: Sequence[tuple[int, int]]) -> list[PreferencePair]:
    """Pairs whose responses have these numbers of tokens; every token differs."""
    ids = iter(range(10_000))
    return [
        PreferencePair(
            Demonstration((next(ids), next(ids)), tuple(next(ids) for _ in range(chosen))),
            Demonstration((next(ids), next(ids)), tuple(next(ids) for _ in range(rejected))),
            margin=index / 4,
        )
        for index, (chosen, rejected) in enumerate(lens)
    ]


def micro_batches(batch: Batch, num_replicas: int, limit: BatchConfig, group_size: int) -> list[Batch]:
    """The micro batches that the ranks get of a batch."""
    lens = batch.seq_lens_S.tolist()
    plan = assignment(lens, lens, range(len(lens)), num_replicas, limit, 1, group_size=group_size)
    return [batch.select(micro) for replica in plan for micro in replica if micro]


def log_probs_of(batch: Batch) -> torch.Tensor:
    """A policy whose log-prob of a token depends on the token alone."""
    return -((batch.target_ids_K * 37 % 101).float() / 50)


LENS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=9)
LIMITS = st.one_of(
    st.builds(BatchConfig, token_budget=st.integers(1, 40)), st.builds(BatchConfig, micro_batch_size=st.integers(1, 4))
)


def check_plan(plan: Any, num_responses: int, limit: BatchConfig, num_tokens: Callable[[list[int]], int]) -> None:
    """Every response is there once, beside the other of its pair, within the limits of a micro batch."""
    assert len({len(replica) for replica in plan}) == 1, "ranks have different numbers of micro batches"
    micros = [micro for replica in plan for micro in replica]
    assert sorted(index for micro in micros for index in micro) == list(range(num_responses))
    for micro in micros:
        assert [index + 1 for index in micro[0::2]] == micro[1::2], "a pair is divided"
        assert all(index % 2 == 0 for index in micro[0::2])
        assert limit.micro_batch_size is None or len(micro) <= 2 * limit.micro_batch_size
        assert limit.token_budget is None or num_tokens(micro) <= limit.token_budget or len(micro) == 2


@given(lens=LENS, num_replicas=st.integers(1, 4), limit=LIMITS)
def test_a_pair_is_in_one_micro_batch_and_every_pair_counts_once(
    lens: list[tuple[int, int]], num_replicas: int, limit: BatchConfig
) -> None:
    pairs = make_pairs(lens)
    lengths = rl_runtime.packed(rl_runtime.responses_of(pairs)).seq_lens_S.tolist()
    plan = assignment(lengths, lengths, range(len(lengths)), num_replicas, limit, 1, group_size=2)
    check_plan(plan, len(lengths), limit, lambda micro: sum(lengths[i] for i in micro))


@given(lens=LENS, num_replicas=st.integers(1, 4), limit=LIMITS)
def test_pairs_that_share_prompts_stay_whole_within_the_limits(
    lens: list[tuple[int, int]], num_replicas: int, limit: BatchConfig
) -> None:
    """Every other pair has the prompt of the one before, and its chosen response goes on from that one's."""
    rows: list[list[int]] = []
    for number, sizes in enumerate(lens):
        begin = [1, 2, number // 2, *([0] * (number % 2))]
        rows += [begin + [10 * number + side] * size for side, size in enumerate(sizes)]
    batch = rl_core.pack([row[:1] for row in rows], [row[1:] for row in rows])
    order = batch.order_prefixes(min_tokens=1)
    lengths, targets = batch.seq_lens_S.tolist(), batch.response_lens_S.tolist()
    plan = assignment(lengths, targets, range(len(rows)), num_replicas, limit, 1, group_size=2, prefixes=order)

    def computed(micro: list[int]) -> int:
        return batch.select(micro).with_prefixes(order.select(micro)).num_computed_tokens

    check_plan(plan, len(rows), limit, computed)


@given(lens=LENS, num_replicas=st.integers(1, 4), limit=LIMITS, kind=st.sampled_from(["dpo", "ipo", "kto"]))
def test_preference_losses_are_the_mean_over_the_batch_whatever_its_split(
    lens: list[tuple[int, int]], num_replicas: int, limit: BatchConfig, kind: Any
) -> None:
    pairs, config = make_pairs(lens), AlgorithmConfig(loss=kind, beta=0.3)
    given_: Any = pairs
    if kind == "kto":
        given_ = [LabeledResponse(p.chosen, bool(len(p.rejected.response_ids) % 2), p.rejected) for p in pairs]
    responses, labels_S = rl_runtime.with_labels(given_)
    ref_S = torch.linspace(-3, 1, len(responses))
    batch = rl_runtime.packed(responses, per_sequence={"ref": ref_S, "labels": labels_S})
    loss = partial(dpo.preference_loss, num=len(given_), kl=0.2, config=config)
    shares = [
        loss(TokenOutputs(log_probs_K=log_probs_of(one), entropy_K=log_probs_of(one)), one)
        for one in micro_batches(batch, num_replicas, limit, len(responses) // len(given_))
    ]
    ratios_S = torch.stack([row.sum() for row in batch.split(log_probs_of(batch))]) - ref_S
    assert float(sum(one.loss for one in shares)) == pytest.approx(
        float(dpo.losses(ratios_S, labels_S, 0.2, config).mean()), rel=1e-5, abs=1e-6
    )
    for name, values in dpo.statistics(ratios_S, labels_S, 0.2, config).items():
        assert float(sum(one.metrics[name] for one in shares)) == pytest.approx(
            float(values.mean()), rel=1e-4, abs=1e-5
        )


@given(lens=LENS, num_replicas=st.integers(1, 4), limit=LIMITS)
def test_reward_losses_are_the_mean_over_the_pairs_whatever_their_split(
    lens: list[tuple[int, int]], num_replicas: int, limit: BatchConfig
) -> None:
    pairs = make_pairs(lens)
    responses = rl_runtime.responses_of(pairs)
    batch = rl_runtime.score_batch(responses, {"margins": rl_runtime.margins_of(pairs)})
    last = {one.response_ids[-1]: (one.response_ids[-1] * 37 % 101) / 50 for one in responses}
    loss = partial(reward.reward_loss, num_pairs=len(pairs), center_coef=0.1)
    total = 0.0
    for one in micro_batches(batch, num_replicas, limit, 2):
        # The target is behind the last token of the response, whose score is read.
        scores_S = torch.tensor([last[int(token)] for token in one.input_ids_T[one.target_index_K]])
        total += float(loss(ValueOutputs(values_K=scores_S), one).loss)
    chosen_P = torch.tensor([last[pair.chosen.response_ids[-1]] for pair in pairs])
    rejected_P = torch.tensor([last[pair.rejected.response_ids[-1]] for pair in pairs])
    margins_P = torch.tensor([pair.margin for pair in pairs])
    expected_P = rl_core.bradley_terry_loss(chosen_P, rejected_P, margins_P, center_coef=0.1)
    assert total == pytest.approx(float(expected_P.mean()), rel=1e-5)


def test_a_broken_group_is_refused() -> None:
    one = make_pairs([(1, 1)])[0].chosen
    with raises(ValueError, field="group_size", value=2):
        TrainBatch(rl_runtime.packed([one] * 3), group_size=2)


class FixedModel:
    """Ranks whose log-probs of a token depend on the token alone."""

    images = None

    def __init__(self) -> None:
        self.num_calls = 0

    def log_probs(self, train_batch: TrainBatch) -> torch.Tensor:
        self.num_calls += 1
        return log_probs_of(train_batch.batch)


@given(lens=LENS, batch_size=st.integers(1, 7))
def test_reference_log_probs_survive_a_checkpoint_bit_for_bit_and_belong_to_their_responses(
    lens: list[tuple[int, int]], batch_size: int
) -> None:
    pairs, model = make_pairs(lens), FixedModel()
    responses = rl_runtime.responses_of(pairs)
    given_: Any = model
    ref = rl_runtime.ReferenceLogProbs([*pairs, pairs[0]], batch_size=batch_size)
    ref.compute(given_)
    assert model.num_calls == -(-len(responses) // batch_size), "a response that occurs twice is computed once"
    again = rl_runtime.ReferenceLogProbs(pairs, batch_size=3)
    again.load_state_dict(json.loads(json.dumps(ref.state_dict())))
    assert torch.equal(again.of(responses), ref.of(responses))
    assert ref.of(responses[-1:]).item() == pytest.approx(float(log_probs_of(rl_runtime.packed(responses[-1:])).sum()))
    changed = [*pairs[:-1], replace(pairs[-1], chosen=Demonstration((1,), (2, 3)))]
    with raises(InputError, field="supervised.files"):
        rl_runtime.ReferenceLogProbs(changed, batch_size=3).load_state_dict(ref.state_dict())


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: AlgorithmConfig(beta=0.0), "beta"),
        (lambda: AlgorithmConfig(label_smoothing=0.5), "label_smoothing"),
        (lambda: AlgorithmConfig(loss="ipo", label_smoothing=0.1), "label_smoothing"),
        (lambda: AlgorithmConfig(desirable_weight=2.0), "desirable_weight"),
        (lambda: AlgorithmConfig(loss="kto", undesirable_weight=-1.0), "undesirable_weight"),
        (lambda: AlgorithmConfig(loss="kto", desirable_weight=0.0, undesirable_weight=0.0), "undesirable_weight"),
        (lambda: RewardAlgorithm(center_coef=-0.1), "center_coef"),
        (lambda: RewardConfig(supervised=PreferenceTrainingConfig(num_samples=1)), "supervised.num_samples"),
        (lambda: DpoConfig(supervised=PreferenceTrainingConfig(val_size=5)), "supervised.val_size"),
        (lambda: PreferenceTrainingConfig(turns="each"), "turns"),
        (lambda: PreferenceTaskSize(kind="stones"), "kind"),
        (lambda: PreferenceTaskSize(slip_share=1.5), "slip_share"),
        (lambda: PreferenceTaskSize(num_val_pairs=0), "num_val_pairs"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(make: Callable[[], object], key: str) -> None:
    with raises(ValueError, field=key):
        make()


def test_files_are_checked_before_anything_starts(tmp_path: Path) -> None:
    model = ModelConfig(path=str(build_tiny_model(tmp_path / "model")))
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1", "chosen": "2", "rejected": "3"}\n{"question": "1", "chosen": "2"}\n')
    config = DpoConfig(model=model, supervised=PreferenceTrainingConfig(files=(str(data),)))
    with raises(InputError, field="supervised.files"):
        rl_runtime.check_run(config)
    with raises(InputError, field="supervised.files"):
        rl_runtime.check_run(replace(config, supervised=PreferenceTrainingConfig()))
    data.write_text('{"question": "1 + 1", "chosen": "2", "rejected": "3"}\n')
    with raises(InputError, field="warm_start.files"):
        rl_runtime.check_run(replace(config, warm_start=SupervisedConfig(steps=2)))


def held_out(run: Path) -> list[dict[str, float]]:
    rows = metrics_rows(run)
    return [{name: float(row[name]) for name in row if name.startswith("val/")} for row in rows if row["val/loss"]]


@pytest.mark.thorough
@pytest.mark.e2e
def test_a_reward_model_learns_and_transformers_and_vllm_give_its_scores(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(tmp_path, "preset=demo", "overlay=tiny", "supervised.steps=8", app="reward")
    run = app.succeeded()
    rows = held_out(run)
    assert len(rows) == 5
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert "held-out accuracy  " in app.output

    config = json.loads((run / "model" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["Qwen3ForSequenceClassification"], 1)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    pairs = load_pairs([run / "task" / "val_pairs.parquet"], tokenizer, DataConfig(max_prompt_length=48))
    with torch.no_grad():
        scores = [
            [float(model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, 0]) for one in both]
            for both in ((pair.chosen, pair.rejected) for pair in pairs)
        ]
    margins = [chosen - rejected for chosen, rejected in scores]
    assert sum(margins) / len(margins) == pytest.approx(rows[-1]["val/margin"], abs=1e-4)
    assert sum(margin > 0 for margin in margins) / len(margins) == pytest.approx(rows[-1]["val/accuracy"], abs=1e-6)

    # A vLLM server gives the scores of the exported model.
    with torch.no_grad():  # scores of an almost untrained model are near 0, where an activation would be hard to see
        model.score.weight.mul_(20)
    model.save_pretrained(run / "model")
    prompts = [[5, 6, 7, 8], [11, 3, 42, 9, 17, 23], [20, 21, 2]]
    with torch.no_grad():
        expected = [float(model(torch.tensor([ids])).logits[0, 0]) for ids in prompts]
    config = RolloutConfig(max_model_len=256, kv_cache_gib=0.05, dtype="float32", cpu_threads=1, stop_grace_s=3.0)
    with ServerGroup.launch(run / "model", config, log_dir=tmp_path, extra_args=["--runner", "pooling"]) as group:
        for use_activation in (False, True):  # the folder says that there is none
            with classification_reward(group.endpoints[0], use_activation=use_activation, timeout_s=300) as service:
                while service.submit(prompts[0]).result(300).kind == "connection":  # the server starts
                    group.check()
                    time.sleep(0.5)
                served = [service.submit(ids).result(300).score for ids in prompts]
            assert served == pytest.approx(expected, abs=1e-3)
    assert max(map(abs, expected)) > 1 or min(expected) < 0, "a sigmoid could not be told from no activation"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("reward, stage 3", "dpo, stage 2", "kto, stage 1, sequence parallelism"), marks=pytest.mark.long),
        pytest.param(("reward, stage 2", "ipo, stage 3", "dpo, stage 2, LoRA"), marks=pytest.mark.thorough),
    ],
)
def test_steps_and_scores_on_real_ranks_are_those_of_transformers(cases: tuple[str, ...], tmp_path: Path) -> None:
    script = Path(__file__).with_name("preference_worker.py")
    run_script(script, write_tiny_model(tmp_path / "model"), tmp_path / "out", *cases, timeout_s=400)
