"""The measurements of `benchmarks.shared_prefix.run`, in one process: batches, an engine, times and memory."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_model import CONFIGS, model_config
from benchmarks.runs import free_port
from benchmarks.shared_prefix.parts import profiled
from ds_engine import (
    EngineConfig,
    EngineError,
    LoraConfig,
    LossOutput,
    ZeroConfig,
    ZeroEngine,
    init_distributed,
)
from ds_engine.model import prefix_tree
from ds_engine.model.attention import (
    ATTENTION_NAME,
    choose_kernel,
    packed_attention,
    packed_layout,
    register_packed_attention,
)
from ds_engine.model.packed_model import mark_way
from rl_core import Batch, linear_log_prob, pack, plan_micro_batches

Result = TypeVar("Result")
Record = dict[str, Any]
SAMPLES = 8
"""Samples of each prompt."""
CASES = {"W": (248, 512), "1k": (1024, 512), "4k": (4096, 512), "16k": (16384, 512)}
"""Tokens of a prompt and of each response."""
KINDS = ("unshared", "shared")
MEMORY_KINDS = ("unshared", "unshared, one sample", "shared")
"""Contents of a micro batch: all samples of a prompt without sharing, one sample, or all samples with sharing."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, how it is trained, and sizes of its batches."""

    groups: dict[str, int]
    """Prompts of each case."""
    lora: LoraConfig | None = None
    token_budget: int = 32768
    """Computed tokens of a micro batch."""
    scale: int = 1
    """Divides the tokens of prompts and responses."""

    def lengths(self, case: str) -> tuple[int, int]:
        """Tokens of a prompt and of a response."""
        prompt, response = CASES[case]
        return prompt // self.scale, response // self.scale


SETUPS = {
    "qwen3-0.6b": Setup(groups={"W": 32, "1k": 16, "4k": 8, "16k": 1}),
    "qwen2-7b": Setup(groups={"W": 8, "1k": 4, "4k": 2, "16k": 1}, lora=LoraConfig(rank=32)),
    "qwen3-tiny": Setup(groups={"W": 4, "1k": 2, "4k": 1, "16k": 1}, token_budget=2048, scale=16),
}
MEMORY_SHARE = 0.97
"""Share of the GPU's memory that torch may take; kernels and libraries need some that torch cannot free for them."""
CPU_TOKENS = 4096
"""Tokens of a micro batch that "fit" on the CPU, so that the search for the longest prompt can be tried there."""


def random_batch(groups: int, prompt: int, response: int, vocab: int) -> Batch:
    """`groups` random prompts of `prompt` tokens, each with `SAMPLES` random responses."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(vocab, size=(groups, prompt)).repeat(SAMPLES, axis=0)
    return pack(list(prompts), list(draw.integers(vocab, size=(len(prompts), response))))


def micro_batches(batch: Batch, token_budget: int, *, shared: bool) -> tuple[list[Batch], Tensor]:
    """Micro batches of samples, or of whole groups whose prompts are computed once, within the budget of computed
    tokens; and the places of their targets among those of `batch`."""
    size = SAMPLES if shared else 1
    prompts_S = batch.seq_lens_S - batch.response_lens_S
    lengths = batch.seq_lens_S.view(-1, size).sum(1) - (size - 1) * prompts_S[::size]
    plan = plan_micro_batches(lengths.tolist(), num_ranks=1, token_budget=token_budget)
    chosen = [[size * unit + k for unit in units for k in range(size)] for units in plan.assignment[0]]
    parts = [batch.select(samples) for samples in chosen]
    places_K = batch.target_places([sample for samples in chosen for sample in samples])
    return [part.with_prefixes() for part in parts] if shared else parts, places_K


class Trainer:
    """An engine at ZeRO-2 with random weights, built when it is needed first."""

    def __init__(self, model: str, setup: Setup, device: torch.device) -> None:
        self.model, self.setup, self.device = model, setup, device
        self.vocab: int = CONFIGS[model]["vocab_size"]
        self.is_on_gpu = device.type == "cuda"
        self._engine: ZeroEngine | None = None

    @property
    def engine(self) -> ZeroEngine:
        if self._engine is None:
            self._engine = self._build()
        return self._engine

    def _build(self) -> ZeroEngine:
        from transformers import AutoModelForCausalLM

        register_packed_attention()
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if self.is_on_gpu else "float32"
        torch.manual_seed(0)
        with self.device:
            module = AutoModelForCausalLM.from_config(
                model_config(self.model), dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
            )
        mark_way(module, rows=False, shares_prefixes=True)  # as loading from a folder does, after its check
        config = EngineConfig(
            zero=ZeroConfig(stage=2),
            lora=self.setup.lora,
            dtype=dtype,
            compile=self.is_on_gpu,
            keep_probabilities=self.is_on_gpu,
        )
        return ZeroEngine(module, config, log_prob_fn=linear_log_prob, device=self.device)

    def close(self) -> None:
        """Frees the engine's memory."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        torch._dynamo.reset()
        free_memory()

    def log_probs(self, batches: list[Batch]) -> Tensor:
        """[K] of all micro batches in order."""
        return torch.cat([output.log_probs_K for output in self.engine.log_probs(batches)])

    def update(self, batches: list[Batch]) -> None:
        """Forward, backward and AdamW's step."""
        share = 1 / sum(batch.num_targets for batch in batches)

        def step() -> None:
            self.engine.train_mini_batch(batches, lambda out, _: LossOutput(loss=-out.log_probs_K.sum() * share))

        try:
            step()
        except EngineError:  # an update before this one ran out of memory after its first gradients
            self.close()
            step()

    def timed(self, call: Callable[[], Result], *, rounds: int, limit_s: float) -> tuple[Result, Record]:
        """The last result, and the median seconds of `rounds` calls, or at least two that take `limit_s`."""
        seconds: list[float] = []
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats()
        while len(seconds) < rounds and (len(seconds) < 2 or sum(seconds) < limit_s):
            self.synchronize()
            start = time.perf_counter()
            result = call()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return result, {"seconds": statistics.median(seconds), "rounds": len(seconds), "peak_gib": self.peak_gib()}

    def synchronize(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def peak_gib(self) -> float | None:
        """The most memory that tensors had since the last reset of the statistics."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.is_on_gpu else None


def free_memory() -> None:
    """Returns the memory of dead tensors to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def unless_out_of_memory(call: Callable[[], Result]) -> Result | None:
    """The result of the call; None if the GPU's memory did not suffice, of which nothing is kept."""
    try:
        return call()
    except torch.OutOfMemoryError:
        pass  # the error keeps every tensor of the call until this block ends
    free_memory()
    return None


def time_case(trainer: Trainer, case: str, *, rounds: int, limit_s: float) -> Iterator[Record]:
    """Log-probs, then updates, each without and with shared prefixes; the log-probs have the same weights."""
    setup = trainer.setup
    prompt, response = setup.lengths(case)
    batch = random_batch(setup.groups[case], prompt, response, trainer.vocab)
    plans = {kind: micro_batches(batch, setup.token_budget, shared=kind == "shared") for kind in KINDS}
    sizes = {
        "prompt": prompt,
        "response": response,
        "samples": batch.num_sequences,
        "sample_tokens": batch.num_tokens,
        "token_budget": setup.token_budget,
    }

    def measured(name: str, batches: list[Batch]) -> tuple[Tensor | None, Record]:
        call: Callable[[list[Batch]], Tensor | None] = getattr(trainer, name)
        call(batches[:1] + batches[1:][-1:])  # compiles
        return trainer.timed(partial(call, batches), rounds=rounds, limit_s=limit_s)

    for name in ("log_probs", "update"):
        record: Record = {"pass": name, **sizes}
        log_probs: dict[str, Tensor] = {}
        for kind, (batches, places_K) in plans.items():
            output_K, times = unless_out_of_memory(partial(measured, name, batches)) or (None, {"out_of_memory": True})
            record[kind] = {
                "computed_tokens": sum(part.num_computed_tokens for part in batches),
                "micro_batches": len(batches),
                **times,
            }
            if output_K is not None:
                log_probs[kind] = torch.empty_like(output_K).index_copy_(0, places_K, output_K)
        if all("seconds" in record[kind] for kind in KINDS):
            record["ratio"] = record["unshared"]["seconds"] / record["shared"]["seconds"]
        if len(log_probs) == len(KINDS):
            difference_K = (log_probs["unshared"] - log_probs["shared"]).abs()
            record["difference"] = {"mean": float(difference_K.mean()), "max": float(difference_K.max())}
        yield record


def parts_of_update(trainer: Trainer, case: str) -> Iterator[Record]:
    """Milliseconds of the GPU in each part of an update without and with shared prefixes."""
    setup = trainer.setup
    batch = random_batch(setup.groups[case], *setup.lengths(case), trainer.vocab)
    for kind in KINDS:
        batches, _ = micro_batches(batch, setup.token_budget, shared=kind == "shared")
        trainer.update(batches[:1] + batches[1:][-1:])
        parts, kernels = profiled(partial(trainer.update, batches))
        tokens = sum(part.num_computed_tokens for part in batches)
        yield {"pass": "parts", "case": case, "kind": kind, "computed_tokens": tokens, **parts, "kernels": kernels}


# -------------------------------------------------------------------- memory


def longest_prompt(
    peak_of: Callable[[int], float | None], *, capacity: float, first: int, most: int, limit_s: float
) -> tuple[int, int | None]:
    """The longest prompt that trained (0: none did), and the shortest that did not (None: all that were tried did).

    They differ by at most 2% of the longest or an eighth of `first`, unless `limit_s` ends the search. A straight line
    through the last two peaks proposes the next length; where it lies outside of both, their middle is tried.

    Args:
        peak_of: bytes that a prompt of this length takes at its peak; None if they are not there.
        capacity: bytes that are there at most.
        first: the first length.
        most: no longer prompt is tried.
    """
    end = time.monotonic() + limit_s
    fits, fails, guess = 0, most + 1, min(first, most)
    peaks: dict[int, float] = {}
    while fails - fits > (close := max(1, first // 8, fits // 50)) and (time.monotonic() < end or not fits):
        peak = peak_of(guess)
        if peak is None:
            fails, capacity = guess, 0.98 * capacity
        else:
            fits, peaks[guess] = guess, peak
        line = most
        if len(peaks) > 1:
            (x, low), (y, high) = list(peaks.items())[-2:]
            line = int(min(most, x + max(0.0, capacity - low) * (y - x) / (high - low))) if high > low else most
        if fails > most:
            guess = min(max(line, fits + close), 4 * fits, most)
        else:
            guess = line if fits + close <= line < fails else (fits + fails) // 2
    return fits, fails if fails <= most else None


def search_memory(trainer: Trainer, kind: str, *, most: int, limit_s: float) -> Record:
    """The longest prompt with which an update of one group of samples fits on the GPU."""
    setup = trainer.setup
    response = CASES["W"][1] // setup.scale
    total = torch.cuda.get_device_properties(0).total_memory if trainer.is_on_gpu else 0
    capacity = MEMORY_SHARE * total if trainer.is_on_gpu else float(CPU_TOKENS)
    record: Record = {"pass": "memory", "kind": kind, "response": response, "attempts": 0}

    def peak_of(prompt: int) -> float | None:
        record["attempts"] += 1
        batch = random_batch(1, prompt, response, trainer.vocab)
        if kind == "unshared, one sample":  # two of its micro batches: the first leaves gradients, the others repeat it
            batches = [batch.select([0]), batch.select([1])]
        else:
            batches = [batch.with_prefixes() if kind == "shared" else batch]
        tokens = batches[0].num_computed_tokens

        def attempt() -> float:
            if not trainer.is_on_gpu and tokens > CPU_TOKENS:
                raise torch.OutOfMemoryError
            if trainer.is_on_gpu:
                torch.cuda.reset_peak_memory_stats()
            trainer.update(batches)
            trainer.synchronize()
            return torch.cuda.max_memory_allocated() if trainer.is_on_gpu else float(tokens)

        free_memory()
        peak = unless_out_of_memory(attempt)
        if peak is not None:
            record.update(computed_tokens=tokens, peak_gib=trainer.peak_gib())
        return peak

    first, most = 2048 // setup.scale, most // setup.scale
    trained, failed = longest_prompt(peak_of, capacity=0.99 * capacity, first=first, most=most, limit_s=limit_s)
    return record | {"longest_prompt": trained, "too_long": failed}


# ----------------------------------------------------------------- attention


def equal_work(groups: int, prompt: int, response: int) -> list[int]:
    """Lengths of separate sequences with as many tokens, and nearly as many pairs of query and key, as the groups.

    So packed attention of these sequences costs what a tree's costs without reading the keys and values of a path.
    """
    tokens = groups * (prompt + SAMPLES * response)
    pairs = groups * (prompt**2 / 2 + SAMPLES * (response * prompt + response**2 / 2))
    count = max(1, round(tokens**2 / (2 * pairs)))
    return [tokens // count + (index < tokens % count) for index in range(count)]


def time_attention(trainer: Trainer) -> Iterator[Record]:
    """Attention of a micro batch of each case: trees in both ways, equal work without a tree, whole samples."""
    setup = trainer.setup
    for case in ("W", "1k", "4k"):
        prompt, response = setup.lengths(case)
        groups = max(1, setup.token_budget // (prompt + SAMPLES * response))
        responses = [response] * groups * SAMPLES
        parents = [-1] * groups + [group for group in range(groups) for _ in range(SAMPLES)]
        for kind, limit in (("shared", None), ("in place", 0.0), ("gathered", 1e9)):
            names = ("FORWARD_ROWS", "BACKWARD_ROWS", "MOST_PATH_ROWS")
            limits: dict[str, Any] = dict.fromkeys(names, limit)
            with patch.multiple(prefix_tree, **limits) if limit is not None else nullcontext():
                yield {"case": case, **time_layout(trainer, kind, [prompt] * groups + responses, parents)}
        yield {"case": case, **time_layout(trainer, "equal work", equal_work(groups, prompt, response))}
        yield {"case": case, **time_layout(trainer, "unshared", [prompt + response] * groups * SAMPLES)}


def time_layout(trainer: Trainer, kind: str, lengths: list[int], parents: list[int] | None = None) -> Record:
    """Attention of random queries, keys and values over sequences, or nodes, of these lengths."""
    device, tokens = trainer.device, sum(lengths)
    dtype = torch.bfloat16 if trainer.is_on_gpu else torch.float32
    kernel = choose_kernel("auto", device_type=device.type, dtype=dtype)
    layout = packed_layout(lengths, device=device, kernel=kernel, parents=parents, keeps_paths=True)
    fields = CONFIGS[trainer.model]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_dim = fields.get("head_dim", fields["hidden_size"] // heads)
    rows = (torch.randn(1, tokens, n, head_dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads, heads))
    q, k, v, grad = (row.transpose(1, 2).requires_grad_() for row in rows)

    def forward() -> Tensor:
        return packed_attention(None, q, k, v, None, packing=layout)[0]

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad.transpose(1, 2))

    both()
    forward_s, both_s = (device_seconds(trainer, call) for call in (forward, both))
    return {
        "pass": "attention",
        "kind": kind,
        "kernel": kernel,
        "computed_tokens": tokens,
        "sequences": len(lengths),
        "forward_ms": 1000 * forward_s,
        "forward_backward_ms": 1000 * both_s,
    }


def device_seconds(trainer: Trainer, call: Callable[[], object], *, rounds: int = 10) -> float:
    """Median of the seconds between events of the GPU before and after each call."""
    if not trainer.is_on_gpu:
        return float(trainer.timed(call, rounds=2, limit_s=0)[1]["seconds"])
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda._sleep(200_000_000)  # a tenth of a second, in which the host launches all calls: no gaps between kernels
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1000


# ---------------------------------------------------------------------- jobs


def jobs_of(cases: list[str], *, memory: bool, attention: bool, parts: bool) -> list[str]:
    """Names of a model's jobs, in the order in which they run."""
    timed = [job for case in cases for job in (case, f"parts: {case}")[: 1 + parts]]
    return ["attention"] * attention + timed + [f"memory: {kind}" for kind in MEMORY_KINDS] * memory


def run_jobs(
    model: str,
    jobs: list[str],
    *,
    cpu: bool,
    token_budget: int | None = None,
    rounds: int,
    limit_s: float,
    memory_s: float,
    most: int,
) -> Iterator[Record]:
    """Records of the jobs as they are measured; after each job one with its seconds."""
    device = torch.device("cpu") if cpu else torch.device("cuda", 0)
    init_distributed(0, 1, "127.0.0.1", free_port(), device)
    if not cpu:
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    setup = SETUPS[model]
    trainer = Trainer(model, replace(setup, token_budget=token_budget or setup.token_budget), device)
    names = ("torch", "transformers", "deepspeed", *(() if cpu else ("flash-attn-4",)))
    yield {
        "model": model,
        "device": "CPU" if cpu else torch.cuda.get_device_name(),
        "date": str(date.today()),
        "versions": {name: version(name) for name in names},
    }
    for job in jobs:
        start = time.perf_counter()
        records: Iterator[Record]
        if job == "attention":
            records = time_attention(trainer)
        elif job.startswith("parts: "):
            records = parts_of_update(trainer, job.removeprefix("parts: "))
        elif job.startswith("memory: "):
            records = iter([search_memory(trainer, job.removeprefix("memory: "), most=most, limit_s=memory_s)])
        else:
            records = time_case(trainer, job, rounds=rounds, limit_s=limit_s)
        for record in records:
            yield {"model": model, "job": job, **record}
        yield {"model": model, "job": job, "job_seconds": round(time.perf_counter() - start, 1)}
    trainer.close()
