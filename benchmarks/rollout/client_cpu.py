"""CPU use of the client process with many requests in flight: `python -m benchmarks.rollout.client_cpu`.

A dummy server answers `--concurrency` requests of 256+512 tokens after the time that a GPU would need at
`--tokens-per-s` (all requests together). Two rounds of requests are sent; the first one opens the connections.
"""

import argparse
import resource
import time

from benchmarks.rollout.dummy import dummy_server
from rollout_vllm import Endpoint, Request, RolloutClient, RolloutConfig, SamplingConfig


def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    config = RolloutConfig(max_samples_in_flight=args.concurrency)
    sampling = SamplingConfig(n=args.n, max_tokens=args.tokens)
    requests = [
        Request(prompt_id=str(i), prompt_ids=list(range(100000, 100256)), seed=i)
        for i in range(args.concurrency // args.n)
    ]
    with RolloutClient([Endpoint(url, "key", "policy")], config) as client:
        assert all(group.complete for group in client.generate_blocking(requests, sampling))
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        groups = [group for _ in range(args.rounds) for group in client.generate_blocking(requests, sampling)]
        wall = time.perf_counter() - wall
        after = resource.getrusage(resource.RUSAGE_SELF)
    assert all(group.complete for group in groups)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    num_tokens = sum(len(sample.response_ids) for group in groups for sample in group.samples)
    return {"tok/s": num_tokens / wall, "cores": cpu / wall, "us/token": 1e6 * cpu / num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1024, help="samples in flight")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8], help="samples per request")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--tokens-per-s", type=float, nargs="+", default=[21_000, 100_000, 0], help="0: answer immediately"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lists", action="store_true", help="answers of stock vLLM")
    args = parser.parse_args()
    print("| samples per request | server rate | measured tok/s | client cores | CPU us per token |")
    print("| --- | --- | --- | --- | --- |")
    for rate in args.tokens_per_s:
        for n in args.n:
            case = argparse.Namespace(**vars(args) | {"n": n})
            with dummy_server(
                tokens=args.tokens, prompt_tokens=256, tokens_per_s=rate / args.concurrency, lists=args.lists
            ) as url:
                measured = measure(url, case)
            name = f"{rate:.0f} tok/s" if rate else "immediate"
            print(
                f"| {n} | {name} | {measured['tok/s']:.0f} | {measured['cores']:.2f} | {measured['us/token']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
