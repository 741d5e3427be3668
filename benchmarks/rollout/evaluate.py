"""Speed of `plinth evaluate`: seconds and samples per second of pass@k of a model with random weights.

`python -m benchmarks.rollout.evaluate FOLDER` samples 16 responses to each of 256 prompts of workload W (297 prompt and
at most 512 new tokens) and scores them by W's reward, which is right by chance.
Further `section.key=value` arguments go to the app.
"""

import json
import sys
import time

from benchmarks.grpo_step.workload import NEW_TOKENS, PROMPT_TOKENS, write_prompts, write_workload
from benchmarks.runs import Run, leave, parser, run_folder, table_header, table_row, visible_gpus


def main() -> None:
    """Writes model and prompts, evaluates, and prints a table."""
    arguments = parser(__doc__, model="qwen3-0.6b", steps=0, timeout_s=500.0)
    arguments.add_argument("--num-prompts", type=int, default=256)
    arguments.add_argument("--samples", type=int, default=16, help="of a prompt")
    args, extra = arguments.parse_known_args()
    folder = args.folder
    write_workload(folder, model=args.model)
    (folder / "held_out").mkdir(exist_ok=True)
    write_prompts(folder / "held_out", args.num_prompts)
    keys = [
        f"model.path={folder}/model",
        f"data.val={folder}/held_out/train.parquet",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        "reward.function=benchmarks.grpo_step.workload:parity",
        f"sampling.n={args.samples}",
        f"sampling.max_tokens={NEW_TOKENS}",
        f"output_dir={folder}/outputs",
        *extra,
    ]
    command, earlier = [sys.executable, "-m", "apps.evaluate.main", *keys], run_folder(folder, "evaluate")
    run = Run("evaluate", command, folder / "evaluate.log", visible_gpus(1))
    began = time.monotonic()
    run.start()
    code = run.end(args.timeout)
    whole_s, made = time.monotonic() - began, run_folder(folder, "evaluate")
    print(run.report(code), flush=True)
    if made is not None and made != earlier:
        print(table_header(["case", "samples", "seconds", "samples/s", "seconds of the command", "GPU peak GiB"]))
        for model in json.loads((made / "summary.json").read_text())["models"]:
            num, seconds = model["num_samples"], model["seconds"]
            print(table_row([args.model, num, seconds, num / seconds, whole_s, run.peak]))
        print("\n".join(run.found(r"^[^\n]*pass@[^\n]*")), flush=True)
    leave([code])


if __name__ == "__main__":
    main()
