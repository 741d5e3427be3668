"""Updates of TRL's GRPOTrainer on the samples of `benchmarks.shared_prefix.run`, which starts this with `--trl`.

Rollouts are prepared; these samples need no padding. Loss, backward pass, clipping and AdamW are its
own, with float32 weights and bfloat16 autocast (LoRA: bfloat16 weights); no activation is recomputed.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import trl_peer
from benchmarks.random_model import CONFIGS, model_config
from benchmarks.shared_prefix.measure import SAMPLES, SETUPS, Record, Setup, random_batch


def prepared(setup: Setup, case: str, vocab: int, per_forward: int, device: torch.device) -> list[dict[str, Any]]:
    """The batches that a step of TRL's trainer gets, one for each forward pass."""
    prompt, response = setup.lengths(case)
    batch = random_batch(setup.groups[case], prompt, response, vocab)
    rows = batch.input_ids_T.view(-1, prompt + response).to(device)
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).to(device)
    parts = []
    for ids, weights in zip(rows.split(per_forward), advantages.split(per_forward), strict=True):
        prompts, completions = ids[:, :prompt], ids[:, prompt:]
        part = {"prompt_ids": prompts, "completion_ids": completions, "advantages": weights}
        part |= {"prompt_mask": torch.ones_like(prompts), "completion_mask": torch.ones_like(completions)}
        parts.append(part | {"num_items_in_batch": torch.tensor(rows.shape[0] * response, device=device)})
    return parts


def seconds_of_updates(model: str, case: str, per_forward: int, folder: Path, *, rounds: int, cpu: bool) -> Record:
    """Median of the updates after the first."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    setup = SETUPS[model]
    samples = setup.groups[case] * SAMPLES
    device = torch.device("cpu" if cpu else "cuda:0")
    parts = prepared(setup, case, CONFIGS[model]["vocab_size"], per_forward, device)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = self.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(self.now() - self.start)

        def now(self) -> float:
            if not cpu:
                torch.cuda.synchronize()
            return time.perf_counter()

    class Prepared(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return parts[self._step % len(parts)]

    words = Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    config = GRPOConfig(
        **trl_peer.settings(folder, max_steps=1 + rounds, per_forward=per_forward, batch_size=samples, cpu=cpu),
        generation_batch_size=samples,
        num_generations=SAMPLES,
        max_completion_length=setup.lengths(case)[1],
        logging_strategy="no",
        gradient_checkpointing=False,
    )
    peft = None
    if setup.lora is not None:
        from peft import LoraConfig

        peft = LoraConfig(r=setup.lora.rank, lora_alpha=setup.lora.alpha, target_modules="all-linear")
    with device:
        dtype = torch.bfloat16 if peft else torch.float32
        module = AutoModelForCausalLM.from_config(model_config(model), dtype=dtype, attn_implementation="sdpa")
    trainer = Prepared(
        model=module,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * samples}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
        callbacks=[Clock()],
        peft_config=peft,
    )
    trainer.train()
    peak = None if cpu else torch.cuda.max_memory_allocated() / 2**30
    return {"seconds": statistics.median(times[1:]), "rounds": rounds, "per_forward": per_forward, "peak_gib": peak}


def records(model: str, case: str, *, rounds: int, cpu: bool) -> Record:
    """With as many samples per forward pass as our micro batches have, or as many as fit."""
    setup = SETUPS[model]
    samples = setup.groups[case] * SAMPLES
    limit = max(1, setup.token_budget // sum(setup.lengths(case)))
    sizes = [size for size in range(limit, 0, -1) if samples % size == 0]
    record: Record = {"pass": "TRL", "case": case, "sample_tokens": samples * sum(setup.lengths(case))}
    for size in sizes:
        try:
            with TemporaryDirectory() as folder:
                return record | seconds_of_updates(model, case, size, Path(folder), rounds=rounds, cpu=cpu)
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return record | {"out_of_memory": True}


def main() -> None:
    """Prints records as `benchmarks.shared_prefix.run` reads them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    args, _ = parser.parse_known_args()
    for job in args.jobs:
        start = time.perf_counter()
        record = records(args.models[0], job.removeprefix("TRL: "), rounds=args.rounds, cpu=args.cpu)
        print(json.dumps({"model": args.models[0], "job": job, **record}), flush=True)
        print(json.dumps({"model": args.models[0], "job": job, "job_seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
