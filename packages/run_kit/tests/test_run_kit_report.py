import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import raises
from run_kit import MetricsTable, RunFolder, Tracker, TrackingConfig, write_comparison, write_report
from run_kit.errors import TrackingError
from run_kit.report.__main__ import main as report_command
from run_kit.report.data import MAX_ROLLOUTS, MAX_TEXT, read_run

NASTY = (
    "</script><script>document.title='owned'</script> <img src=x onerror=\"document.title='owned'\"> &amp; \u2028\ud800"
)


CONSTANT = {
    "rollout/log_prob_mismatch": 1e-4,
    "rollout/mismatch_ratio_p99": 1.5,
    "rollout/mismatch_ess": 0.75,
    "timing_s/step": 4.0,
    "timing_s/gen": 2.5,
    "timing_s/update": 1.25,
    "timing_s/update/backward": 1.0,
    "timing_s/other": 0.25,
    "memory/host_peak_gib": 2.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder.create(tmp_path_factory.mktemp("outputs"), "grpo")
    config = TrackingConfig(tensorboard=False, curves=False, report=False)
    with Tracker(run, config, num_steps=12) as tracker:
        tracker.log_validation(0, {"val/accuracy": 0.25})
        for step in range(1, 13):
            changing = {"critic/score/mean": step / 20, "perf/throughput": 1000.0 + step}
            tracker.log(step, {**changing, "actor/grad_norm": math.nan if step == 3 else 1.0, **CONSTANT})
            records = [
                {"prompt": f"what is {step} + {i}?", "response": f"{step + i}", "reward": i % 2} for i in range(8)
            ]
            tracker.log_rollouts(
                step, [*records[:7], {"prompt": NASTY, "response": NASTY, "reward": math.nan, "turns": [math.inf]}]
            )
        tracker.summary()
    write_report(run.path)
    return run


@pytest.fixture(scope="module")
def page(run: RunFolder) -> str:
    return run.report_file.read_text(encoding="utf-8")


def test_images_and_trees_of_samples_are_shown(page: str, run: RunFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(run.path, tmp_path / "run")
    (file,) = list(folder.glob("rollouts/*12.jsonl"))
    first, *others = file.read_text().split("\n")
    file.write_text("\n".join([json.dumps({**json.loads(first), "images": ["/a/b c.png"], "tree": "turn 0"}), *others]))
    seen = write_report(folder).read_text(encoding="utf-8")
    assert (["/a/b c.png"], "turn 0") in [(record.get("images"), record.get("tree")) for record in records_of(seen)]
    assert "if (r.tree)" in seen
    assert "img-src data: file:" in seen


def records_of(page: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(re.findall(r'id="records">(.*?)</script>', page, flags=re.DOTALL)[0])
    return records


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert "default-src 'none'" in page
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert all(target.startswith("#") for target in re.findall(r'(?:src|href)="([^"]*)"', outside))
    assert not [words for words in ("http://", "https://", "@import") if words in outside]
    assert not re.findall(r"url\((?!#)", outside)


def test_texts_of_the_model_cannot_break_the_page(page: str) -> None:
    assert page.count("</script>") == 2
    rewards = [record["reward"] for record in records_of(page) if record["prompt"] == NASTY]
    assert rewards
    assert rewards[0] is None


@pytest.fixture(scope="module")
def comparison(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    other = tmp_path_factory.mktemp("other") / "slower"
    shutil.copytree(run.path, other)
    (other / "metrics.tsv").write_text(run.metrics_file.read_text().replace("2.5\t", "3.5\t"))
    (other / "config.yaml").write_text("rollouts_per_step: 4\n" + "actor: {zero: {stage: 1}}\n")
    return write_comparison({"first <run>": run.path, "second & last": other}, other.parent / "page" / "c.html")


def test_ids_are_unique_and_links_lead_to_them(page: str, comparison: Path) -> None:
    for text in (page, comparison.read_text(encoding="utf-8")):
        markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
        ids = re.findall(r' id="([^"]*)"', markup)
        assert len(set(ids)) == len(ids)
        assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', markup)) <= {(one, "") for one in ids} | {
            ("", one) for one in ids
        }


def test_a_phase_of_few_steps_counts_for_all_of_them_and_its_name_breaks_at_underscores(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        table = MetricsTable(tmp_path / label / "metrics.tsv")
        for step in range(1, 5):
            validation = {"timing_s/all_prompts": 2.0} if step == 4 else {}
            table.log(step, {"timing_s/step": 3.0, "timing_s/gen": 1.0} | validation)
    alone = write_report(tmp_path / "a").read_text()
    both = write_comparison({"a": tmp_path / "a", "b": tmp_path / "b"}, tmp_path / "c.html").read_text()
    assert ">all_<wbr>prompts</td><td>2.00</td><td>0.500</td>" in alone
    assert ">all_<wbr>prompts</td><td>0.500</td><td>0.500</td>" in both
    assert "timing_<wbr>s/<wbr>all_<wbr>prompts" in alone


def test_reports_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "metrics.tsv").write_text("step\ta\n1\t1\n")
    assert report_command([str(one)]) == 0
    assert (one / "report.html").exists()
    assert report_command([str(one), str(two), f"output={tmp_path / 'both.html'}"]) == 0
    assert "both.html" in capsys.readouterr().out
    assert "one" in (tmp_path / "both.html").read_text()
    assert report_command([str(one), str(tmp_path / "none")]) == 2
    assert "no such run folder" in capsys.readouterr().err
    (two / "config.yaml").write_text("a: &a [*a]\n")
    assert report_command([str(one), str(two)]) == 2
    assert "config.yaml of two: " in capsys.readouterr().err
    for path in ("/no/where.html", "/dev/null/x.html", "a" * 5000, str(tmp_path)):
        assert report_command([str(one), f"output={path}"]) == 2
        assert capsys.readouterr().err.startswith(f"error: output={path}: ")
    assert report_command([]) == 2
    with raises(TrackingError, field="runs"):
        write_comparison({"a": one}, tmp_path / "x.html")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("metrics.tsv", None, ""),
        ("metrics.tsv", "a\tb\n", ""),
        ("metrics.tsv", "step\ta\n\udcff\t1\n", ", line 2"),
        ("rollouts/step_000001.jsonl", "\n[]\n", ", line 2"),
        ("rollouts/step_000001.jsonl", '{"step": 1, "prompt": "p", "reward": 1}\n', ", line 1"),
        ("rollouts/step_000001.jsonl", "\udcff\n", ", line 1"),
    ],
)
def test_invalid_run_folders(tmp_path: Path, name: str, text: str | None, line: str) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.tsv").write_text("step\ta\n1\t1\n")
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with raises(TrackingError, field=f"{tmp_path / name}{line}"):
        write_report(tmp_path)
    with raises(TrackingError, field="run", value=str(tmp_path / "none")):
        write_report(tmp_path / "none")


def test_pages_of_long_runs_stay_small(tmp_path: Path) -> None:
    (tmp_path / "metrics.tsv").write_text("step\ta\n1\t1\n")
    (tmp_path / "rollouts").mkdir()
    line = json.dumps({"step": 1, "prompt": "p" * 3 * MAX_TEXT, "response": "r", "reward": 1.0}) + "\n"
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(line * (MAX_ROLLOUTS + 50))
    data = read_run(tmp_path)
    assert len(data.rollouts) == MAX_ROLLOUTS
    assert data.num_rollouts == MAX_ROLLOUTS + 50
    assert len(data.rollouts[0]["prompt"]) < MAX_TEXT + 100
    assert f"{MAX_ROLLOUTS} of {MAX_ROLLOUTS + 50}" in write_report(tmp_path).read_text()
