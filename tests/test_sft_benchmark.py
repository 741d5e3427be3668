"""benchmarks/sft_step without TRL and without a GPU: the workload, the commands and how results are read."""

import json
from pathlib import Path

from apps.sft.config import SftConfig
from benchmarks.sft_step.compare import CASES, Step, app_steps, settings, summary, trl_steps
from benchmarks.sft_step.trl_step import arguments
from benchmarks.sft_step.trl_step import settings as trl_settings
from benchmarks.sft_step.workload import BATCH_SIZE, MAX_TOKENS, lengths, rows
from run_kit import load_config


def test_demonstrations_have_their_lengths_and_fit() -> None:
    sizes = lengths(500)
    assert all(prompt >= 1 and completion >= 1 and prompt + completion < MAX_TOKENS for prompt, completion in sizes)
    assert [(len(row["prompt"]), len(row["completion"])) for row in rows(20)] == sizes[:20]
    assert 400 < sorted(completion for _, completion in sizes)[250] < 600


def test_the_app_accepts_every_key_of_every_case(tmp_path: Path) -> None:
    for case in CASES.values():
        config = load_config(SftConfig, overrides=settings(tmp_path, case, 6))
        assert (config.supervised.num_steps(10_000), config.supervised.batch_size) == (6, BATCH_SIZE)
        assert (config.engine.lora is None) == (not case.app)
        chosen = trl_settings(tmp_path, arguments().parse_args([str(tmp_path), *case.trl]))
        assert chosen["per_device_train_batch_size"] * chosen["gradient_accumulation_steps"] == BATCH_SIZE


def test_results_are_medians_after_the_first_steps(tmp_path: Path) -> None:
    steps = [Step(tokens=100, seconds=9, peak_gb=1)] * 2 + [Step(tokens=100, seconds=0.5, peak_gb=2)] * 3
    assert summary("app", steps) == "| app | 200 | 0.50 | 19.5 | 2.0 |"
    assert summary("app", steps[:2]) == "| app | — | — | — | — |"
    lines = [json.dumps({"step": 1, "tokens": 7.0, "seconds": 2.0, "peak_gb": 1.5}), "{'loss': 1.0}", "noise"]
    assert trl_steps("\n".join(lines)) == [Step(tokens=7.0, seconds=2.0, peak_gb=1.5)]
    assert app_steps(tmp_path) == []
    run = tmp_path / "outputs" / "sft_step_20260101_000000"
    run.mkdir(parents=True)
    names = ("step", "perf/total_num_tokens", "timing_s/step", "perf/max_memory_reserved_gb")
    (run / "metrics.tsv").write_text("\t".join(names) + "\n1\t640\t0.25\t3.5\n")
    assert app_steps(tmp_path) == [Step(tokens=640, seconds=0.25, peak_gb=3.5)]
