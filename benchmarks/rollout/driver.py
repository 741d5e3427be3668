"""Work of the driver between the last token and the end of a generation: `python -m benchmarks.rollout.driver`.

Dummy servers answer the requests of workload W (64 prompts x 4 samples of 512 tokens for each server) all at once, as
with responses of equal length. The rest of the rollout phase is the app's: the client, text, scoring by a function in
its process. Printed are the seconds after the answers were sent.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.grpo_step.workload import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES, prompts, write_workload
from rl_data import Prompt
from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import Endpoint, RolloutClient, RolloutConfig, SamplingConfig

REWARD = "benchmarks.grpo_step.workload:parity"


@contextmanager
def dummy_server(*, tokens: int, prompt_tokens: int, tokens_per_s: float, lists: bool = False) -> Iterator[str]:
    """Yields the URL of `dummy_server.py`, which responds like a rollout server, or with `lists` like stock vLLM."""
    script = Path(__file__).with_name("dummy_server.py")
    sizes = ["--tokens", str(tokens), "--prompt-tokens", str(prompt_tokens), "--tokens-per-s", str(tokens_per_s)]
    sizes += ["--lists"] if lists else []
    process = subprocess.Popen([sys.executable, str(script), *sizes], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, num_servers: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step after the first one: `gen`, without the servers' time, `reward`, and the process's CPU."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    wanted = [
        Prompt(id=str(i), text=text, token_ids=tuple(tokenizer(text)["input_ids"]), ground_truth="", data_source="w")
        for i, text in enumerate(prompts(num_servers * NUM_PROMPTS))
    ]
    sampling = SamplingConfig(n=SAMPLES, max_tokens=NEW_TOKENS, ignore_eos=True)
    spent: dict[str, list[float]] = {"gen": [], "reward": [], "cpu": []}
    with ExitStack() as stack:
        rate = NEW_TOKENS / args.seconds
        servers = [
            stack.enter_context(
                dummy_server(tokens=NEW_TOKENS, prompt_tokens=PROMPT_TOKENS, tokens_per_s=rate, lists=args.lists)
            )
            for _ in range(num_servers)
        ]
        endpoints = [Endpoint(url, "key", "policy") for url in servers]
        client = stack.enter_context(RolloutClient(endpoints, RolloutConfig(num_servers=num_servers)))
        scorer = stack.enter_context(Scorer(ScoringConfig(function=REWARD)))
        phase = RolloutPhase(client, tokenizer, scorer=scorer, seed=0)
        for step in range(1 + args.steps):
            times = dict.fromkeys(spent, 0.0)

            @contextmanager
            def timed(name: str, times: dict[str, float] = times) -> Iterator[None]:
                begin = time.perf_counter()
                yield
                times[name] += time.perf_counter() - begin

            begin = time.process_time()
            phase.collect(wanted, sampling, step=step, phase=timed)
            times["cpu"] = time.process_time() - begin
            for name in spent if step else ():
                spent[name].append(times[name] - args.seconds * (name == "gen"))
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0, help="from a request to its answer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lists", action="store_true", help="answers of stock vLLM")
    args = parser.parse_args()
    print("| servers | samples | seconds after the answers, median (range) | scoring after that | CPU of the driver |")
    print("| --- | --- | --- | --- | --- |")
    gc.collect()
    gc.freeze()  # as the training loop does
    with tempfile.TemporaryDirectory() as name:
        write_workload(Path(name), model="qwen3-tiny")
        for num_servers in args.servers:
            measured = measure(Path(name), num_servers, args)
            cells = [f"{statistics.median(row):.2f} ({min(row):.2f}-{max(row):.2f})" for row in measured.values()]
            print(f"| {num_servers} | {num_servers * NUM_PROMPTS * SAMPLES} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
