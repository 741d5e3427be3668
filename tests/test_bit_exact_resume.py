"""A run killed at a random instant and resumed ends with the bits of one that was left alone.

One case of GRPO, SFT and DPO each; PLINTH_RESUME_MATRIX=1 runs every ZeRO stage with and without offload, PPO with its
critic and KL controller, SFT with adapters whose dropout draws random numbers, KTO and a reward model.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from run_kit.runs import list_runs
from tests.run_folders import exact_metrics, only

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

MATRIX = {
    "zero1": ["actor.zero.stage=1"],
    "zero1-cpu": ["actor.zero.stage=1", "actor.zero.offload.optimizer=cpu"],
    "zero2": ["actor.zero.stage=2"],
    "zero2-cpu": ["actor.zero.stage=2", "actor.zero.offload.optimizer=cpu"],
    "zero3": ["actor.zero.stage=3"],
    "zero3-cpu": ["actor.zero.stage=3", "actor.zero.offload.optimizer=cpu", "actor.zero.offload.param=cpu"],
    "ppo": [
        *("critic.zero.stage=3", "algorithm.critic_warmup_steps=1", "algorithm.kl_target=0.01"),
        "algorithm.kl_horizon=100",
    ],
}
SFT_MATRIX = {
    "sft": ["engine.zero.stage=2"],
    "sft-zero1-cpu": ["engine.zero.stage=1", "engine.zero.offload.optimizer=cpu"],
    "sft-zero3-cpu": [
        *("engine.zero.stage=3", "engine.zero.offload.optimizer=cpu", "engine.zero.offload.param=cpu"),
        "engine.sequence_parallel=2",
    ],
    "sft-zero3-nf4": [
        *("engine.zero.stage=3", "engine.lora.rank=4", "engine.lora.dropout=0.1", "engine.lora.base_format=nf4"),
        *("token_budget=null", "micro_batch_size=3"),
    ],
}
PREFERENCE_MATRIX = {
    "dpo": ["engine.zero.stage=2"],
    "dpo-kto": ["algorithm.loss=kto", "engine.zero.stage=3", "engine.lora.rank=4"],
    "reward": ["engine.zero.stage=1", "supervised.num_samples=0"],
}
WHOLE = [*MATRIX, *SFT_MATRIX, *PREFERENCE_MATRIX]
CASES = WHOLE if os.environ.get("PLINTH_RESUME_MATRIX") else ["zero2", "sft", "dpo"]
ARGUMENTS = [
    "rollout.deterministic=true",
    "task.num_train=10",  # with 4 prompts a step an epoch ends within the third step
    *("batch.train_batch_size=4", "batch.mini_batch_size=2", "sampling.n=4", "algorithm.kl_coef=0.01"),
    "algorithm.entropy_coef=0.05",  # a gradient even where all answers are equally wrong
    *("actor.optim.schedule=cosine", "actor.optim.warmup_steps=2", "warm_start.steps=2"),
    *("warm_start.optim.warmup_steps=0", "trainer.total_training_steps=5", "trainer.val_before_train=false"),
    *("trainer.val_after_train=false", "trainer.save_freq=1"),
]
SFT_ARGUMENTS = [
    "task.num_demonstrations=50",
    "supervised.val_size=10",  # with 16 demonstrations a step an epoch ends within the third step
    *("supervised.batch_size=16", "supervised.steps=5", "supervised.num_samples=1", "supervised.sample_tokens=4"),
    *("supervised.optim.warmup_steps=2", "token_budget=256", "trainer.val_before_train=false", "trainer.test_freq=1"),
    "trainer.save_freq=1",
]


PREFERENCE_ARGUMENTS = [
    "task.num_demonstrations=50",
    "task.num_pairs=40",  # with 16 pairs a step an epoch ends within the third step
    "task.num_val_pairs=10",
    "warm_start.steps=2",
    "warm_start.optim.warmup_steps=0",
    *[argument for argument in SFT_ARGUMENTS if not argument.startswith(("task.", "supervised.val_size="))],
    "supervised.steps=25",  # they are quicker than the instants of the kill
]


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(case: str, tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = case.partition("-")[0]
    if case in SFT_MATRIX:
        arguments = [*SFT_ARGUMENTS, *SFT_MATRIX[case]]
    elif case in PREFERENCE_MATRIX:
        arguments = [*PREFERENCE_ARGUMENTS, *PREFERENCE_MATRIX[case]]
    else:
        app = "ppo" if case == "ppo" else "grpo"
        arguments = [*ARGUMENTS, *MATRIX[case]]
    uninterrupted = start_app(tmp_path / "whole", *arguments, app=app).succeeded()

    killed = start_app(tmp_path / "killed", *arguments, "trainer.experiment=job", app=app)
    # Not before a checkpoint is there, and not after the last step: at a random instant between.
    killed.wait_for(" 1/25 " if case in PREFERENCE_MATRIX else " 1/5 ")
    while not list((tmp_path / "killed").glob("*/checkpoints/latest")):
        time.sleep(0.05)
    time.sleep(random.Random(case).uniform(0.0, 2.0))
    killed.process.kill()
    killed.finish()
    assert not killed.survivors(grace_s=15)
    first = only((tmp_path / "killed").iterdir())
    assert only(list_runs(tmp_path / "killed")).state == "died"

    resumed = start_app(tmp_path / "killed", *arguments, "trainer.experiment=job", "trainer.resume=auto", app=app)
    assert resumed.finish() == 0, resumed.output
    assert f"from {first}" in resumed.output, "resume=auto finds the newest run of the experiment by itself"
    second = only(path for path in (tmp_path / "killed").iterdir() if path != first)
    expected, repeated = exact_metrics(uninterrupted), exact_metrics(second)
    assert repeated, "nothing was left to do after the kill"
    assert set(repeated) < set(expected), "the resumed run did everything again"
    assert repeated == {step: expected[step] for step in repeated}
    before = exact_metrics(first)
    # SFT adds its validation to the row of a step: the last row may lack it.
    assert before == {step: {name: expected[step][name] for name in row} for step, row in before.items()}
    for weights in (uninterrupted / "model").glob("*.safetensors"):
        assert weights.read_bytes() == (second / "model" / weights.name).read_bytes()
