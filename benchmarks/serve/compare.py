"""`plinth serve` with a program of the tinker SDK beside `plinth grpo`, on two GPUs of one host at the same time.

`python -m benchmarks.serve.compare FOLDER` runs workload W, `--kind sums` the preset `smollm2`. Needs the packages of
tests/extras/tinker.txt.
"""

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from benchmarks.grpo_step.workload import settings, write_workload
from benchmarks.runs import Run, Steps, app, free_port, leave, parser, run_folder, table_header, table_row, visible_gpus

KEY = "tml-benchmark-0123456789"


def served(run: Run, timeout_s: float) -> str:
    """The URL that a starting server prints; empty if it ended before."""
    limit = time.monotonic() + timeout_s
    while run.process and run.process.poll() is None and time.monotonic() < limit:
        if urls := run.matches(r"TINKER_BASE_URL=(\S+)"):
            return str(urls[0])
        time.sleep(0.5)
    return ""


def main() -> None:
    """Runs both and prints a table."""
    arguments = parser(__doc__, model="qwen3-0.6b", steps=7, timeout_s=300.0)
    arguments.add_argument("--kind", choices=("w", "sums"), default="w")
    args = arguments.parse_args()
    folder: Path = args.folder
    os.environ["TINKER_API_KEY"], os.environ["TINKER_TELEMETRY"] = KEY, "0"
    if args.kind == "w":
        write_workload(folder, model=args.model)
        model, train, val = str(folder / "model"), str(folder / "train.parquet"), ""
        keys, serve_keys = settings(folder, args.steps), ["rollout.max_model_len=816", "rollout.max_num_seqs=256"]
    else:
        from rl_data.tasks.fetched import fetch

        folder.mkdir(parents=True, exist_ok=True)
        model, train, val = (str(fetch(f"fetched:{name}")) for name in ("smollm2", "sums/train", "sums/val"))
        keys = ["preset=smollm2", f"trainer.total_training_steps={args.steps}", "trainer.test_freq=-1"]
        serve_keys = ["rollout.max_model_len=160", "rollout.max_num_seqs=512"]
    grpo = app(folder, "app", visible_gpus(1), keys)
    states = folder / "states"
    api = [f"model.path={model}", f"api.port={free_port()}", "api.full=true", f"api.states_dir={states}", *serve_keys]
    server = app(folder, "api", visible_gpus(1, first=1), api, kind="serve")
    server.signals = ((signal.SIGTERM, 60.0),)
    rows_file = folder / "api.json"
    loop = [sys.executable, "-m", "benchmarks.serve.rl_loop", args.kind, model, train, str(rows_file)]
    loop += ["--steps", str(args.steps), *(["--val", val] if val else [])]
    grpo.start()
    server.start()
    codes = []
    if url := served(server, args.timeout):
        os.environ["TINKER_BASE_URL"] = url
        client = Run("client", loop, folder / "client.log", "")
        client.start()
        codes.append(client.end(args.timeout))
        print(client.report(codes[0]))
    codes.append(grpo.end(args.timeout))
    print(grpo.report(codes[-1]), server.report(server.end(0)), sep="\n")
    rows = json.loads(rows_file.read_text()) if rows_file.is_file() else []
    steps, ours = [row for row in rows if "step" in row], Steps(run_folder(folder, "app"))
    print(table_header(["", "seconds a step (median after the first)", "mean score, last ten steps", "held out"]))
    held = [f"{float(value):.3f}" for value in grpo.matches(r"^held-out .*?accuracy ([\d.]+)")]
    score = ours.series("critic/score/mean")[-10:]
    print(
        table_row(
            ["plinth grpo", ours.median("timing_s/step"), statistics.fmean(score or [float("nan")]), " → ".join(held)]
        )
    )
    totals, scores = [row["total"] for row in steps[1:]], [row["score"] for row in steps[-10:]]
    held = [f"{row['val']:.3f}" for row in rows if "val" in row]
    median = statistics.median(totals) if totals else float("nan")
    print(table_row(["plinth serve", median, statistics.fmean(scores or [float("nan")]), " → ".join(held)]))
    leave(codes)


if __name__ == "__main__":
    main()
