"""Workload W on verl 0.9.1 (FSDP, vLLM, synchronous trainer); prints the seconds of each rollout step.

`python -m benchmarks.grpo_step.verl_step FOLDER --steps 4`; the folder is `benchmarks.grpo_step.workload`'s. verl's own
defaults but for the workload and the size of micro batches. On hosts without flash-attn 2, verl packs sequences with
torch's kernel; if no step ends so, it runs once more with padded sequences. Further `key=value` arguments go to verl.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_step.verl_plugin import ATTENTION
from benchmarks.grpo_step.workload import MINI_BATCH, NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, parity

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The prompts of W are texts; verl's are conversations."""
LOG = "verl.jsonl"
MODEL = "actor_rollout_ref.model"
ATTENTIONS: Mapping[str, Sequence[str]] = {
    "flash": (),
    "varlen": (f"+{MODEL}.override_config.attn_implementation={ATTENTION}",),
    "padded": (
        f"{MODEL}.use_remove_padding=false",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192",
    ),
}
"""verl's default, which is flash-attn 2 on packed rows; torch's kernel on packed rows; and, where neither runs, torch's
SDPA on padded rows with half as many tokens at once."""
CROSS_ENTROPY = "flash_attn.ops.triton.cross_entropy"
"""verl's log-probs; of flash-attn 2, but it needs Triton alone."""
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


def write_tokenizer(folder: Path) -> Path:
    """The model's tokenizer with the token that verl expects of every tokenizer of a Qwen model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    path = folder / "verl_tokenizer"
    tokenizer.save_pretrained(path)
    return path


def overrides(folder: Path, prompts: Path, tokenizer: Path, *, steps: int, gpus: int, attention: str) -> list[str]:
    """Keys of verl's ppo_trainer.yaml: the workload, and what verl has no default for."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS + 7}",
        f"data.max_response_length={NEW_TOKENS}",
        f"{MODEL}.path={folder / 'model'}",
        f"{MODEL}.tokenizer_path={tokenizer}",
        f'{MODEL}.custom_chat_template="{PLAIN_CHAT}"',
        f"{MODEL}.enable_gradient_checkpointing=false",
        f"{actor}.ppo_mini_batch_size={MINI_BATCH}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu=16384",
        f"{actor}.use_kl_loss=false",
        f"{rollout}.name=vllm",
        f"{rollout}.n={SAMPLES}",
        # verl samples only tokens that the tokenizer has: 1 of 259 ends a response, instead of 1 of 151,936 in W.
        f"{rollout}.ignore_eos=true",
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
        f"hydra.run.dir={folder / 'verl'}",
        "+ray_kwargs.ray_init.address=local",  # never the cluster of another run on this host
        "ray_kwargs.ray_init.num_cpus=32",  # verl's actors reserve more than a small host has, and then wait
        *ATTENTIONS[attention],
    ]


def is_installed(module: str) -> bool:
    """True if the module is there; it is not imported, its packages are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def chosen_attentions() -> list[str]:
    """Settings to try here, in order."""
    return ["flash"] if is_installed("flash_attn_2_cuda") else ["varlen", "padded"]


def environment(folder: Path) -> dict[str, str]:
    """For verl's processes: `verl_plugin` from this tree, whole tracebacks, and what vLLM says when it starts."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(paths),
        "VERL_USE_EXTERNAL_MODULES": "benchmarks.grpo_step.verl_plugin",
        "VERL_FILE_LOGGER_PATH": str(folder / LOG),
        "VLLM_LOGGING_LEVEL": "INFO",
        "HYDRA_FULL_ERROR": "1",
        "RAY_memory_monitor_refresh_ms": "0",  # it ends processes where a virtual machine's memory grows with its use
    }


def report(log: Path) -> list[str]:
    """One line per step of verl's JSON log, without a record that a time limit cut off."""
    lines = []
    for text in log.read_text().rpartition("\n")[0].splitlines():
        record = json.loads(text)
        times = {name.removeprefix("timing_s/"): value for name, value in record["data"].items() if "timing_s/" in name}
        if "step" in times:
            phases = ", ".join(f"{phase} {times[phase]:.2f}" for phase in PHASES if phase in times)
            lines.append(f"verl step {record['step']}: {times['step']:.2f} s ({phases})")
    return lines


def run(command: Sequence[str], folder: Path) -> tuple[int, int]:
    """Runs verl and prints its steps, also those before a time limit; its exit code and the number of steps."""
    log, code, steps = folder / LOG, 1, []
    log.unlink(missing_ok=True)
    try:
        code = subprocess.run(command, env=environment(folder), check=False).returncode
    finally:
        steps = report(log) if log.is_file() else []
        print("\n".join(steps), flush=True)
    return code, len(steps)


def main() -> None:
    """Runs verl on W."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--attention", choices=list(ATTENTIONS), help="default: what this host has")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    args, extra = parser.parse_known_args()
    folder = args.folder.absolute()
    files = write_prompts(folder), write_tokenizer(folder)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if not is_installed(CROSS_ENTROPY):
        print(f"no {CROSS_ENTROPY}: verl computes log-probs token by token, which is slow")
    code = 0
    for attention in [args.attention] if args.attention else chosen_attentions():
        keys = overrides(folder, *files, steps=args.steps, gpus=args.gpus, attention=attention)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *extra]
        if args.dry_run:
            print("\n".join(command))
            continue
        print(f"verl with attention {attention}", flush=True)
        code, num_steps = run(command, folder)
        print(f"verl with attention {attention}: exit code {code} after {num_steps} steps", flush=True)
        if num_steps:
            break
    sys.exit(code)


if __name__ == "__main__":
    main()
