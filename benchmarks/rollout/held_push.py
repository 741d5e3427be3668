"""Cost of a push of weights for the requests that are running: `python -m benchmarks.rollout.held_push --device cpu`.

One server generates; in the middle of every round weights are pushed, in one of five ways:

no push     for comparison
wait        the running requests finish first (`SyncConfig.running_requests`)
cut         the client cuts its requests, keeps their tokens and resumes each with a new request (`RolloutClient.pause`)
recompute   the server holds the requests and prefills their tokens again
keep        the server holds the requests, which keep their KV cache

The ways take turns. Weights are random and change by `--change` times their standard deviation per push. Log-prob
differences are those of tokens sampled after a push, to the pushed policy's own (a clean prefill in transformers).
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.random_model import CONFIGS, write_random_model
from rollout_vllm import Request, RolloutClient, RolloutConfig, Sample, SamplingConfig, ServerGroup
from weight_sync import ModuleSource, SyncConfig, WeightPusher, server_args, server_env

WAYS = ("no push", "wait", "cut", "recompute", "keep")


@dataclass
class Found:
    """Of one way, one value per round."""

    round_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    prefilled_again: list[int] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)


class Trainer:
    """A policy that changes by random numbers, and pushes itself."""

    def __init__(self, folder: Path, client: RolloutClient, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        self._client, self._args, self.version = client, args, 0

    def push(self, way: str) -> float:
        """Change the weights and push them. Returns the seconds during which the requests got no tokens."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += self._args.change * parameter.std().nan_to_num() * torch.randn_like(parameter)
        self.version += 1
        sync = SyncConfig(running_requests=way if way in ("keep", "recompute") else "wait")  # type: ignore[arg-type]
        with WeightPusher(ModuleSource(self.model), self._client.endpoints, sync, device=self._args.device) as pusher:
            begin = time.perf_counter()
            if way == "cut":
                self._client.run(self._client.pause(timeout_s=600))
            report = pusher.push(self.version)
            self._client.resume(self.version)
            held = time.perf_counter() - begin
        return held - report.pause_s if way == "wait" else held  # they generate while the pusher waits for them

    def difference(self, prompt: list[int], sample: Sample) -> float | None:
        """Mean absolute log-prob difference of the tokens after the push; None if there are none."""
        import torch

        if sample.versions[-1] != self.version or len(sample.version_spans) == 1:
            return None
        count = sample.version_spans[-1].num_tokens
        ids = torch.tensor([[*prompt, *sample.response_ids.tolist()]], device=self._args.device)
        with torch.no_grad():
            log_probs_TV = self.model(ids).logits[0, -count - 1 : -1].float().log_softmax(-1)
        own = torch.tensor(sample.log_probs, device=self._args.device)[-count:]
        return float((log_probs_TV.gather(1, ids[0, -count:, None])[:, 0] - own).abs().mean())


def one_round(client: RolloutClient, trainer: Trainer, way: str, number: int, args: argparse.Namespace) -> Any:
    """(seconds of the round, seconds held, tokens prefilled again, log-prob difference)"""
    prompts = [
        [1 + i % 250, 1 + number % 250, *[7 + i % 200] * (args.prompt - 2)] for i in range(args.samples // args.n)
    ]
    requests = [Request(prompt_id=str(i), prompt_ids=ids, seed=number * 1000 + i) for i, ids in enumerate(prompts)]
    sampling = SamplingConfig(n=args.n, max_tokens=args.tokens, ignore_eos=True)
    before, held = client.metrics()["generation_tokens"], 0.0
    begin = time.perf_counter()
    future = client.start(client.generate(requests, sampling))
    while client.metrics()["generation_tokens"] < before + args.samples * args.tokens * args.push_at:
        time.sleep(0.02)
    if way != "no push":
        held = trainer.push(way)
    groups = future.result()
    seconds = time.perf_counter() - begin
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == args.samples
    assert all(len(sample.response_ids) == args.tokens for sample in samples)
    mixed = [sample for sample in samples if len(sample.version_spans) > 1]
    computed = sum(args.prompt + sample.version_spans[0].num_tokens for sample in mixed)
    differences = [trainer.difference(prompts[int(sample.prompt_id)], sample) for sample in mixed[: args.check]]
    known = [each for each in differences if each is not None]
    return seconds, held, computed if way in ("cut", "recompute") else 0, known


def measure(client: RolloutClient, trainer: Trainer, args: argparse.Namespace) -> dict[str, Found]:
    measured: dict[str, Found] = defaultdict(Found)
    for number in range(-1, args.rounds):
        for index, way in enumerate(WAYS):
            seconds, held, lost, differences = one_round(client, trainer, way, 1 + number * len(WAYS) + index, args)
            if number >= 0:  # the first round warms up
                measured[way].round_s.append(seconds)
                measured[way].held_s.append(held)
                measured[way].prefilled_again.append(lost)
                measured[way].differences += differences
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-tiny")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--push-at", type=float, default=0.5, help="share of the tokens that are sampled by then")
    parser.add_argument("--change", type=float, default=1e-3)
    parser.add_argument("--check", type=int, default=4, help="samples per round whose log-probs are compared")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = RolloutConfig(
        max_model_len=args.prompt + args.tokens,
        control_routes=True,
        dtype="float32" if args.device == "cpu" else "bfloat16",
        startup_timeout_s=1200.0,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_model(args.model, folder / "model")
        servers = ServerGroup.launch(
            model,
            config,
            log_dir=folder,
            extra_args=server_args(),
            env=server_env(args.device),
        )
        with servers:
            servers.wait_ready()
            with RolloutClient(servers.endpoints, config) as client:
                measured = measure(client, Trainer(model, client, args), args)
    print(f"{args.model}, {args.samples} samples of {args.prompt}+{args.tokens} tokens, {args.rounds} rounds per way")
    print("| | round, median s | range s | requests held, median ms | prefilled again | log-prob difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, each in measured.items():
        spent = f"{statistics.median(each.round_s):.2f} | {min(each.round_s):.2f}-{max(each.round_s):.2f}"
        difference = f"{statistics.mean(each.differences):.1e}" if each.differences else ""
        lost = f"{statistics.median(each.prefilled_again):.0f} tokens"
        print(f"| {way} | {spent} | {1000 * statistics.median(each.held_s):.0f} | {lost} | {difference} |")


if __name__ == "__main__":
    main()
