"""benchmarks/small_cards without GPUs: the commands that it gives to the apps."""

from pathlib import Path

from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from benchmarks.small_cards.run import PRESETS, ballast, keys, phases
from run_kit import load_config

APPS = Path(__file__).resolve().parents[1] / "apps"


def test_the_apps_accept_every_key(tmp_path: Path) -> None:
    loaded = {}
    for part, kind in (("sft", SftConfig), ("grpo", GrpoConfig)):
        preset, *overrides = keys(tmp_path, part, 3, 2)
        assert preset == f"preset={PRESETS[part]}"
        file = APPS / part / "presets" / f"{PRESETS[part]}.yaml"
        loaded[part] = load_config(kind, presets=[file], overrides=overrides)
    assert loaded["sft"].supervised.num_steps(10_000) == loaded["grpo"].trainer.total_training_steps == 3


def test_phases_are_medians_after_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "sft_20260101_000000"
    folder.mkdir(parents=True)
    assert phases(tmp_path, "grpo") == {}
    (folder / "metrics.tsv").write_text("step\ttiming_s/step\n1\t9\n2\t1\n3\t2\n4\t3\n")
    assert phases(tmp_path, "sft") == {"step": 2.0}


def test_no_ballast_starts_no_process() -> None:
    with ballast(2, 0):
        pass
