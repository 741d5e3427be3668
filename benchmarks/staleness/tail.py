"""Ideas that shorten the tail of a synchronous step, simulated: `python -m benchmarks.staleness.tail`.

Four servers generate groups whose responses have log-normal lengths (mean 512, at most 4,096; half of the variance of
the logarithm is the prompt's). A decoding step takes 5.8 ms with 256 running samples and 3.2 ms with 64, measured on
H200s (benchmarks/rollout), and in between and beyond what a line through both gives, at least 2.6 ms. Log-probs and
updates take 2.04 s for 256 responses of 512 tokens. An idea that is simulated as free has no cost of its own.
"""

import argparse
import heapq
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

SERVERS, MEAN, CAP, SIGMA = 4, 512, 4096, 1.0
TRAIN_S, OTHER_S = 2.04 / (256 * 512), 0.3
FIRST_HALF = 0.57
"""Share of training that is old log-probs and the first of two mini batches."""


def step_s(running: int) -> float:
    return max(2.6e-3, 3.2e-3 + (running - 64) * (5.8e-3 - 3.2e-3) / 192)


def generation_s(lengths: Sequence[int], slots: int, *, tokens_per_step: float = 1.0) -> float:
    """Seconds of a server for samples in this order. `tokens_per_step`: with drafts, below 32 running samples."""
    ends: list[float] = []
    place = seconds = 0.0
    waiting = iter(lengths)
    following = next(waiting, None)
    while ends or following is not None:
        while following is not None and len(ends) < slots:
            heapq.heappush(ends, place + following)
            following = next(waiting, None)
        rate = tokens_per_step if len(ends) < 32 else 1.0
        seconds += (ends[0] - place) * step_s(len(ends)) / rate
        place = ends[0]
        while ends and ends[0] <= place:
            heapq.heappop(ends)
    return seconds


def steps(prompts: int, samples: int, slots: int, rng: np.random.Generator) -> dict[str, float]:
    """Seconds of one step by idea."""
    log_mean = np.log(MEAN) - SIGMA**2 / 2
    of_prompt = rng.normal(0, SIGMA * 0.5**0.5, prompts)
    noise = rng.normal(0, SIGMA * 0.5**0.5, (2, prompts, samples))
    earlier, now = np.clip(np.exp(log_mean + of_prompt[:, None] + noise), 1, CAP).astype(int)
    train = TRAIN_S * float(now.sum()) / SERVERS

    def generated(order: Sequence[int], **options: float) -> float:
        queues = [np.concatenate([now[group] for group in order[i::SERVERS]]) for i in range(SERVERS)]
        return max(generation_s(queue.tolist(), slots, **options) for queue in queues)

    gen = generated(range(prompts))
    ordered = sorted(now.ravel().tolist())
    moved, place = 0.0, 0
    for index, length in enumerate(ordered):
        moved += (length - place) * step_s(min(slots, -(-(len(ordered) - index) // SERVERS)))
        place = length
    result = {
        "today": gen + train,
        "longest first, earlier lengths": generated(np.argsort(-earlier.mean(1)).tolist()) + train,
        "longest first, known lengths": generated(np.argsort(-now.mean(1)).tolist()) + train,
        "old log-probs and first update in the tail, free": gen + train * (1 - FIRST_HALF),
        "all training but a tenth in the tail, free": gen + train * 0.1,
        "drafts in the tail, 1.3 tokens a step": generated(range(prompts), tokens_per_step=1.3) + train,
        "drafts in the tail, 2 tokens a step": generated(range(prompts), tokens_per_step=2.0) + train,
        "the longest response alone": float(now.max()) * step_s(1),
    }
    if prompts * samples <= SERVERS * slots:
        result["unfinished samples spread evenly at every step, free"] = moved + train
    return {name: seconds + OTHER_S for name, seconds in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for prompts, samples, slots in ((256, 4, 256), (512, 8, 256), (512, 8, 512), (1024, 8, 256)):
        times = defaultdict[str, list[float]](list)
        for _ in range(args.rounds):
            for name, seconds in steps(prompts, samples, slots, rng).items():
                times[name].append(seconds)
        today = np.mean(times["today"])
        print(
            f"\n{prompts} prompts x {samples}, {slots} running on each of {SERVERS} servers\n\n| | s | today / this |"
        )
        print("| --- | --- | --- |")
        for name, values in times.items():
            print(f"| {name} | {np.mean(values):.1f} | {today / np.mean(values):.2f} |")


if __name__ == "__main__":
    main()
