"""Checkpoints of a plain torch loop with ckpt, beside `torch.save`.

    python examples/checkpoints_in_a_torch_loop.py

What it buys: a whole checkpoint is there whenever the process dies, a damaged one is passed over instead of being
loaded, and the loop waits for a copy instead of the disk. The script kills both loops at random instants, flips one bit
in the newest file of each, and measures for how long a save blocks the loop.

Measured with this command on two busy CPU cores, 25 MB of weights and moments:

* after 10 kills `ckpt` loads 10 times, `torch.save` to one path 8 times (2 files were torn);
* of two checkpoints, the second with a flipped bit, `ckpt` loads the first, and `torch.load` loads the damaged one;
* a save blocks the loop for 19 ms instead of 73 ms.

`packages/ckpt/examples/plain_torch.py` is a whole program that resumes bit-exactly after a kill.
"""

import argparse
import random
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from ckpt import AsyncSaver, CheckpointManager, load_state_dict


class Saver(Protocol):
    """One way in which a loop saves and the next start loads."""

    def save(self, step: int, state: dict[str, Any]) -> None: ...
    def load(self) -> tuple[int, dict[str, Any]]: ...
    def close(self) -> None: ...


class TorchSave:
    """The usual two lines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last.pt"

    def save(self, step: int, state: dict[str, Any]) -> None:
        torch.save({"step": step, **state}, self._path)

    def load(self) -> tuple[int, dict[str, Any]]:
        state = torch.load(self._path)
        return state.pop("step"), state

    def close(self) -> None:
        pass


class Ckpt:
    """The same with ckpt."""

    def __init__(self, folder: Path) -> None:
        self._manager = CheckpointManager(folder / "checkpoints", keep_last=2)
        self._saver: AsyncSaver | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._saver = self._saver or AsyncSaver(self._manager)
        self._saver.save(step, state)  # returns after a copy; waits only for an earlier save that is still running

    def load(self) -> tuple[int, dict[str, Any]]:
        newest = self._manager.newest_good()
        if newest is None:
            raise FileNotFoundError("no good checkpoint")
        names = ("model", "optimizer")
        return newest.step, {name: load_state_dict(newest.path / f"{name}.safetensors") for name in names}

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()


KINDS: dict[str, Callable[[Path], Saver]] = {"torch.save": TorchSave, "ckpt": Ckpt}


def train(saver: Saver, num_steps: int, hidden: int) -> list[float]:
    """A loop that saves after every step; seconds for which each save blocked it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden))
    optimizer = torch.optim.AdamW(model.parameters())
    blocked = []
    for step in range(1, num_steps + 1):
        for _ in range(4):
            model(torch.randn(64, hidden)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        start = time.perf_counter()
        saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        blocked.append(time.perf_counter() - start)
    saver.close()
    return blocked


def written(folder: Path) -> list[Path]:
    """The files that hold weights or moments."""
    return [path for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors")]


def survives_a_kill(kind: str, folder: Path, delay_s: float, hidden: int) -> bool:
    """True if the next start finds a checkpoint after SIGKILL, `delay_s` after the first one was written."""
    folder.mkdir()
    process = get_context("fork").Process(target=lambda: train(KINDS[kind](folder), 10**6, hidden))
    process.start()
    while not is_loadable(kind, folder):
        time.sleep(0.05)
    time.sleep(0.5 + delay_s)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL  # it had not ended before
    return is_loadable(kind, folder)


def is_loadable(kind: str, folder: Path) -> bool:
    """True if a start finds a checkpoint that it can load."""
    try:
        KINDS[kind](folder).load()
    except Exception:
        return False
    return True


def flip_one_bit(folder: Path) -> None:
    """Damage the middle of the newest large file, as a bad disk or a bad copy does."""
    path = max(written(folder), key=lambda path: path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 64]))


def after_a_flipped_bit(kind: str, folder: Path, hidden: int) -> str:
    """Outcome of the next start with a damaged newest checkpoint."""
    train(KINDS[kind](folder), 2, hidden)
    flip_one_bit(folder)
    try:
        step, _ = KINDS[kind](folder).load()
    except Exception as error:
        return f"refused: {type(error).__name__}"
    return f"loaded step {step} of 2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the two layers; bytes = 24 x hidden^2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    delays_s = [random.Random(kill).uniform(0.0, 0.5) for kill in range(options.kills)]
    with tempfile.TemporaryDirectory() as name:
        for kind, open_saver in KINDS.items():
            folder = Path(name) / kind
            folder.mkdir()
            survived = [
                survives_a_kill(kind, folder / f"kill_{kill}", delay_s, options.hidden)
                for kill, delay_s in enumerate(delays_s)
            ]
            blocked = train(open_saver(folder), options.steps, options.hidden)
            (folder / "flipped").mkdir()
            flipped = after_a_flipped_bit(kind, folder / "flipped", options.hidden)
            print(
                f"{kind:10s} loads after {sum(survived)} of {options.kills} kills; after a flipped bit: {flipped}; "
                f"a save blocks the loop for {1000 * median(blocked):.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
