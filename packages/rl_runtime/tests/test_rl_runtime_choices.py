"""Settings chosen for the devices of a run: the pure rule, on GPUs that this machine lacks."""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, LoraConfig, ModelShape, OptimConfig
from ds_engine.config import OffloadConfig, ZeroConfig
from plinth_testing import models
from plinth_testing.errors import raises
from rl_core import BatchConfig
from rl_data import DataConfig
from rl_runtime import (
    FineTuningConfig,
    FrozenModel,
    InputError,
    JobConfig,
    ModelConfig,
    SupervisedConfig,
    SupervisedJobConfig,
    TeacherConfig,
    TrainedModel,
    TrainerConfig,
    TrainingConfig,
    job_layout,
    resolve_job,
)
from rl_runtime.launch.gpus import Gpu, known_gpus
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.supervised import resolve_supervised, resolve_supervised_for
from rl_runtime.rollout.config import OversamplingConfig
from rl_runtime.rollout.scoring_config import ScoringConfig
from rl_runtime.rules import value_of
from rollout_vllm import RolloutConfig, SamplingConfig
from run_kit.machine import gpus as machine_gpus
from weight_sync import SyncConfig

QWEN3_06B, QWEN2_7B = ModelShape.read(models.QWEN3_06B), ModelShape.read(models.QWEN2_7B)
GIB = 2**30


def gpus(number: int, gib: float = 140.0, used: float = 0.0) -> tuple[Gpu, ...]:
    return (Gpu(name="GPU", total_bytes=int(gib * GIB), used_bytes=int(used * GIB)),) * number


def config(**sections: Any) -> JobConfig:
    """64 prompts x 4 samples, two updates, 320 + 512 tokens."""
    given_sections = {
        "batch": BatchConfig(train_batch_size=64, mini_batch_size=32),
        "data": DataConfig(max_prompt_length=320),
        "sampling": SamplingConfig(n=4, max_tokens=512),
        "validation": SamplingConfig(n=1, max_tokens=512),
    }
    return JobConfig(**(given_sections | sections))


def test_the_cpu_keeps_its_defaults() -> None:
    choice = resolve_job(replace(config(), trainer=TrainerConfig(device="cpu")))
    chosen = choice.config
    assert (chosen.trainer.num_ranks, chosen.rollout.num_servers) == (2, 1)
    assert (chosen.rollout.enforce_eager, chosen.actor.compile, chosen.actor.gradient_checkpointing) == (
        True,
        False,
        False,
    )
    assert chosen.batch.token_budget == 16384
    assert len(choice.lines()) == 1
    assert "the CPU" in choice.lines()[0]


def test_a_gpu_gets_the_fast_way() -> None:
    choice = resolve_job_for(config(), gpus=gpus(1), shape=QWEN3_06B)
    chosen = choice.config
    assert (chosen.trainer.num_ranks, chosen.rollout.num_servers) == (1, 1)
    assert (chosen.rollout.enforce_eager, chosen.actor.compile, chosen.actor.gradient_checkpointing) == (
        False,
        True,
        False,
    )
    assert (chosen.rollout.max_num_seqs, chosen.rollout.max_model_len) == (256, 832)
    assert chosen.rollout.kv_cache_gib is not None
    # 256 sequences of 832 tokens, 28 layers, keys and values of 1,024 numbers in bf16
    assert chosen.rollout.kv_cache_gib == pytest.approx(256 * 832 * 28 * 2 * 1024 * 2 / GIB, abs=0.02)
    assert len(choice.lines()) == 2
    assert choice.comment().count("\n") == len({**choice.reasons, **choice.consequences}) + 1


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


def test_a_choice_that_the_configuration_refuses_is_an_input_error() -> None:
    job = SupervisedJobConfig(engine=EngineConfig(sequence_parallel=70_000))
    with raises(InputError, field="trainer.num_ranks", value=70000):
        resolve_supervised_for(job, gpus=(), shape=None)


@pytest.mark.parametrize(
    ("staleness", "servers", "untested", "given_value", "chosen"),
    [
        (0, {}, None, "auto", "auto"),
        (1, {}, None, "auto", "keep"),
        (1, {}, None, "wait", "wait"),
        (1, {}, None, "recompute", "recompute"),
        (1, {"urls": ("http://host:1",)}, None, "auto", "wait"),
        (1, {"fast_paths": False}, None, "auto", "wait"),
        (1, {}, "vllm 0.40 is not tested", "auto", "wait"),
        (1, {}, "vllm 0.40 is not tested", "keep", "keep"),
    ],
)
def test_pushes_interrupt_no_response_of_servers_that_label_tokens(
    staleness: int, servers: dict[str, Any], untested: str | None, given_value: Any, chosen: str
) -> None:
    sections = {
        "trainer": TrainerConfig(max_staleness=staleness),
        "rollout": RolloutConfig(**servers),
        "sync": SyncConfig(running_requests=given_value),
    }
    for devices in ((), gpus(2)):
        shape = QWEN3_06B if devices else None
        choice = resolve_job_for(config(**sections), gpus=devices, shape=shape, untested=untested)
        assert choice.config.sync.running_requests == chosen
        assert ("sync.running_requests" in choice.reasons) == (chosen != given_value)


def test_no_push_keeps_caches_that_ranks_cannot_compute() -> None:
    """Tokens behind a cache of older weights have the log-probs of neither policy."""
    exact = {"actor": EngineConfig(match_servers=True), "trainer": TrainerConfig(max_staleness=1)}
    assert resolve_job_for(config(**exact), gpus=(), shape=None).config.sync.running_requests == "recompute"
    with raises(InputError, field="sync.running_requests", value="keep"):
        config(**exact, sync=SyncConfig(running_requests="keep"))


@pytest.mark.parametrize("key", ["tensor_parallel_size", "kv_cache_dtype"])
def test_servers_that_cannot_match_are_refused(key: str) -> None:
    servers = RolloutConfig(**{key: {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}[key]})
    with raises(InputError, field=f"rollout.{key}"):
        resolve_job_for(config(actor=EngineConfig(match_servers=True), rollout=servers), gpus=gpus(2), shape=QWEN3_06B)


@pytest.mark.parametrize(("number", "ranks", "per_server"), [(1, 1, 256), (2, 2, 128), (3, 2, 128), (4, 4, 64)])
def test_ranks_and_servers_follow_the_gpus(number: int, ranks: int, per_server: int) -> None:
    chosen = resolve_job_for(config(), gpus=gpus(number), shape=QWEN3_06B).config
    assert (chosen.trainer.num_ranks, chosen.rollout.num_servers) == (ranks, ranks)
    assert chosen.rollout.max_num_seqs == per_server
    job_layout(chosen)


def test_servers_apart_get_the_other_gpus() -> None:
    apart = config(trainer=TrainerConfig(colocate=False))
    choice = resolve_job_for(apart, gpus=gpus(4), shape=QWEN3_06B)
    assert (choice.config.trainer.num_ranks, choice.config.rollout.num_servers) == (2, 2)
    assert choice.config.rollout.gpu_memory_utilization == 0.9
    assert choice.config.rollout.kv_cache_gib is None
    existing = replace(apart, rollout=RolloutConfig(urls=("http://h:1",)))
    chosen = resolve_job_for(existing, gpus=gpus(4), shape=QWEN3_06B).config
    assert chosen.trainer.num_ranks == 4
    assert chosen.rollout == replace(existing.rollout, routes=False)


def test_what_compiled_layers_cannot_do_is_left_off() -> None:
    for engine in (
        EngineConfig(lora=LoraConfig(base_format="nf4")),
        EngineConfig(zero=ZeroConfig(stage=3, offload=OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/x"))),
    ):
        choice = resolve_job_for(config(actor=engine), gpus=gpus(2), shape=QWEN3_06B)
        assert choice.config.actor.compile is False
    unknown = replace(QWEN3_06B, family="mixtral", counted=tuple(QWEN3_06B.weights()))
    choice = resolve_job_for(config(), gpus=gpus(2), shape=unknown)
    assert choice.config.actor.compile is False
    assert "upper bounds" in choice.memory


def test_a_smaller_gpu_recomputes() -> None:
    chosen = resolve_job_for(config(), gpus=gpus(1, gib=24), shape=QWEN3_06B).config
    assert chosen.actor.gradient_checkpointing is True
    assert chosen.actor.compile is True


@dataclass(frozen=True, kw_only=True)
class _DistillationConfig(JobConfig):
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        return (*super().frozen_models, *self.teacher.frozen_models)


OPEN_SETTINGS = (
    "trainer.num_ranks",
    "trainer.device",
    "trainer.take_turns",
    "sync.transport",
    "sync.bucket_mib",
    *(
        f"{section}.{name}"
        for section in ("rollout", "teacher.server")
        for name in ("device", "num_servers", "cpu_threads", "max_num_seqs", "enforce_eager", "chunked_prefill")
    ),
    "teacher.server.max_model_len",
    "actor.compile",
    "actor.gradient_checkpointing",
    "actor.tiled_mlp",
    "batch.token_budget",
)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer": TrainerConfig(take_turns="both")},
        {"trainer": TrainerConfig(max_staleness=1)},
        {"oversampling": OversamplingConfig(extra_prompts=2)},
        {"actor": EngineConfig(match_servers=True)},
    ],
)
def test_no_setting_stays_open_and_servers_have_the_modes_that_others_need(
    num_gpus: int, sections: dict[str, Any]
) -> None:
    shape, job = QWEN3_06B if num_gpus else None, config(**sections)
    job = _DistillationConfig(**{one.name: getattr(job, one.name) for one in dataclasses.fields(job)})
    resolved = resolve_job_for(job, gpus=gpus(num_gpus), shape=shape, host_bytes=10**12, host_cores=(12,)).config
    assert [key for key in OPEN_SETTINGS if value_of(resolved, key) in (None, "auto")] == []
    device = "cuda" if num_gpus else "cpu"
    assert {resolved.trainer.device, resolved.rollout.device, resolved.teacher.server.device} == {device}
    assert resolved.rollout.cpu_threads == resolved.teacher.server.cpu_threads == (1 if num_gpus else 6)
    assert (resolved.sync.transport, resolved.sync.bucket_mib) == (("ipc", 256) if num_gpus else ("shm", 64))
    assert resolved.teacher.server.max_model_len == 320 + 512 + 1
    assert resolved.rollout.sleep_mode == resolved.trainer.takes_turns
    assert resolved.rollout.match_trainer == resolved.actor.match_servers
    assert resolved.rollout.dtype == ("bfloat16" if resolved.actor.match_servers else "auto")
    assert resolved.rollout.control_routes == bool(
        resolved.trainer.max_staleness or resolved.oversampling.extra_prompts
    )
    if not num_gpus:
        assert (resolved.rollout.max_num_seqs, resolved.rollout.kv_cache_gib) == (256, 1.0)


@pytest.mark.parametrize(
    ("sections", "transport", "bucket_mib"),
    [
        ({"trainer": TrainerConfig(ray_address="10.0.0.1:6379")}, "auto", 64),
        ({"sync": SyncConfig(transport="tcp", bucket_mib=7)}, "tcp", 7),
        ({"rollout": RolloutConfig(urls=("http://127.0.0.1:1",))}, "shm", 64),
        ({"rollout": RolloutConfig(urls=("http://127.0.0.1:1", "http://198.51.100.7:2"))}, "auto", 64),
    ],
)
def test_the_transport_stays_open_where_each_server_has_its_own(
    sections: dict[str, Any], transport: str, bucket_mib: int
) -> None:
    sync = resolve_job_for(config(**sections), gpus=(), shape=None).config.sync
    assert (sync.transport, sync.bucket_mib) == (transport, bucket_mib)


def test_servers_of_several_hosts_share_the_cores_of_each() -> None:
    job = config(rollout=RolloutConfig(num_servers=4))
    assert resolve_job_for(job, gpus=(), shape=None, host_cores=(16, 12)).config.rollout.cpu_threads == 3


def test_states_that_cannot_fit_are_refused() -> None:
    with raises(InputError, field="model.path"):
        resolve_job_for(config(), gpus=gpus(1, gib=80), shape=QWEN2_7B)
    # 7B as a whole leaves no room for activations: said, not refused, because they are an estimate.
    assert "expect it to run out of memory" in resolve_job_for(config(), gpus=gpus(1, gib=133), shape=QWEN2_7B).memory
    lora = config(actor=EngineConfig(lora=LoraConfig()))
    assert "expect" not in resolve_job_for(lora, gpus=gpus(1, gib=80), shape=QWEN2_7B).memory


def test_settings_that_the_engine_refuses_are_named_by_their_key() -> None:
    """The memory plan is made before the model is tried."""
    three = EngineConfig(sequence_parallel=3)
    with raises(InputError, field="actor.sequence_parallel", value=3):
        resolve_job_for(config(actor=three), gpus=gpus(3), shape=QWEN3_06B)
    with raises(InputError, field="engine.sequence_parallel", value=3):
        resolve_supervised_for(supervised(engine=three), gpus=gpus(3), shape=QWEN3_06B)
    job = config(actor=EngineConfig(sequence_parallel=8), reward=ScoringConfig(model="/models/reward"))
    with raises(InputError, field="reward.model", value="/models/reward"):
        resolve_job_for(job, gpus=gpus(8), shape=QWEN3_06B, frozen_shapes={"reward.model": QWEN2_7B})
    unknown = EngineConfig(lora=LoraConfig(target_modules=("nowhere",)))
    with raises(InputError, field="actor.lora.target_modules", value=("nowhere",)):
        resolve_job_for(config(actor=unknown), gpus=gpus(1), shape=QWEN3_06B)


def test_gpus_that_a_torch_without_cuda_cannot_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for device in ("auto", "cpu"):
        job = JobConfig(trainer=TrainerConfig(device=device))
        supervised_job = SupervisedJobConfig(trainer=TrainingConfig(device=device))
        for listed, is_named in (("0,1", True), ("", False), ("-1", False), ("NoDevFiles", False)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
            for choice in (resolve_job(job), resolve_supervised(supervised_job)):
                *warnings, chosen = choice.lines()
                assert chosen.startswith("chosen for the CPU")
                assert len(warnings) == (is_named and device == "auto")
                assert all(line.startswith("warning: CUDA_VISIBLE_DEVICES is 0,1, but torch ") for line in warnings)


def seven_b(**sections: Any) -> JobConfig:
    return config(actor=EngineConfig(zero=ZeroConfig(stage=3)), **sections)


def test_7b_on_two_gpus_fits_side_by_side() -> None:
    choice = resolve_job_for(seven_b(), gpus=gpus(2), shape=QWEN2_7B, host_bytes=0)
    assert choice.config.trainer.take_turns == "never"
    assert choice.gpu_bytes == choice.rank_bytes + choice.server_bytes < 140 * GIB


def test_7b_on_one_gpu_takes_turns_and_moves_the_optimizer() -> None:
    choice = resolve_job_for(seven_b(), gpus=gpus(1), shape=QWEN2_7B, host_bytes=200 * GIB)
    assert choice.config.trainer.take_turns == "both"
    assert choice.config.actor.gradient_checkpointing is True
    assert "expect" not in choice.memory
    # fp32 weights and two moments of 7.6 billion parameters, as in benchmarks/memory_turns: 182.8 GB in both directions
    assert (choice.host_bytes, choice.moved_bytes) == pytest.approx((12 * 7.616e9, 182.8e9), rel=1e-3)
    assert "7 s a step, estimated at 27 GB/s" in choice.memory
    assert choice.rank_bytes + choice.server_bytes > 140 * GIB > choice.gpu_bytes
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
    assert choice.host_bytes == pytest.approx(2 * 2 * 7.616e9, rel=1e-3)
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
        assert chosen.gpu_bytes <= gib * GIB
        assert chosen.host_bytes <= host_gib * GIB
    for choice in filter(None, (chosen, side_by_side, asleep, moved)):
        assert choice.gpu_bytes <= choice.rank_bytes + choice.server_bytes
        assert (choice.config.trainer.take_turns == "both") == (choice.host_bytes > 0)


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


OPEN: dict[str, st.SearchStrategy[Any]] = {
    "trainer.take_turns": st.sampled_from(["never", "servers", "both"]),
    "trainer.num_ranks": st.sampled_from([1, 2, 4]),
    "rollout.num_servers": st.integers(1, 4),
    "rollout.max_num_seqs": st.integers(1, 1024),
    "rollout.enforce_eager": st.booleans(),
    "rollout.gpu_memory_utilization": st.sampled_from([0.1, 0.5, 0.9]),
    "rollout.kv_cache_gib": st.sampled_from([0.5, 20.0]),
    "rollout.max_model_len": st.sampled_from([832, 4096]),
    "actor.compile": st.booleans(),
    "actor.gradient_checkpointing": st.booleans(),
    "actor.tiled_mlp": st.sampled_from([0, 4096]),
    "batch.token_budget": st.sampled_from([1024, 20000]),
}


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    data=st.data(),
    number=st.integers(0, 5),
    gib=st.sampled_from([16.0, 40.0, 80.0, 140.0]),
    stage=st.sampled_from([1, 2, 3]),
    shape=st.sampled_from([QWEN3_06B, QWEN2_7B]),
)
def test_given_settings_win_and_the_plan_fits(
    data: st.DataObject, number: int, gib: float, stage: Any, shape: ModelShape
) -> None:
    """Given settings are kept, open ones are filled, the counts are consistent, and a plan fits or says so."""
    names = data.draw(st.sets(st.sampled_from(sorted(OPEN)), max_size=5))
    by_hand = {name: data.draw(OPEN[name], label=name) for name in sorted(names)}
    sections: dict[str, dict[str, Any]] = {}
    for name, chosen in by_hand.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = chosen
    job = config(
        trainer=TrainerConfig(**sections.get("trainer", {})),
        rollout=RolloutConfig(**sections.get("rollout", {})),
        actor=EngineConfig(zero=ZeroConfig(stage=stage), **sections.get("actor", {})),
        batch=BatchConfig(train_batch_size=64, mini_batch_size=32, **sections.get("batch", {})),
    )
    try:
        choice = resolve_job_for(job, gpus=gpus(number, gib), shape=shape if number else None)
    except InputError:
        assert shape is QWEN2_7B or gib == 16
        return
    for name, chosen in by_hand.items():
        assert value_of(choice.config, name) == chosen
        assert name not in choice.reasons
    filled = set(OPEN) - {"rollout.kv_cache_gib", "rollout.gpu_memory_utilization"}
    if not number:
        filled -= {"rollout.max_num_seqs", "rollout.max_model_len"}
    assert all(value_of(choice.config, name) is not None for name in filled)
    assert set(choice.reasons) <= set(OPEN)
    if number and "trainer.num_ranks" not in by_hand:
        assert choice.config.trainer.rank_count <= number
        job_layout(choice.config)
    if number and "expect it to run out" not in choice.memory:
        assert choice.gpu_bytes <= gib * GIB


def supervised(**sections: Any) -> SupervisedJobConfig:
    return SupervisedJobConfig(**{"model": ModelConfig(path="some/model"), **sections})


@pytest.mark.parametrize(
    ("number", "gib", "recompute", "budget"), [(1, 140, False, 16384), (2, 20, False, 8192), (2, 14, True, 16384)]
)
def test_supervised_training_gets_all_gpus(number: int, gib: float, recompute: bool, budget: int) -> None:
    choice = resolve_supervised_for(supervised(), gpus=gpus(number, gib), shape=QWEN3_06B)
    chosen = choice.config
    assert chosen.trainer.num_ranks == number
    assert (chosen.engine.compile, chosen.engine.gradient_checkpointing) == (True, recompute)
    assert chosen.token_budget == budget
    assert choice.rank_bytes <= gib * GIB
    by_hand = supervised(trainer=TrainingConfig(num_ranks=1), engine=EngineConfig(compile=False), micro_batch_size=2)
    kept = resolve_supervised_for(by_hand, gpus=gpus(number, gib), shape=QWEN3_06B).config
    assert (kept.trainer.num_ranks, kept.engine.compile, kept.token_budget) == (1, False, None)


@pytest.mark.parametrize(("family", "compiles"), [("qwen3_moe", True), ("mixtral", False)])
def test_layers_are_compiled_where_that_was_measured(family: str, compiles: bool) -> None:
    shape = replace(QWEN3_06B, family=family, counted=tuple(QWEN3_06B.weights()))
    choice = resolve_supervised_for(supervised(), gpus=gpus(1, 140.0), shape=shape)
    assert choice.config.engine.compile == compiles


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


@pytest.mark.parametrize(
    ("sections", "rate", "why"),
    [
        ({"model": ModelConfig()}, 2e-3, "the built-in model starts from random weights"),
        ({}, 1e-5, "all weights of a trained model"),
        ({"engine": EngineConfig(lora=LoraConfig())}, 1e-4, "LoRA adapters"),
        (
            {"supervised": FineTuningConfig(optim=OptimConfig(name="muon", lr=None))},
            5e-5,
            "all weights of a trained model; 5 times AdamW's",
        ),
        ({"supervised": FineTuningConfig(optim=OptimConfig(lr=3e-6))}, 3e-6, None),
    ],
)
def test_the_learning_rate_suits_the_model(sections: dict[str, Any], rate: float, why: str | None) -> None:
    choice = resolve_supervised_for(supervised(**sections), gpus=(), shape=None)
    assert choice.config.supervised.optim.lr == rate
    assert choice.reasons.get("supervised.optim.lr") == why
    assert (f"supervised.optim.lr={rate}" in choice.lines()[0]) == (why is not None)


def test_a_warm_start_gets_a_learning_rate_too() -> None:
    with_steps = config(model=ModelConfig(), warm_start=SupervisedConfig(steps=3))
    assert resolve_job_for(with_steps, gpus=(), shape=None).config.warm_start.optim.lr == 2e-3
    assert resolve_job_for(config(model=ModelConfig()), gpus=(), shape=None).config.warm_start.optim.lr is None


def test_the_built_in_model_needs_no_plan_on_a_gpu() -> None:
    choice = resolve_job_for(config(model=ModelConfig()), gpus=gpus(2), shape=None)
    assert (choice.config.trainer.num_ranks, choice.config.actor.compile) == (2, False)
    assert choice.memory == ""


def test_gpus_whose_memory_is_unknown_are_left_to_torch() -> None:
    text = """0, GPU-a, 9.0, 143771, 4, 143151, 580.65, NVIDIA H200
1, GPU-b, 9.0, [N/A], 17, [N/A], 580.65, NVIDIA GB10
2, GPU-c, 9.0, 143771, [N/A], [N/A], 580.65, NVIDIA H200
"""
    gpus = known_gpus(machine_gpus.parse_gpus(text))
    assert {index: (gpu.name, gpu.free_bytes // 2**20) for index, gpu in gpus.items()} == {0: ("NVIDIA H200", 143151)}


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


@pytest.mark.parametrize("kind", [config, supervised])
def test_gpus_before_ampere_get_float16_and_sdpa(kind: Any) -> None:
    """Turing has neither bfloat16 nor FlashAttention; newer and unknown GPUs keep the defaults."""
    for capability in ((7, 5), (7, 0), (8, 0), (9, 0), None):
        cards = tuple(replace(gpu, capability=capability) for gpu in gpus(2))
        job = kind()
        choose: Any = resolve_job_for if isinstance(job, JobConfig) else resolve_supervised_for
        choice = choose(job, gpus=cards, shape=QWEN3_06B)
        engine = choice.config.actor if isinstance(job, JobConfig) else choice.config.engine
        is_old = capability is not None and capability < (8, 0)
        assert (engine.model_dtype, engine.attention) == (("float16", "sdpa") if is_old else ("bfloat16", "auto"))
        assert ("dtype=float16" in choice.lines()[0] and "attention=sdpa" in choice.lines()[0]) == is_old
        section = "actor" if isinstance(job, JobConfig) else "engine"
        given = replace(job, **{section: EngineConfig(dtype="bfloat16")})
        if is_old:
            with raises(InputError, field=f"{section}.dtype", value="bfloat16"):
                choose(given, gpus=cards, shape=QWEN3_06B)
        else:
            choose(given, gpus=cards, shape=QWEN3_06B)


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
    assert counted.host_bytes - without.host_bytes == 2 * grown
    assert counted.moved_bytes - without.moved_bytes == 2 * grown


@pytest.mark.parametrize(("stage", "share"), [(2, 1.0), (3, 0.5)])
@pytest.mark.parametrize("signal", ["sampled", "full"])
def test_the_memory_plan_counts_a_teacher_on_the_ranks(stage: Any, share: float, signal: Any) -> None:
    """Its bf16 weights; with `full` also hidden states and, where weights are sharded, a whole LM head."""
    sections = {name: getattr(config(), name) for name in ("data", "sampling", "validation")}
    job = _DistillationConfig(
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
    job = _DistillationConfig(reward=served, teacher=TeacherConfig(model="folder"))
    assert job.frozen_models == ()
    on_ranks = replace(job, reward=ScoringConfig(model="r"), teacher=TeacherConfig(model="t", on="ranks"))
    assert [(model.key, model.path, model.head) for model in on_ranks.frozen_models] == [
        ("reward.model", "r", "value"),
        ("teacher.model", "t", "lm"),
    ]
