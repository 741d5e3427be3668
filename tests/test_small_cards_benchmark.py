"""benchmarks/small_cards without GPUs: the commands that it gives to the apps."""

from pathlib import Path

from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from benchmarks.small_cards.run import PRESETS, ballast, command, phases
from run_kit import load_config

APPS = Path(__file__).resolve().parents[1] / "apps"


def test_the_apps_accept_every_key(tmp_path: Path) -> None:
    loaded = {}
    for part, kind in (("sft", SftConfig), ("grpo", GrpoConfig)):
        arguments = command(tmp_path, part, 3, 2, ["trainer.seed=5"])[3:]
        preset, overrides = arguments[0].removeprefix("preset="), arguments[1:]
        assert preset == PRESETS[part]
        loaded[part] = load_config(kind, presets=[APPS / part / "presets" / f"{preset}.yaml"], overrides=overrides)
    assert loaded["sft"].supervised.num_steps(10_000) == loaded["grpo"].trainer.total_training_steps == 3
    assert {config.trainer.seed for config in loaded.values()} == {5}


def test_phases_are_medians_after_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "sft_20260101_000000"
    folder.mkdir(parents=True)
    assert phases(tmp_path, "grpo") == {}
    (folder / "metrics.tsv").write_text("step\ttiming_s/step\n1\t9\n2\t1\n3\t2\n4\t3\n")
    assert phases(tmp_path, "sft") == {"step": 2.0}


def test_no_ballast_starts_no_process() -> None:
    with ballast(2, 0):
        pass
