"""A resume with something else, or of something else: what is printed, and what is refused."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ckpt import Checkpoint, CheckpointManager
from ds_engine import EngineConfig, LoraConfig, OptimConfig
from plinth_testing import raises
from rl_core import BatchConfig
from rl_data import DataConfig, Prompt, build_tiny_model
from rl_runtime import InputError, JobConfig, ModelConfig, SupervisedConfig, TrainerConfig, find_checkpoint
from rl_runtime.app import identity
from rl_runtime.app.identity import check_same_run, input_digests
from rl_runtime.app.training_run import JobPlan, create_run_folder, plan_run
from rl_runtime.launch.placement import Placement, Slot
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig
from rl_runtime.training.checkpoints import RunCheckpoints
from rollout_vllm import SamplingConfig
from run_kit.config.redaction import yaml_without_secrets
from run_kit.tracking.run_state import StateFile

PROMPTS = [Prompt(f"train:{i}", f"{i} + 1", (i, 1), str(i + 1), "sum") for i in range(4)]
PARTS = ("tokenizer", "config.json", "weights")
LORA = EngineConfig(lora=LoraConfig(rank=4))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def model(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "model"))


def job(model: Path, **sections: Any) -> JobConfig:
    data = DataConfig(train=("train.jsonl",))
    return JobConfig(**{"model": ModelConfig(path=str(model)), "data": data, **sections})


def saved_by(folder: Path, config: JobConfig, rows: Any = None) -> Checkpoint:
    """A checkpoint as the run with this configuration writes it."""
    digests = input_digests(config, {"data.train": PROMPTS, "data.val": PROMPTS} if rows is None else rows)
    manager = CheckpointManager(folder / "checkpoints")
    manager.prepare(1)
    state = {"config": yaml_without_secrets(config), "inputs": digests, "seed": 1}
    manager.publish(1, state=state)
    return manager.load(1)


def differences(before: Checkpoint, config: JobConfig, *, allows: bool = False, train: Any = PROMPTS) -> list[str]:
    digests = input_digests(config, {"data.train": train, "data.val": PROMPTS[:2]})
    return check_same_run(before, config, digests, allows_changes=allows)


def test_a_run_with_the_same_settings_and_inputs_is_the_same(model: Path, tmp_path: Path) -> None:
    before = saved_by(tmp_path, job(model))
    (line,) = differences(before, job(model))
    assert line.startswith("resume: data.val: "), "the held-out prompts are others, which is said"
    moved = Path(shutil.copytree(model, tmp_path / "moved"))
    lines = differences(before, job(moved, trainer=TrainerConfig(num_ranks=1, resume="auto")))
    assert [line.split(": ")[1] for line in lines] == ["model.path", "trainer.num_ranks", "data.val"]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"sampling": SamplingConfig(temperature=0.7)}, "sampling.temperature"),
        ({"actor": EngineConfig(optim=OptimConfig(lr=3e-5))}, "actor.optim.lr"),
        ({"reward": ScoringConfig(method="flexible")}, "reward.method"),
        ({"batch": BatchConfig(train_batch_size=8, mini_batch_size=8)}, "batch.train_batch_size"),
        ({"data": DataConfig(train=("train.jsonl",), system_prompt="Think.")}, "data.system_prompt"),
        ({"actor": LORA}, "actor.lora"),
        ({"actor": EngineConfig(router_replay="R3")}, "actor.router_replay"),
        ({"reward": ScoringConfig(terms={"a": RewardTermConfig(function="gsm8k")})}, "reward.terms"),
    ],
)
def test_settings_that_make_it_another_run_are_refused_by_key_or_said(
    model: Path, tmp_path: Path, sections: dict[str, Any], key: str
) -> None:
    before, after = saved_by(tmp_path, job(model)), job(model, **sections)
    with raises(InputError) as refused:
        differences(before, after)
    assert refused.value.field.startswith(key) or key in refused.value.problem
    assert "trainer.allow_changes=true" in refused.value.remedy
    assert any(key in line for line in differences(before, after, allows=True))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def nudge(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda folder: edit(folder, "tokenizer_config.json", lambda c: c.update(eos_token="<pad>")), "tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), "template"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "template"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(rope_theta=7.0)), "config.json"),
        (nudge, "weights"),
    ],
)
def test_another_model_in_the_same_folder_is_refused(model: Path, tmp_path: Path, change: Any, key: str) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    before = saved_by(tmp_path, job(model, actor=LORA))
    change(model)
    with raises(InputError, field=f"model.path {key}"):
        differences(before, job(model, actor=LORA))
    assert any(f"model.path {key}" in line for line in differences(before, job(model, actor=LORA), allows=True))


def test_weights_that_no_later_step_reads_may_differ(model: Path, tmp_path: Path) -> None:
    """Whole weights are in the checkpoint; after a warm start the base is its result. A reference reads them."""

    class WithReference(JobConfig):
        keeps_reference = True

    warm: dict[str, Any] = {"actor": LORA, "warm_start": SupervisedConfig(steps=2)}
    whole, warmed = saved_by(tmp_path / "a", job(model)), saved_by(tmp_path / "b", job(model, **warm))
    nudge(model)
    assert any("model.path weights" in line for line in differences(whole, job(model)))
    assert any("model.path weights" in line for line in differences(warmed, job(model, **warm)))
    with raises(InputError, field="data.train", value=None):
        check_same_run(whole, JobConfig(), input_digests(JobConfig(), {}), allows_changes=False)
    sections: dict[str, Any] = {"model": ModelConfig(path=str(model)), "data": DataConfig(train=("train.jsonl",))}
    with raises(InputError, field="model.path weights"):
        differences(whole, WithReference(**sections))


@pytest.mark.parametrize("train", [PROMPTS[::-1], [*PROMPTS[:3], replace(PROMPTS[3], ground_truth="5")]])
def test_other_rows_and_rows_in_another_order_are_refused(model: Path, tmp_path: Path, train: Any) -> None:
    before = saved_by(tmp_path, job(model))
    with raises(InputError, field="data.train"):
        differences(before, job(model), train=train)


def test_another_reward_model_in_the_same_folder_is_refused(model: Path, template: Path, tmp_path: Path) -> None:
    config = job(template, reward=ScoringConfig(model=str(model)))
    before = saved_by(tmp_path, config)
    nudge(model)
    with raises(InputError, field="reward.model weights"):
        differences(before, config)


def test_a_change_in_any_block_of_a_large_file_of_weights_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    file = tmp_path / "w"
    file.write_bytes(bytes(6400))
    seen = {identity._digest(identity._blocks(file))}
    for start in range(0, 6400, 100):
        content = bytearray(6400)
        content[start + 15] = 1
        file.write_bytes(content)
        seen.add(identity._digest(identity._blocks(file)))
    assert len(seen) == 65


def test_a_checkpoint_of_another_app_or_of_an_earlier_version(model: Path, tmp_path: Path) -> None:
    before = saved_by(tmp_path, job(model))
    other = replace(before, state={**before.state, "config": before.state["config"] + "critic:\n  compile: false\n"})
    with raises(InputError, field="critic", value="no such section"):
        differences(other, job(model))
    earlier = replace(before, state={name: value for name, value in before.state.items() if name != "inputs"})
    assert "no digests" in differences(earlier, job(model))[-1]


def test_the_plan_of_a_run_refuses_another_one_and_says_what_differs(model: Path, tmp_path: Path) -> None:
    """Before any process starts; the checkpoint gets the digests that the plan has."""
    outputs = tmp_path / "outputs"
    rows = {"data.train": PROMPTS}
    saved_by(outputs / "run_20260101_000000", job(model), rows)
    trainer = TrainerConfig(output_dir=str(outputs), experiment="run", resume="auto", seed=1)

    def plan(**sections: Any) -> JobPlan:
        placement = Placement(ranks=(Slot(),))
        return plan_run(job(model, **{"trainer": trainer, **sections}), placement, ["a line"], rows=rows)

    planned = plan()
    assert planned.resume_from is not None
    assert planned.digests.keys() == {"data.train", *(f"model.path {part}" for part in PARTS)}
    assert [line for line in planned.lines if "resume" not in line] == ["a line"]
    with raises(InputError, field="sampling.temperature", value=0.7, allowed="1.0, as in that run"):
        plan(sampling=SamplingConfig(temperature=0.7))
    lines = plan(sampling=SamplingConfig(temperature=0.7), trainer=replace(trainer, allow_changes=True)).lines
    assert "resume: sampling.temperature: 1.0 in the checkpoint, 0.7 here" in lines


def run_of(folder: Path, name: str, begun: float, step: int) -> None:
    manager = CheckpointManager(folder / name / "checkpoints")
    manager.prepare(step)
    manager.publish(step, state={"seed": 1})
    state = StateFile(folder / name / "run.json", app="", num_steps=9)
    state.close(None)
    edit(folder / name, "run.json", lambda c: c.update(begun=begun))


def test_the_newest_run_is_the_newest_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in Asia/Tokyo, whose name has its local time, then one in UTC."""
    now = time.time()
    run_of(tmp_path, f"run_{time.strftime('%Y%m%d_%H%M%S', time.gmtime(now + 9 * 3600))}", now, 4)
    run_of(tmp_path, f"run_{time.strftime('%Y%m%d_%H%M%S', time.gmtime(now + 60))}", now + 60, 8)
    trainer = TrainerConfig(output_dir=str(tmp_path), experiment="run", resume="auto")
    newest = find_checkpoint(trainer)
    assert newest is not None
    assert newest.step == 8
    monkeypatch.setattr(time, "time", lambda: now - 3600)  # the clock was set back
    assert create_run_folder(trainer, newest).name > newest.path.parents[1].name


@pytest.mark.parametrize("during_the_load", [False, True])
def test_a_checkpoint_that_is_gone_is_named(model: Path, tmp_path: Path, during_the_load: bool) -> None:
    before = saved_by(tmp_path, job(model))
    if not during_the_load:
        shutil.rmtree(before.path)
    else:
        (before.path / "actor").mkdir(exist_ok=True)

    def load(folder: str) -> None:
        shutil.rmtree(before.path)
        Path(folder, "weights").read_bytes()

    actor: Any = SimpleNamespace(describe=dict, load=load)
    with raises(InputError, field="trainer.resume_from"):
        RunCheckpoints(tmp_path, TrainerConfig(), [], roles={"actor": actor}, parts={}, config="").load(before)
