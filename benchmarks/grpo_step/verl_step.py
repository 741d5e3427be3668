"""Workload W on verl 0.9.1 (FSDP, vLLM, synchronous trainer); prints the seconds of each rollout step.

`python -m benchmarks.grpo_step.verl_step FOLDER --steps 4`; the folder is `benchmarks.grpo_step.workload`'s. verl's own
defaults but for the workload and the size of micro batches. `--no-flash-attn` for hosts without flash-attn: padded
sequences and torch's attention.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompts of W are texts; verl's are conversations."""
LOG = "verl.jsonl"
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """W's reward, called by verl."""
    return parity(solution_str, None)


def write_prompts(folder: Path) -> Path:
    """W's prompts with verl's columns."""
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.parquet.read_table(folder / "train.parquet")["question"].to_pylist()
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "parity",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    path = folder / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def overrides(folder: Path, prompts: Path, *, steps: int, gpus: int, flash_attn: bool) -> list[str]:
    """Keys of verl's ppo_trainer.yaml: the workload, and what verl has no default for."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    keys = [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        f"data.max_response_length={NEW_TOKENS}",
        f"{model}.path={folder / 'model'}",
        f'{model}.custom_chat_template="{PLAIN_CHAT}"',
        f"{model}.enable_gradient_checkpointing=false",
        f"{actor}.ppo_mini_batch_size={MINI_BATCH}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu=16384",
        f"{actor}.use_kl_loss=false",
        f"{rollout}.name=vllm",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{rollout}.log_prob_max_token_len_per_gpu=16384",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'verl'}",
    ]
    if not flash_attn:
        keys += [f"{model}.use_remove_padding=false", f"+{model}.override_config.attn_implementation=sdpa"]
    return keys


def environment(folder: Path) -> dict[str, str]:
    """For verl's processes, which do not see an installed TRL: releases of 2026 lack a class that verl then imports."""
    hidden = folder / "without_trl"
    hidden.mkdir(exist_ok=True)
    (hidden / "sitecustomize.py").write_text('import sys\n\nsys.modules["trl"] = None\n')
    paths = [str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "VERL_FILE_LOGGER_PATH": str(folder / LOG)}


def report(log: Path) -> list[str]:
    """One line per step of verl's JSON log."""
    lines = []
    for text in log.read_text().splitlines():
        record = json.loads(text)
        times = {name.removeprefix("timing_s/"): value for name, value in record["data"].items() if "timing_s/" in name}
        if "step" in times:
            phases = ", ".join(f"{phase} {times[phase]:.2f}" for phase in PHASES if phase in times)
            lines.append(f"verl step {record['step']}: {times['step']:.2f} s ({phases})")
    return lines


def main() -> None:
    """Runs verl on W."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--no-flash-attn", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="print the command")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    keys = overrides(folder, write_prompts(folder), steps=args.steps, gpus=args.gpus, flash_attn=not args.no_flash_attn)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *extra]
    if args.dry_run:
        print("\n".join(command))
        return
    log = folder / LOG
    log.unlink(missing_ok=True)
    code = subprocess.run(command, env=environment(folder), check=False).returncode
    print("\n".join(report(log) if log.is_file() else ["verl wrote no metrics"]))
    sys.exit(code)


if __name__ == "__main__":
    main()
