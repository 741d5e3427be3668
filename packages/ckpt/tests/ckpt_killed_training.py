"""Run by test_ckpt_killed_training: compares a training of two ranks, killed repeatedly, with an uninterrupted one.

    ckpt_killed_training.py OUT STAGE NUM_KILLS

Two ranks train a small model with dropout and noise under DeepSpeed: shuffled epochs, two micro batches a step, and a
save in the background after every step. A SIGKILL ends them at a random instant, NUM_KILLS times in sequence; each
time the next pair resumes from the newest good checkpoint. Then as many steps are trained without a kill, and all
results are compared: losses and gradient norms of every step in every run, and the contents of the last checkpoint.
Prints a report as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ckpt_ranks import build, compare, fork_ranks

from ckpt import (
    AsyncSaver,
    Checkpoint,
    CheckpointManager,
    DeepSpeedState,
    SaverRanks,
    ZeroCheckpoint,
    capture_rng,
    load_state_dict,
    loading_without_pickle,
    rank_file,
    restore_rng,
)

NUM_SAMPLES, NUM_MICRO = 11, 2  # 2 ranks take 4 samples a step: an epoch ends within every third step


class Samples:
    """Sample indices, reshuffled every epoch; a resumed run continues at the saved position."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.waiting: list[int] = []

    def next(self, count: int) -> list[int]:
        while len(self.waiting) < count:
            self.waiting += torch.randperm(NUM_SAMPLES, generator=self.generator).tolist()
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


class Training:
    """One rank of the run in `root`, resumed from its newest good checkpoint."""

    def __init__(self, root: Path, stage: int, rank: int) -> None:
        self.rank = rank
        torch.manual_seed(0)  # the same weights on every rank
        layers = [torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(17, 5)]
        self.engine = build(
            stage,
            layers,
            gradient_accumulation_steps=NUM_MICRO,
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 40, "warmup_max_lr": 0.01}},
        )
        torch.manual_seed(1 + rank)  # different dropout and noise on each rank
        random.seed(2 + rank)  # a fork reseeds Python's own generator
        np.random.seed(3 + rank)  # the global generator, since it is saved
        self.inputs = torch.randn(NUM_SAMPLES, 9, generator=torch.Generator().manual_seed(2))
        self.samples = Samples()
        self.first = 1
        self.manager = CheckpointManager(root / "checkpoints", keep_last=2)
        actual: list[int | None] = [None]
        if rank == 0:  # rank 0 decides: rank 1 might look after the next one is published
            newest = self.manager.newest_good()
            actual = [newest.step if newest is not None else None]
        torch.distributed.broadcast_object_list(actual)
        if actual[0] is not None:
            self._resume(self.manager.read(actual[0]))

    def _resume(self, checkpoint: Checkpoint) -> None:
        with loading_without_pickle(self.engine):
            path, _ = self.engine.load_checkpoint(str(checkpoint.path / "actor"), tag="actor")
        assert path is not None
        self.samples.waiting = list(checkpoint.state["waiting"])
        rng = load_state_dict(checkpoint.path / rank_file("rng", self.rank))
        restore_rng(rng)
        self.samples.generator.set_state(load_state_dict(checkpoint.path / rank_file("samples", self.rank)))
        self.first = checkpoint.step + 1

    def step(self, saver: AsyncSaver) -> str:
        """One optimizer step. Returns its loss and gradient norm as exact hexadecimal."""
        mine = self.samples.next(2 * NUM_MICRO)[self.rank :: 2]
        total = torch.zeros(1)
        for index in mine:
            loss = self.engine(self.inputs[index : index + 1].bfloat16()).float().square().mean()
            loss = loss * (1 + random.random() + np.random.rand())
            self.engine.backward(loss)
            if self.engine.is_gradient_accumulation_boundary():
                saver.wait_copied()
            self.engine.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        return f"{total.item().hex()} {float(self.engine.get_global_grad_norm()).hex()}"

    def run(self, run_id: str, num_steps: int | None, log: Path, pipe: int) -> None:
        """Train `num_steps`, or until killed. Rank 0 logs every step and writes to `pipe` when its save has begun."""
        actor = DeepSpeedState(self.engine, lambda folder: self.engine.save_checkpoint(folder, tag="actor"))
        ranks = SaverRanks(num_ranks=2, rank=self.rank, run_id=run_id)
        with AsyncSaver(self.manager, ranks=ranks) as saver, log.open("a", buffering=1) as file:
            number = self.first
            while num_steps is None or number <= num_steps:
                measured = self.step(saver)
                if self.rank == 0:
                    file.write(f"{number} {measured}\n")
                states = {"actor": actor, "rng": capture_rng(), "samples": self.samples.generator.get_state()}
                state = {"waiting": self.samples.waiting, "measured": measured}
                saver.save(number, states, state=state, copy_in_background=True)
                if self.rank == 0:
                    os.write(pipe, b"%d\n" % number)
                number += 1


def live(root: Path, stage: int, run_id: str, num_steps: int | None, pipe: int, rank: int) -> None:
    Training(root, stage, rank).run(run_id, num_steps, root / "measured.log", pipe)


class Killer:
    """Starts the run and kills it; measures how long the start and a step take."""

    def __init__(self, root: Path, stage: int) -> None:
        self.root, self.stage = root, stage
        self.dice = random.Random(stage)
        self.start_s, self.step_s = 3.0, 0.1
        self.reached = 0
        self.counts = {"before the first step": 0, "inside a save": 0, "repeated steps": 0}

    def kill_once(self, life: int) -> None:
        reader, writer = os.pipe()
        started = time.perf_counter()
        ranks = fork_ranks(partial(live, self.root, self.stage, f"life{life}", None, writer), self.root)
        os.close(writer)
        said = b""
        if self.dice.random() < 0.75:
            said = os.read(reader, 4096)  # the first step is done and its save begun
            self.start_s = time.perf_counter() - started
            if self.dice.random() < 0.2:
                began = time.perf_counter()
                said += os.read(reader, 4096)
                self.step_s = time.perf_counter() - began
            time.sleep(self.dice.uniform(0.0, 3 * self.step_s))
        else:
            time.sleep(self.dice.uniform(0.0, 1.1 * self.start_s))
        self.dice.shuffle(ranks)
        for process in ranks:  # the other rank runs on for a moment
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(self.dice.uniform(0.0, 0.01))
        for process in ranks:
            process.join()
        # The other rank may have failed by itself because its peer is gone.
        assert ranks[0].exitcode == -signal.SIGKILL, ranks[0].exitcode
        assert ranks[1].exitcode in (-signal.SIGKILL, 1), ranks[1].exitcode
        while more := os.read(reader, 4096):
            said += more
        os.close(reader)
        self.look(list(map(int, said.split())))

    def look(self, begun: list[int]) -> None:
        """Published checkpoints stay; at most the step in flight and the one being written are lost."""
        folder = self.root / "checkpoints"
        self.counts["before the first step"] += not begun
        self.counts["inside a save"] += any(path.name.startswith(".partial") for path in folder.glob(".*"))
        newest = CheckpointManager(folder).newest_good()
        step = newest.step if newest is not None else 0
        assert step == max(CheckpointManager(folder).steps(), default=0), "the newest is whole"
        assert step >= max([self.reached, *(number - 1 for number in begun)]), (step, self.reached, begun)
        self.counts["repeated steps"] += max([step, *begun]) - step
        self.reached = step


def run_to(root: Path, stage: int, num_steps: int) -> None:
    reader, writer = os.pipe()
    ranks = fork_ranks(partial(live, root, stage, "whole", num_steps, writer), root)
    for process in ranks:
        process.join()
    os.close(reader)
    os.close(writer)
    assert [process.exitcode for process in ranks] == [0, 0]


def read_log(root: Path) -> list[tuple[int, str]]:
    lines = (root / "measured.log").read_text().splitlines()
    return [(int(number), measured) for number, _, measured in (line.partition(" ") for line in lines)]


def check_equal(killed: Path, whole: Path, num_steps: int) -> None:
    expected = dict(read_log(whole))
    assert list(expected) == list(range(1, num_steps + 1))
    measured = read_log(killed)
    wrong = [(number, text, expected[number]) for number, text in measured if text != expected[number]]
    assert not wrong, f"{len(wrong)} of {len(measured)} steps differ: {wrong[:3]}"
    assert set(dict(measured)) == set(expected), "no step is left out"
    folders = [CheckpointManager(root / "checkpoints").load(num_steps).path for root in (killed, whole)]
    names = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        one, other = (folder / name for folder in folders)
        if name.suffix == ".pt":
            trees: list[Any] = [torch.load(path, weights_only=False) for path in (one, other)]
            for tree in trees:  # at stage 3 their padding is uninitialized memory; compared below without it
                tree.get("optimizer_state_dict", {}).pop("fp32_flat_groups", None)
            compare(*trees, str(name))
        elif name.name != "manifest.json":  # it holds the time
            assert one.read_bytes() == other.read_bytes(), name
    actual, expected_state = (ZeroCheckpoint(folder / "actor") for folder in folders)
    for name in actual.shapes:
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(actual.whole(name, kind), expected_state.whole(name, kind)), (name, kind)


def main(out: Path, stage: int, num_kills: int) -> None:
    killed, whole = out / "killed", out / "whole"
    killed.mkdir(parents=True)
    whole.mkdir()
    killer = Killer(killed, stage)
    started = time.perf_counter()
    for life in range(num_kills):
        killer.kill_once(life)
    killing_s = time.perf_counter() - started
    num_steps = killer.reached + 3
    run_to(killed, stage, num_steps)
    run_to(whole, stage, num_steps)
    check_equal(killed, whole, num_steps)
    print(json.dumps({"kills": num_kills, "steps": num_steps, "killing_s": round(killing_s, 1), **killer.counts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
