"""docs/from-verl.md: everything that it names here exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.bench.config import SixCaseConfig, StageGateConfig
from apps.dpo.config import DpoConfig
from apps.evaluate.config import EvaluateConfig
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.sft.config import SftConfig
from rl_runtime.peer_keys import PEER_KEYS
from run_kit import ConfigError, load_config
from run_kit.config.schema import all_paths

REPO = Path(__file__).resolve().parents[1]
DOCUMENT = REPO / "docs" / "from-verl.md"
APPS: dict[str, type] = {"ppo": PpoConfig, "grpo": GrpoConfig, "sft": SftConfig, "evaluate": EvaluateConfig}
BENCHMARKS: dict[str, type] = {"six_case": SixCaseConfig, "stage_gate": StageGateConfig}


def rows() -> list[tuple[str, str, str]]:
    """The three cells of every row of every table."""
    lines = [
        line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")
    ]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [(row[0], row[1], row[2]) for row in cells if row[0] != "theirs"]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def ours() -> Iterator[str]:
    for _, here, _ in rows():
        named = code(here)
        assert named or here == "—", here
        yield from named


def loads(config: type, *arguments: str, app: str = "") -> None:
    named = [argument.partition("=") for argument in arguments]
    presets = REPO / "apps" / app / "presets"
    files = [presets / f"{value}.yaml" for key, _, value in named if key == "preset"]
    files += [presets / "overlays" / f"{value}.yaml" for key, _, value in named if key == "overlay"]
    values = [argument for argument in arguments if argument.partition("=")[0] not in ("preset", "overlay")]
    load_config(config, presets=files, overrides=values)


def test_hints_name_keys_that_exist() -> None:
    known = {*all_paths(PpoConfig), *all_paths(SftConfig)}
    assert {key for keys in PEER_KEYS.values() for key in keys} - known <= {
        key.replace("actor.", "engine.", 1)
        for key in known  # the engine of supervised apps
    }
    assert not PEER_KEYS.keys() & {key for key in known if "." not in key}


@pytest.mark.parametrize(
    ("config", "theirs", "ours"),
    [
        (GrpoConfig, "actor_rollout_ref.actor.router_replay.mode", "actor.router_replay"),
        (GrpoConfig, "actor_rollout_ref.rollout.enable_rollout_routing_replay", "actor.router_replay"),
        (EvaluateConfig, "num_generations", "sampling.n"),
        (GrpoConfig, "learning_rate", "actor.optim.lr"),
        (SftConfig, "learning_rate", "supervised.optim.lr"),
        (SftConfig, "num_train_epochs", "supervised.epochs"),
        (DpoConfig, "beta", "algorithm.beta"),
        (GrpoConfig, "batch_size", "batch.train_batch_size"),
        (SftConfig, "batch_size", "supervised.batch_size"),
        (GrpoConfig, "num_gpus", "trainer.num_ranks"),
        (GrpoConfig, "epochs", "trainer.total_training_steps"),
        (SftConfig, "epochs", "supervised.epochs"),
        (GrpoConfig, "seed", "trainer.seed"),
        (GrpoConfig, "tracking.wandb", "tracking.wandb_project"),
    ],
)
def test_a_key_of_trl_verl_or_openrlhf_names_ours(config: type, theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides=[f"{theirs}=1"])
    assert caught.value.field == theirs
    assert str(caught.value.remedy).startswith(f"nearest: {ours}")


def test_every_key_in_the_tables_names_ours() -> None:
    known = set(all_paths(PpoConfig)) | set(all_paths(GrpoConfig))
    wrong = {}
    for theirs, here, _ in rows():
        keys = {word.partition("=")[0] for text in code(here) for word in text.split()} & known
        config = GrpoConfig if "plinth grpo" in here else PpoConfig
        for name in code(theirs):
            if keys and name not in known and re.fullmatch(r"[a-z][a-z_.]+(?<!py)", name):
                with pytest.raises(ConfigError) as caught:
                    load_config(config, overrides=[f"{name}=1"])
                nearest = str(caught.value.remedy).removeprefix("nearest: ").split(", ")
                if not any(key.startswith(one) for key in keys for one in nearest):
                    wrong[name] = (nearest, keys)
    assert wrong == {}


@pytest.mark.parametrize(
    "text", sorted({text for text in ours() if re.match("plinth (grpo|ppo|sft|evaluate|bench) ", text)})
)
def test_every_command_of_the_page_loads(text: str) -> None:
    app, *arguments = text.removeprefix("plinth ").split()
    if app == "bench":
        loads(BENCHMARKS[arguments[0]], *arguments[1:])
    else:
        loads(APPS[app], *arguments, app=app)


def test_named_keys_exist_and_accept_the_values_shown() -> None:
    keys = [text for text in ours() if not text.startswith("plinth ")]
    known = set(all_paths(PpoConfig))
    assert [text for text in keys if text.partition("=")[0] not in known] == []
    values = dict.fromkeys(text for text in keys if "=" in text)
    del values["reward.model=FOLDER"]  # excludes reward.function
    loads(PpoConfig, *values)
    loads(PpoConfig, "reward.model=FOLDER")
