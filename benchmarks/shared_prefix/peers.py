"""Updates of other trainers on the samples of `benchmarks.shared_prefix.run`, which starts this with `--peers`.

Rollouts are prepared; these samples need no padding, and no activation is recomputed.

* `TRL`: GRPOTrainer's own loss, backward pass, clipping and AdamW, with float32 weights and bfloat16 autocast (LoRA:
  bfloat16 weights) and torch's scaled_dot_product_attention.
* `Arctic`: arctic_platform.rl.zorro_train, which computes each prompt once (`pip install arctic_platform`; of it only
  this part is imported), with FlashAttention-4, Liger's norms, rotary embeddings and activations, weights and AdamW in
  bfloat16. Not with LoRA.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import trl_peer
from benchmarks.random_model import CONFIGS, model_config
from benchmarks.runs import free_port
from benchmarks.shared_prefix.measure import SAMPLES, SETUPS, Record, random_batch
from ds_engine import init_distributed


def sample_rows(model: str, case: str, device: torch.device) -> Tensor:
    """Token ids of the samples, one in each row."""
    setup = SETUPS[model]
    prompt, response = setup.lengths(case)
    batch = random_batch(setup.groups[case], prompt, response, CONFIGS[model]["vocab_size"])
    return batch.input_ids_T.view(-1, prompt + response).to(device)


def prepared(rows: Tensor, prompt: int, response: int, per_forward: int) -> list[dict[str, Any]]:
    """The batches that a step of TRL's trainer gets, one for each forward pass."""
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)
    parts = []
    for ids, weights in zip(rows.split(per_forward), advantages.split(per_forward), strict=True):
        prompts, completions = ids[:, :prompt], ids[:, prompt:]
        part = {"prompt_ids": prompts, "completion_ids": completions, "advantages": weights}
        part |= {"prompt_mask": torch.ones_like(prompts), "completion_mask": torch.ones_like(completions)}
        parts.append(part | {"num_items_in_batch": torch.tensor(rows.shape[0] * response, device=rows.device)})
    return parts


def trl(model: str, case: str, per_forward: int, folder: Path, *, rounds: int, cpu: bool) -> Record:
    """Median of the updates after the first."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    setup = SETUPS[model]
    samples = setup.groups[case] * SAMPLES
    device = torch.device("cpu" if cpu else "cuda:0")
    parts = prepared(sample_rows(model, case, device), *setup.lengths(case), per_forward)
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
    return summary(times[1:], per_forward, cpu=cpu)


def summary(times: list[float], per_forward: int, *, cpu: bool) -> Record:
    """The median of the times, and torch's peak."""
    peak = None if cpu else torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds": statistics.median(times),
        "rounds": len(times),
        "per_forward": per_forward,
        "peak_gib": peak,
    }


@cache
def arctic_patcher() -> Callable[..., Any]:
    """The class that patches a model of Qwen3; the package's own imports of servers and clients are left out."""
    spec = find_spec("arctic_platform")
    assert spec is not None, "arctic_platform is not installed"
    root = Path(next(iter(spec.submodule_search_locations or [])))
    for name in ("", ".rl", ".rl.utils", ".rl.zorro_train"):
        stub = ModuleType(f"arctic_platform{name}")
        stub.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[stub.__name__] = stub
    from arctic_platform.rl.zorro_train import qwen_model_patcher

    for module in [module for name, module in sys.modules.items() if name.startswith("arctic_platform.rl.zorro")]:
        if hasattr(module, "pr0"):
            setattr(module, "pr0", lambda *_: None)  # noqa: B010 (it prints tensors at each forward pass)
    patcher: Callable[..., Any] = qwen_model_patcher.Qwen3ModelOncePatcher
    return patcher


def arctic(model: str, case: str, per_forward: int, folder: Path, *, rounds: int, cpu: bool) -> Record:
    """Median of the updates after the first."""
    del folder
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    setup = SETUPS[model]
    assert setup.lora is None, "without LoRA"
    device = torch.device("cpu" if cpu else "cuda:0")
    rows = sample_rows(model, case, device)
    ALL_ATTENTION_FUNCTIONS.register("packed_varlen", varlen_on_cpu if cpu else varlen_flash4)
    if not cpu:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    with device:
        dtype = torch.float32 if cpu else torch.bfloat16
        config = model_config(model)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="packed_varlen")
    arctic_patcher()(
        module.train(),
        response_len=setup.lengths(case)[1],
        max_token_len=setup.token_budget,
        rollout_n=SAMPLES,
        temperature=1.0,
        logits_optimization="compute",
        world_size=1,
    ).patch_forward()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=not cpu)
    times: list[float] = []
    for _ in range(1 + rounds):
        synchronize(cpu)
        start = time.perf_counter()
        for ids in rows.split(per_forward):
            positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
            mask = torch.ones_like(ids)
            out = module(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
            (-out.logprobs.sum() / (rows.shape[0] * setup.lengths(case)[1])).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(cpu)
        times.append(time.perf_counter() - start)
    return summary(times[1:], per_forward, cpu=cpu)


def synchronize(cpu: bool) -> None:
    """Waits for the GPU."""
    if not cpu:
        torch.cuda.synchronize()


def varlen_flash4(_: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Attention of a packed row as transformers calls it, by FlashAttention-4."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        cu_seqlens_q=options["cu_seq_lens_q"].int(),
        cu_seqlens_k=options["cu_seq_lens_k"].int(),
        max_seqlen_q=int(options["max_length_q"]),
        max_seqlen_k=int(options["max_length_k"]),
        softmax_scale=options["scaling"],
        causal=True,
    )
    return (out[0] if isinstance(out, tuple) else out)[None], None


def varlen_on_cpu(_: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """The same, to try this on a CPU."""
    queries, keys = (options[f"cu_seq_lens_{x}"].diff().tolist() for x in "qk")
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *part,
            attn_mask=torch.ones(part[0].shape[2], part[1].shape[2], dtype=torch.bool).tril(
                part[1].shape[2] - part[0].shape[2]
            ),
            scale=options["scaling"],
            enable_gqa=True,
        )
        for part in zip(q.split(queries, 2), k.split(keys, 2), v.split(keys, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


PEERS: dict[str, Callable[..., Record]] = {"TRL": trl, "Arctic": arctic}


def record_of(peer: str, model: str, case: str, *, rounds: int, cpu: bool) -> Record:
    """With as many samples per forward pass as our micro batches have, or as many as fit."""
    setup = SETUPS[model]
    prompt, response = setup.lengths(case)
    samples = setup.groups[case] * SAMPLES
    if peer == "Arctic":  # whole groups
        limit = max(1, setup.token_budget // (prompt + SAMPLES * response))
        sizes = [SAMPLES * groups for groups in range(limit, 0, -1)]
    else:
        limit = max(1, setup.token_budget // (prompt + response))
        sizes = [size for size in range(limit, 0, -1) if samples % size == 0]
    record: Record = {"pass": "peer", "peer": peer, "case": case, "sample_tokens": samples * (prompt + response)}
    for size in sizes:
        try:
            with TemporaryDirectory() as folder:
                return record | PEERS[peer](model, case, size, Path(folder), rounds=rounds, cpu=cpu)
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
    if any(job.startswith("Arctic") for job in args.jobs):
        init_distributed(0, 1, "127.0.0.1", free_port(), torch.device("cpu" if args.cpu else "cuda:0"))
    for job in args.jobs:
        start = time.perf_counter()
        peer, case = job.split(": ")
        record = record_of(peer, args.models[0], case, rounds=args.rounds, cpu=args.cpu)
        print(json.dumps({"model": args.models[0], "job": job, **record}), flush=True)
        print(json.dumps({"model": args.models[0], "job": job, "job_seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
