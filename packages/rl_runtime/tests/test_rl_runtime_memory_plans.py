"""Memory plans of a job: what ranks and servers of a GPU hold, in turns or side by side, and what cannot fit."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_jobs import GIB, QWEN2_7B, QWEN3_06B, DistillationJob, config, gpus, supervised

from ds_engine import EngineConfig, LoraConfig, ModelShape
from ds_engine.config import ZeroConfig
from plinth_testing.errors import raises
from rl_core import BatchConfig
from rl_data import DataConfig
from rl_runtime import InputError, JobConfig, ModelConfig, TeacherConfig, TrainedModel, TrainerConfig
from rl_runtime.launch.gpus import known_gpus
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.supervised import resolve_supervised_for
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import RolloutConfig, SamplingConfig
from run_kit.machine import gpus as machine_gpus


def test_states_that_cannot_fit_are_refused() -> None:
    with raises(InputError, field="model.path"):
        resolve_job_for(config(), gpus=gpus(1, gib=80), shape=QWEN2_7B)
    # 7B as a whole leaves no room for activations: said, not refused, because they are an estimate.
    assert "expect it to run out of memory" in resolve_job_for(config(), gpus=gpus(1, gib=133), shape=QWEN2_7B).memory
    lora = config(actor=EngineConfig(lora=LoraConfig()))
    assert "expect" not in resolve_job_for(lora, gpus=gpus(1, gib=80), shape=QWEN2_7B).memory


def seven_b(**sections: Any) -> JobConfig:
    return config(actor=EngineConfig(zero=ZeroConfig(stage=3)), **sections)


def test_7b_on_two_gpus_fits_side_by_side() -> None:
    choice = resolve_job_for(seven_b(), gpus=gpus(2), shape=QWEN2_7B, host_bytes=0)
    assert choice.config.trainer.take_turns == "never"
    assert choice.plan.gpu_bytes == choice.rank_bytes + choice.plan.server.total < 140 * GIB


def test_7b_on_one_gpu_takes_turns_and_moves_the_optimizer() -> None:
    choice = resolve_job_for(seven_b(), gpus=gpus(1), shape=QWEN2_7B, host_bytes=200 * GIB)
    assert choice.config.trainer.take_turns == "both"
    assert choice.config.actor.gradient_checkpointing is True
    assert "expect" not in choice.memory
    # fp32 weights and two moments of 7.6 billion parameters, as in benchmarks/memory_turns: 182.8 GB in both directions
    assert (choice.plan.host_bytes, choice.plan.moved_bytes) == pytest.approx((12 * 7.616e9, 182.8e9), rel=1e-3)
    assert "7 s a step, estimated at 27 GB/s" in choice.memory
    assert choice.rank_bytes + choice.plan.server.total > 140 * GIB > choice.plan.gpu_bytes
    assert choice.reasons["trainer.take_turns"] == "rank and server do not fit side by side"
    assert len(choice.lines()) == 2


def test_turns_that_host_memory_cannot_hold_are_refused() -> None:
    with raises(InputError, field="model.path") as caught:
        resolve_job_for(seven_b(), gpus=gpus(1), shape=QWEN2_7B, host_bytes=90 * GIB)
    assert {"85.1", "81.0"} < set(caught.value.problem.split())
    assert "actor.lora.rank=16" in caught.value.remedy
    # A checkpoint in the background copies weights and optimizer states as well.
    saving = seven_b(trainer=TrainerConfig(save_freq=10))
    with raises(InputError, field="model.path") as caught:
        resolve_job_for(saving, gpus=gpus(1), shape=QWEN2_7B, host_bytes=200 * GIB)
    assert "184.4" in caught.value.problem


@pytest.mark.parametrize(("match", "budget"), [(True, 32_768), (False, 16_384)])
def test_layers_that_are_not_compiled_get_larger_micro_batches(match: bool, budget: int) -> None:
    choice = resolve_job_for(config(actor=EngineConfig(match_servers=match)), gpus=gpus(1), shape=QWEN3_06B)
    assert choice.config.batch.token_budget == budget


def test_turns_by_hand() -> None:
    """Servers that sleep leave the trainer room; those that get adapters alone keep their weights in host memory."""
    asleep = resolve_job_for(
        seven_b(trainer=TrainerConfig(take_turns="servers")), gpus=gpus(2), shape=QWEN2_7B, host_bytes=0
    )
    assert asleep.config.batch.token_budget == 16384
    assert "trainer.take_turns" not in asleep.reasons
    assert "servers discard their weights" in asleep.memory
    adapters = config(
        actor=EngineConfig(lora=LoraConfig()),
        rollout=RolloutConfig(max_lora_rank=16),
        trainer=TrainerConfig(take_turns="servers"),
    )
    choice = resolve_job_for(adapters, gpus=gpus(2), shape=QWEN2_7B, host_bytes=100 * GIB)
    assert choice.plan.host_bytes == pytest.approx(2 * 2 * 7.616e9, rel=1e-3)
    assert "the servers' weights wait in host memory" in choice.memory


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    number=st.integers(1, 4),
    gib=st.integers(16, 160),
    stage=st.sampled_from([1, 2, 3]),
    host_gib=st.sampled_from([0, 64, 1000]),
    shape=st.sampled_from([QWEN3_06B, QWEN2_7B]),
)
def test_turns_are_the_last_resort_and_fit(number: int, gib: int, stage: Any, host_gib: int, shape: ModelShape) -> None:
    """Turns are chosen only if nothing fits side by side; what is chosen fits on GPU and host, or the run says so."""

    def choose(turns: Any) -> Any:
        trainer = TrainerConfig(take_turns=turns)
        job = config(actor=EngineConfig(zero=ZeroConfig(stage=stage)), trainer=trainer)
        try:
            return resolve_job_for(job, gpus=gpus(number, gib), shape=shape, host_bytes=host_gib * GIB)
        except InputError:
            return None

    def fits(choice: Any) -> bool:
        return choice is not None and "expect" not in choice.memory

    chosen, side_by_side, asleep, moved = map(choose, (None, "never", "servers", "both"))
    assert fits(chosen) == any(map(fits, (side_by_side, asleep, moved)))
    if fits(chosen):
        first = next(choice for choice in (side_by_side, asleep, moved) if fits(choice))
        assert chosen.config == first.config
        assert chosen.plan.gpu_bytes <= gib * GIB
        assert chosen.plan.host_bytes <= host_gib * GIB
    for choice in filter(None, (chosen, side_by_side, asleep, moved)):
        assert choice.plan.gpu_bytes <= choice.rank_bytes + choice.plan.server.total
        assert (choice.config.trainer.take_turns == "both") == (choice.plan.host_bytes > 0)


def test_turns_need_servers_on_the_ranks_gpus() -> None:
    with raises(InputError, field="trainer.take_turns", value="both"):
        config(trainer=TrainerConfig(take_turns="both", colocate=False))
    assert TrainerConfig(take_turns="both", ray_address="auto").takes_turns
    apart = resolve_job_for(config(trainer=TrainerConfig(colocate=False)), gpus=gpus(2), shape=QWEN3_06B)
    assert apart.config.trainer.take_turns == "never"
    assert apart.reasons["trainer.take_turns"] == "no server shares a GPU with a rank"
    assert resolve_job_for(config(), gpus=(), shape=None).config.trainer.take_turns == "never"


class WithCritic(JobConfig):
    @property
    def models(self) -> tuple[TrainedModel, ...]:
        return (*super().models, TrainedModel(section="actor", engine=self.actor, head="value", own_ranks=self.own))

    own = 0


class WithOwnRanks(WithCritic):
    own = 1


def test_a_critic_needs_memory_or_gpus_of_its_own() -> None:
    sections = {f.name: getattr(config(), f.name) for f in dataclasses.fields(config())}
    alone = resolve_job_for(config(), gpus=gpus(2), shape=QWEN3_06B)
    shared = resolve_job_for(WithCritic(**sections), gpus=gpus(2), shape=QWEN3_06B)
    apart = resolve_job_for(WithOwnRanks(**sections), gpus=gpus(2), shape=QWEN3_06B)
    assert shared.config.trainer.num_ranks == 2
    assert apart.config.trainer.num_ranks == 1
    assert apart.config.rollout.num_servers == 2
    assert shared.rank_bytes > alone.rank_bytes + 5 * GIB


def test_supervised_training_says_what_does_not_fit() -> None:
    with raises(InputError, field="model.path"):
        resolve_supervised_for(supervised(), gpus=gpus(1, 80.0), shape=QWEN2_7B)
    adapters = supervised(engine=EngineConfig(lora=LoraConfig()))
    choice = resolve_supervised_for(adapters, gpus=gpus(1, 24.0), shape=QWEN2_7B)
    assert choice.config.engine.gradient_checkpointing
    assert "memory of a GPU" in choice.lines()[1]


@pytest.mark.parametrize(("budget", "given", "tile"), [(None, None, 0), (60_000, None, 4096), (60_000, 0, 0)])
def test_mlps_run_in_tiles_where_micro_batches_cannot_shrink(budget: int | None, given: int | None, tile: int) -> None:
    """LoRA of 7B on 40 GiB; 0 turns tiles off."""
    adapters = EngineConfig(lora=LoraConfig(), tiled_mlp=given)
    choice = resolve_supervised_for(
        supervised(engine=adapters, token_budget=budget), gpus=gpus(1, 40.0), shape=QWEN2_7B
    )
    assert (choice.config.engine.tiled_mlp, choice.config.engine.gradient_checkpointing) == (tile, True)
    assert ("engine.tiled_mlp" in choice.reasons) == (tile > 0)
    assert ("expect" in choice.memory) == (given == 0)


def test_memory_that_the_driver_reserves_is_not_free_for_the_plan() -> None:
    """11.0 GiB that CUDA can allocate were planned as 11.6, which is total minus used."""
    text = """0, GPU-a, 9.0, 143771, 131893, 11264, 580.159.04, NVIDIA H200
1, GPU-b, 9.0, 143771, 131893, [N/A], 580.159.04, NVIDIA H200
"""
    gpus = known_gpus(machine_gpus.parse_gpus(text))
    assert {index: gpu.free_bytes // 2**20 for index, gpu in gpus.items()} == {0: 11264, 1: 11878}
    assert {gpu.total_bytes // 2**20 for gpu in gpus.values()} == {143771}
    choice = resolve_job_for(config(model=ModelConfig()), gpus=(gpus[0],), shape=None)
    assert choice.devices == "1 x NVIDIA H200 (11 GiB free)"


def test_gpus_whose_memory_is_unknown_are_left_to_torch() -> None:
    text = """0, GPU-a, 9.0, 143771, 4, 143151, 580.65, NVIDIA H200
1, GPU-b, 9.0, [N/A], 17, [N/A], 580.65, NVIDIA GB10
2, GPU-c, 9.0, 143771, [N/A], [N/A], 580.65, NVIDIA H200
"""
    gpus = known_gpus(machine_gpus.parse_gpus(text))
    assert {index: (gpu.name, gpu.free_bytes // 2**20) for index, gpu in gpus.items()} == {0: ("NVIDIA H200", 143151)}


@pytest.mark.parametrize(("stage", "share"), [(2, 1.0), (3, 0.5)])
def test_the_memory_plan_counts_a_reward_model_on_the_ranks(stage: Any, share: float) -> None:
    """Its bf16 weights beside the actor's; a vector takes the place of the LM head."""
    job = config(reward=ScoringConfig(model="folder"), actor=EngineConfig(zero=ZeroConfig(stage=stage)))
    without = resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B)
    counted = resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B, frozen_shapes={"reward.model": QWEN2_7B})
    num_weights = sum(weight.size for weight in QWEN2_7B.weights("value"))
    assert counted.rank_bytes - without.rank_bytes == pytest.approx(2 * num_weights * share, rel=0.03)


def test_a_reward_model_waits_in_host_memory_where_the_reference_does() -> None:
    job = config(
        reward=ScoringConfig(model="folder"),
        trainer=TrainerConfig(take_turns="both", num_ranks=2),
        actor=EngineConfig(gradient_checkpointing=True, zero=ZeroConfig(stage=3)),
    )
    without, counted = (
        resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B, host_bytes=500 * GIB, frozen_shapes={"reward.model": shape})
        for shape in (None, QWEN2_7B)
    )
    grown = counted.rank_bytes - without.rank_bytes
    assert grown > 6 * GIB
    assert counted.plan.host_bytes - without.plan.host_bytes == 2 * grown
    assert counted.plan.moved_bytes - without.plan.moved_bytes == 2 * grown


@pytest.mark.parametrize(("stage", "share"), [(2, 1.0), (3, 0.5)])
@pytest.mark.parametrize("signal", ["sampled", "full"])
def test_the_memory_plan_counts_a_teacher_on_the_ranks(stage: Any, share: float, signal: Any) -> None:
    """Its bf16 weights; with `full` also hidden states and, where weights are sharded, a whole LM head."""
    sections = {name: getattr(config(), name) for name in ("data", "sampling", "validation")}
    job = DistillationJob(
        **sections,
        batch=BatchConfig(train_batch_size=64, mini_batch_size=32, token_budget=4096),
        actor=EngineConfig(gradient_checkpointing=True, zero=ZeroConfig(stage=stage)),
        teacher=TeacherConfig(model="folder", on="ranks", signal=signal),
    )
    without = resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B)
    counted = resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B, frozen_shapes={"teacher.model": QWEN2_7B})
    expected = 2 * sum(weight.size for weight in QWEN2_7B.weights()) * share
    if signal == "full":
        expected += 2 * QWEN2_7B.hidden * (4096 + (QWEN2_7B.vocab if stage == 3 else 0))
    assert counted.rank_bytes - without.rank_bytes == pytest.approx(expected, rel=0.01)


def test_models_that_are_served_take_no_memory_of_the_ranks() -> None:
    served = ScoringConfig(model="folder", url="http://a:1", service="reward_model")
    job = DistillationJob(reward=served, teacher=TeacherConfig(model="folder"))
    assert job.frozen_models == ()
    on_ranks = replace(job, reward=ScoringConfig(model="r"), teacher=TeacherConfig(model="t", on="ranks"))
    assert [(model.key, model.path, model.head) for model in on_ranks.frozen_models] == [
        ("reward.model", "r", "value"),
        ("teacher.model", "t", "lm"),
    ]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(1, 400), st.integers(1, 600), st.integers(1, 64), st.integers(1, 8))
def test_a_whole_kv_cache_holds_all_sequences_at_full_length(
    prompt: int, response: int, num_prompts: int, samples: int
) -> None:
    sampling = SamplingConfig(n=samples, max_tokens=response)
    asked = config(
        batch=BatchConfig(train_batch_size=num_prompts, mini_batch_size=num_prompts),
        data=DataConfig(max_prompt_length=prompt),
        sampling=sampling,
        validation=sampling,
    )
    choice = resolve_job_for(asked, gpus=gpus(1), shape=QWEN3_06B)
    assert "100% of all sequences" in choice.reasons["rollout.kv_cache_gib"]
    gib = choice.config.rollout.kv_cache_gib
    assert gib is not None
    blocks = int(gib * GIB) // (16 * 2 * 28 * 1024 * 2)  # of 16 tokens, as vLLM divides it
    assert blocks - 1 >= num_prompts * samples * -(-(prompt + response) // 16), "vLLM keeps a block empty"


@pytest.mark.parametrize("longest", [*range(833, 849), *range(3001, 3017)])
def test_a_kv_cache_holds_a_sequence_as_long_as_servers_accept(longest: int) -> None:
    """vLLM starts with a block less, too, and then cannot complete such a sequence."""
    one = config(
        batch=BatchConfig(train_batch_size=1, mini_batch_size=1),
        sampling=SamplingConfig(n=1, max_tokens=512),
        rollout=RolloutConfig(max_model_len=longest),
    )
    shape = replace(QWEN3_06B, num_heads=32, num_kv_heads=32)  # a block has 7 MiB, and sizes are rounded to 10
    gib = resolve_job_for(one, gpus=gpus(1), shape=shape).config.rollout.kv_cache_gib
    assert gib is not None
    blocks = int(gib * GIB) // (16 * 2 * 28 * 4096 * 2)
    assert (blocks - 1) * 16 >= longest
