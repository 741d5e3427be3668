"""Seconds of the same rollout with and without log-probs on one server, in turn.

`python -m benchmarks.rollout.without_log_probs FOLDER [--model qwen3-tiny]` writes a random model to FOLDER and starts
a server on it. Prints both medians and their ratio.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.random_model import CONFIGS, write_random_model
from rollout_vllm import Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup


def seconds(client: RolloutClient, requests: list[Request], sampling: SamplingConfig) -> float:
    """Seconds of one rollout; every sample has its length and what was asked for."""
    start = time.perf_counter()
    groups = client.generate_blocking(requests, sampling)
    took = time.perf_counter() - start
    for sample in (sample for group in groups for sample in group.samples):
        assert len(sample.response_ids) == sampling.response_tokens
        assert (sample.log_probs is not None) == client.config.log_probs
    assert all(group.complete for group in groups)
    return took


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = args.folder / args.model
    if not model.exists():
        write_random_model(args.model, model)
    config = RolloutConfig(max_model_len=64 + args.new_tokens, max_num_seqs=args.prompts * args.samples)
    sampling = SamplingConfig(n=args.samples, max_tokens=args.new_tokens, ignore_eos=True)
    requests = [Request(prompt_id=f"p{i}", prompt_ids=[3 + i] * 32, seed=i) for i in range(args.prompts)]
    with ServerGroup.launch(model, config, log_dir=args.folder / "log") as servers:
        servers.wait_ready()
        clients = {on: RolloutClient(servers.endpoints, replace(config, log_probs=on)) for on in (True, False)}
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(args.rounds + 1):
            for on, client in clients.items():
                took = seconds(client, requests, sampling)
                if number:  # the first round warms up
                    times[on].append(took)
        for client in clients.values():
            client.close()
    medians = {on: statistics.median(values) for on, values in times.items()}
    for on, name in ((True, "with"), (False, "without")):
        print(f"{name} log-probs: median {medians[on]:.2f} s of {', '.join(f'{t:.2f}' for t in times[on])}")
    print(f"ratio {medians[False] / medians[True]:.3f}")


if __name__ == "__main__":
    main()
