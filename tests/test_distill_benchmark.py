"""benchmarks/distill_step without TRL and without a GPU: the commands and how results are read."""

from pathlib import Path

from apps.distill.config import DistillConfig
from benchmarks.distill_step.compare import CASES, PHASES, app_row, settings, trl_row
from benchmarks.distill_step.trl_step import BATCH_SIZE, arguments
from benchmarks.distill_step.trl_step import settings as trl_settings
from run_kit import load_config


def test_app_and_peer_get_the_same_work(tmp_path: Path) -> None:
    peer = trl_settings(tmp_path, arguments().parse_args([str(tmp_path)]))
    assert peer["per_device_train_batch_size"] * peer["gradient_accumulation_steps"] == BATCH_SIZE
    for case in CASES:
        config = load_config(DistillConfig, overrides=settings(tmp_path, case, 3))
        assert config.batch.train_batch_size * config.sampling.n == BATCH_SIZE
        assert config.batch.mini_batch_size == BATCH_SIZE, "one update, as the peer"
        assert config.sampling.max_tokens == peer["max_completion_length"]
        assert (config.teacher.signal, config.teacher.divergence) == (case, "reverse")


def test_results_are_medians_after_the_first_step(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "full_20260101_000000"
    run.mkdir(parents=True)
    names = ["step", *(f"timing_s/{phase}" for phase in PHASES), "perf/max_memory_reserved_gb"]
    values = (("90", "7"), ("4", "8"), ("6", "8"))
    lines = [[str(step), *[seconds] * len(PHASES), gb] for step, (seconds, gb) in enumerate(values, 1)]
    (run / "metrics.tsv").write_text("".join("\t".join(line) + "\n" for line in [names, *lines]))
    assert app_row(tmp_path, "full") == "| app, full | 90.00 | 5.00 | 8.0 |" + " 5.00 |" * (len(PHASES) - 1)
    log = "x\ntrl step 1: 9.00 s, 1.5 GB reserved\ntrl step 2: 3.00 s, 2.5 GB reserved\n"
    assert trl_row(log) == "| TRL, full | 9.00 | 3.00 | 2.5 |" + " - |" * (len(PHASES) - 1)
    assert trl_row("nothing").startswith("| TRL, full | - | - | 0.0 |")
