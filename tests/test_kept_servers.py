"""Two runs of one command with trainer.keep_servers: the second continues in kept processes, with equal results."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.random_model import write_random_model
from plinth_testing import wait_until
from tests.run_folders import exact_metrics, only
from tests.test_grpo_end_to_end import write_verl_rows

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_the_second_run_of_a_command_starts_in_kept_processes(tmp_path: Path) -> None:
    model = write_random_model("qwen3-tiny", tmp_path / "model")
    write_verl_rows(tmp_path / "rows.parquet", 6, words=0)
    (tmp_path / "reward_of_length.py").write_text(
        "def score(response_text, prompt):\n    return len(response_text) / 64\n"
    )
    (tmp_path / "tmp").mkdir()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp"), "PLINTH_TEST_MARK": str(tmp_path)}
    command = [
        *(sys.executable, "-m", "apps.grpo.main", f"model.path={model}", f"data.train=[{tmp_path / 'rows.parquet'}]"),
        *("reward.function=reward_of_length:score", "data.max_prompt_length=64", "sampling.max_tokens=16"),
        *("batch.train_batch_size=4", "batch.mini_batch_size=2", "sampling.n=2", "actor.optim.lr=1e-3"),
        *("trainer.device=cpu", "trainer.num_ranks=1", "trainer.total_training_steps=2", "rollout.kv_cache_gib=0.1"),
        *("actor.dtype=float32", "rollout.dtype=float32", "rollout.deterministic=true", "tracking.curves=false"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.keep_servers=10"),
    ]

    def run(name: str, *arguments: str, code: int = 0) -> tuple[str, float]:
        """Output, and seconds until the run was ready."""
        begin, lines, ready_s = time.monotonic(), list[str](), 0.0
        arguments = (f"trainer.output_dir={tmp_path / name}", *arguments)
        full = [*command, *arguments]
        with subprocess.Popen(full, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as app:
            assert app.stdout is not None
            for line in app.stdout:
                lines.append(line)
                if line.startswith("ready after"):
                    ready_s = time.monotonic() - begin
        assert app.returncode == code, "".join(lines)
        return "".join(lines), ready_s

    def left() -> list[str]:
        """Processes of these runs."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PLINTH_TEST_MARK") == str(tmp_path):
                    mine.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return mine

    first, first_s = run("first")
    assert "no servers are kept yet" in first
    log = only((tmp_path / "first").glob("grpo_*")) / "servers" / "standby.log"
    wait_until(lambda: "ready since" in log.read_text(), timeout_s=120)
    second, second_s = run("second")
    print(f"seconds until ready: first {first_s:.1f}, second {second_s:.1f}")
    assert f"kept from {tmp_path / 'first'}" in second
    assert second_s < 0.6 * first_s
    runs = [only((tmp_path / name).glob("grpo_*")) for name in ("first", "second")]
    metrics = exact_metrics(runs[0])
    assert float(metrics["1"]["actor/grad_norm"]) > 0
    assert metrics == exact_metrics(runs[1])
    assert os.path.samefile(*(run / "servers" / "server_0.log" for run in runs))

    process = int(re.findall(r"process (\d+) keeps", second)[0])
    wait_until(lambda: "ready since" in (runs[1] / "servers" / "standby.log").read_text(), timeout_s=120)
    assert len(left()) > 3
    third, _ = run("third", "trainer.keep_servers=0", f"data.train=[{tmp_path / 'none.parquet'}]", code=2)
    assert "trainer.keep_servers: it is 0 in this run: the kept servers end" in third
    assert not psutil.pid_exists(process)
    wait_until(lambda: not left())
    assert not list((tmp_path / "tmp").glob("plinth-*/*"))
