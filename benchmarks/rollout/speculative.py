"""Drafts (`rollout.speculative=ngram`) on a pretrained model: `python -m benchmarks.rollout.speculative`.

Servers of SmolLM2-135M-Instruct share the device and start at the same time: without drafts (`none`, and `sync` one
step at a time, as vLLM schedules those of `ngram`), with drafts where they pay (`ngram`), in every step (`always`), and
in every step by vLLM's `ngram_gpu`, which needs no synchronous steps (`gpu`). They generate the same prompts in turns,
while the others are idle. A line for each round has seconds, tokens and the accepted drafts, so a run that is cut off
loses only the rest. The last lines are what the servers decided.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rl_data import DataConfig, load_prompts, load_tokenizer
from rl_data.tasks.fetched import fetch
from rollout_vllm import (
    Request,
    RolloutClient,
    RolloutConfig,
    RolloutError,
    SamplingConfig,
    ServerGroup,
    ServerStartError,
)
from rollout_vllm.servers.device import detect_device


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompts and lengths of a round."""

    data: str
    prompts: int
    samples: int
    tokens: int
    ignore_eos: bool = False


CASES = {
    "sums": Case(data="fetched:sums/train", prompts=64, samples=8, tokens=64),
    "words": Case(data="fetched:gsm_symbolic/train", prompts=64, samples=8, tokens=512),
    "long": Case(data="fetched:gsm_symbolic/train", prompts=64, samples=4, tokens=1024, ignore_eos=True),
    "few_long": Case(data="fetched:gsm_symbolic/train", prompts=8, samples=2, tokens=1024, ignore_eos=True),
}
CONTESTANTS = ("none", "sync", "ngram", "always", "gpu")
ALWAYS = {"PLINTH_ROLLOUT_DRAFTING": "0"}
"""Leaves out the servers' trials of steps with and without drafts (servers/fast/drafting.py)."""


def configs(args: argparse.Namespace) -> Mapping[str, RolloutConfig]:
    """The server of each contestant."""
    base = RolloutConfig(
        device=args.device,
        dtype="bfloat16",
        max_model_len=256 + max(CASES[name].tokens for name in args.cases),
        max_num_seqs=512 if args.device == "cuda" else 16,
        gpu_memory_utilization=0.2,
        kv_cache_gib=16.0 if args.device == "cuda" else 0.5,
        startup_timeout_s=600.0,
    )
    drafting = replace(base, speculative="ngram", speculative_tokens=args.drafts)
    on_gpu = {
        "method": "ngram_gpu",
        "num_speculative_tokens": args.drafts,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    return {
        "none": base,
        "sync": replace(base, extra_args=("--no-async-scheduling",)),
        "ngram": drafting,
        "always": drafting,
        "gpu": replace(base, extra_args=("--speculative-config", json.dumps(on_gpu))),
    }


def requests(args: argparse.Namespace, case: Case, model: Path) -> list[Request]:
    """The prompts of a case, without seeds: drafts change the tokens of a seed anyway."""
    prompts = load_prompts(
        [fetch(case.data)],
        load_tokenizer(model),
        DataConfig(max_prompt_length=256),
        max_prompts=max(1, case.prompts // args.fewer),
    )
    return [Request(prompt_id=prompt.id, prompt_ids=prompt.token_ids) for prompt in prompts]


def one_round(client: RolloutClient, asked: list[Request], sampling: SamplingConfig) -> dict[str, float]:
    """Seconds, tokens and drafts of one generation."""
    before, begin = client.metrics(), time.perf_counter()
    groups = client.generate_blocking(asked, sampling)
    seconds, after = time.perf_counter() - begin, client.metrics()
    assert all(group.complete for group in groups), next(group.failures for group in groups if group.failures)
    drafted, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in ("draft_tokens", "accepted_tokens"))
    tokens = sum(group.num_tokens for group in groups)
    return {"seconds": seconds, "tokens": tokens, "drafted": drafted, "accepted": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=detect_device()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--drafts", type=int, default=3, help="per step and sequence")
    parser.add_argument("--rounds", type=int, default=3, help="after one of warm-up")
    parser.add_argument("--fewer", type=int, default=1, help="divides prompts and tokens, to try the script on a CPU")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; else they are not kept")
    args = parser.parse_args()
    begin, model = time.perf_counter(), fetch("fetched:smollm2")
    with ExitStack() as stack:
        folder = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen = {name: config for name, config in configs(args).items() if name in args.contestants}
        servers = {
            name: stack.enter_context(
                ServerGroup.launch(model, config, log_dir=folder / name, env=ALWAYS if name == "always" else {})
            )
            for name, config in chosen.items()
        }
        clients = {}
        for name, group in servers.items():
            try:
                group.wait_ready()
            except ServerStartError as error:
                print(f"{name}: {error}", flush=True)
                continue
            clients[name] = stack.enter_context(RolloutClient(group.endpoints, chosen[name]))
            print(f"{name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
        for case_name in args.cases:
            case = CASES[case_name]
            asked = requests(args, case, model)
            sampling = SamplingConfig(
                n=case.samples, max_tokens=max(8, case.tokens // args.fewer), ignore_eos=case.ignore_eos
            )
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
            for number in range(args.rounds + 1):
                for name, client in tuple(clients.items()):
                    try:
                        rounds[name].append(one_round(client, asked, sampling))
                    except (AssertionError, RolloutError) as error:  # the others go on
                        print(f"{name}: {error}", flush=True)
                        del clients[name]
                        continue
                    line = {"case": case_name, "contestant": name, "round": number, **rounds[name][-1]}
                    print(json.dumps(line), flush=True)
            print(table(case_name, rounds), flush=True)
        for name in servers:
            for log in (folder / name).glob("*.log"):
                lines = log.read_text(errors="replace").splitlines()
                print("\n".join(f"{name}: {line}" for line in lines if "speculative decoding:" in line), flush=True)


def table(case: str, rounds: Mapping[str, list[dict[str, float]]]) -> str:
    """Medians of the rounds after the first, a row for each contestant."""
    lines = [f"\n| {case} | s | tokens/s | tokens | drafts | accepted |", "| --- | --- | --- | --- | --- | --- |"]
    for name, measured in ((name, measured) for name, measured in rounds.items() if measured):
        kept = measured[1:] or measured
        seconds, tokens, drafted, accepted = (
            statistics.median(one[key] for one in kept) for key in ("seconds", "tokens", "drafted", "accepted")
        )
        speed = statistics.median(one["tokens"] / one["seconds"] for one in kept)
        share = f"{accepted / drafted:.2f}" if drafted else "-"
        lines.append(f"| {name} | {seconds:.2f} | {speed:.0f} | {tokens:.0f} | {drafted:.0f} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
