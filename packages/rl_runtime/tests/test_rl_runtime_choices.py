"""Settings chosen for the devices of a run: the pure rule, on GPUs that this machine lacks."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_jobs import GIB, QWEN2_7B, QWEN3_06B, DistillationJob, config, gpus, supervised

from ds_engine import EngineConfig, LoraConfig, ModelShape, OptimConfig
from ds_engine.config import MOST_PATH_ROWS, OffloadConfig, ZeroConfig
from plinth_testing.errors import raises
from rl_core import BatchConfig
from rl_data import DataConfig
from rl_runtime import (
    FineTuningConfig,
    InputError,
    JobConfig,
    ModelConfig,
    SupervisedConfig,
    SupervisedJobConfig,
    TrainerConfig,
    TrainingConfig,
    job_layout,
    resolve_job,
)
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.supervised import resolve_supervised, resolve_supervised_for
from rl_runtime.rollout.config import OversamplingConfig
from rl_runtime.rollout.scoring_config import ScoringConfig
from rl_runtime.rules import value_of
from rollout_vllm import RolloutConfig, SamplingConfig
from weight_sync import SyncConfig


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


def test_layers_are_not_recomputed_for_a_cache_that_holds_half_of_all_sequences() -> None:
    """Recomputed layers in micro batches of 8,192 tokens took three times as long (benchmarks/scaling)."""
    long = SamplingConfig(n=8, max_tokens=4096)
    batch = BatchConfig(train_batch_size=256, mini_batch_size=256)
    job = config(batch=batch, sampling=long, data=DataConfig(max_prompt_length=304))
    chosen = resolve_job_for(job, gpus=gpus(2), shape=QWEN3_06B).config
    assert (chosen.actor.gradient_checkpointing, chosen.batch.token_budget) == (False, 16384)
    assert chosen.rollout.max_num_seqs == 512
    assert chosen.rollout.kv_cache_gib == pytest.approx(0.4 * 512 * 4400 * 28 * 2 * 1024 * 2 / GIB, abs=0.1)


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
    unknown = replace(QWEN3_06B, family="mixtral", is_exact=False)
    choice = resolve_job_for(config(), gpus=gpus(2), shape=unknown)
    assert choice.config.actor.compile is False
    assert "upper bounds" in choice.memory


def test_a_smaller_gpu_recomputes() -> None:
    chosen = resolve_job_for(config(), gpus=gpus(1, gib=24), shape=QWEN3_06B).config
    assert chosen.actor.gradient_checkpointing is True
    assert chosen.actor.compile is True
    assert chosen.actor.keep_probabilities is False


def test_probabilities_are_kept_in_memory_that_nothing_else_needs() -> None:
    """Only of an LM head, and only where kernels keep them."""
    job, off = config(), EngineConfig(keep_probabilities=False)
    for one, key, kept in (
        (job, "actor", True),
        (replace(job, actor=off), "actor", False),
        (replace(job, actor=EngineConfig(dtype="float16")), "actor", False),
        (supervised(), "engine", True),
        (supervised(engine=off), "engine", False),
    ):
        resolve = resolve_job_for if key == "actor" else resolve_supervised_for
        chosen = resolve(one, gpus=gpus(1, gib=140), shape=QWEN3_06B)
        assert getattr(chosen.config, key).keep_probabilities is kept
        assert (f"{key}.keep_probabilities" in chosen.reasons) == kept
        without = replace(one, **{key: replace(getattr(one, key), keep_probabilities=False)})
        less = resolve(without, gpus=gpus(1, gib=140), shape=QWEN3_06B)
        assert kept == (chosen.rank_bytes > less.rank_bytes + 2**32)
        batch = {"share_prefixes": False} if key == "engine" else {"batch": replace(one.batch, share_prefixes=False)}
        no_paths = resolve(replace(one, **batch), gpus=gpus(1, gib=140), shape=QWEN3_06B)
        rows = MOST_PATH_ROWS * 16384 * kept
        assert chosen.rank_bytes - no_paths.rank_bytes == pytest.approx(1.12 * rows * 28 * 2 * 2 * 1024, abs=1)


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
    "actor.keep_probabilities",
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
    job = DistillationJob(**{one.name: getattr(job, one.name) for one in dataclasses.fields(job)})
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
    "actor.keep_probabilities": st.booleans(),
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
        assert choice.plan.gpu_bytes <= gib * GIB


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
    shape = replace(QWEN3_06B, family=family, is_exact=False)
    choice = resolve_supervised_for(supervised(), gpus=gpus(1, 140.0), shape=shape)
    assert choice.config.engine.compile == compiles


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
