"""Compares a checkpoint save with the disk's own speed, and measures how long a background save blocks the loop.

    python -m benchmarks.ckpt.save [--folder DIR] [--gib 1.0] [--repeats 5] [--device cpu|cuda] [--deepspeed]

Each round writes the same bytes into the same folder: plainly (one file, write and fsync), with a save (prepare,
safetensors, a checksum of every byte, fsync, publish), and with background saves. Rounds are interleaved, so other
users of the disk affect all of them. Prints one line per round and the medians:

    save_over_raw        seconds of a save / seconds of the plain write (1.0 is the disk's own speed)
    background_over_raw  the same for a background save, until it is published
    stall_over_save      seconds that the call of a background save blocks / seconds of a save
    call_over_save       the same with copy_in_background
    copied_over_save     seconds until that copy is done (wait_copied) / seconds of a save

A loop that leaves the weights unchanged for copied_over_save is blocked only for call_over_save.

With --deepspeed the bytes are written like DeepSpeed's checkpoints, with DeepSpeedState (torch.save into a file that is
hashed while it is written; DeepSpeed itself is not needed). A foreground save is then a background save with a wait.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ckpt import AsyncSaver, CheckpointManager, DeepSpeedState, save_state_dict

_CHUNK_BYTES = 64 << 20


def make_state(num_bytes: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors of 64 MiB, and one with the rest, of random bits."""
    sizes = [_CHUNK_BYTES] * (num_bytes // _CHUNK_BYTES) + [num_bytes % _CHUNK_BYTES]
    return {
        f"layer.{index}": torch.randint(-128, 127, (size,), dtype=torch.int8, device=device).view(torch.float32)
        for index, size in enumerate(sizes)
        if size
    }


def write_plainly(path: Path, state: dict[str, torch.Tensor]) -> float:
    """Seconds to write the state's bytes to one file and fsync it."""
    views = [tensor.cpu().view(torch.uint8).numpy().data for tensor in state.values()]
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for view in views:
        rest = view
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


class Engine:
    """The part of a DeepSpeed engine that DeepSpeedState uses; it saves one state dict."""

    checkpoint_engine: Any = None

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def save_checkpoint(self, folder: str) -> None:
        self.checkpoint_engine.makedirs(f"{folder}/actor")
        self.checkpoint_engine.save({"state": self._state}, f"{folder}/actor/model_states.pt")


def save(manager: CheckpointManager, step: int, state: dict[str, torch.Tensor], num_bytes: int) -> float:
    """Seconds of a foreground save."""
    started = time.perf_counter()
    folder = manager.prepare(step, expected_bytes=num_bytes)
    entry = save_state_dict(folder / "model.safetensors", state)
    manager.publish(step, state={}, entries={"model.safetensors": entry})
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deepspeed", action="store_true", help="write like DeepSpeed's checkpoints")
    options = parser.parse_args()
    num_bytes = int(options.gib * 2**30) // 64 * 64
    state = make_state(num_bytes, options.device)
    engine = Engine(state)
    states: dict[str, Any] = {"model": DeepSpeedState(engine, engine.save_checkpoint) if options.deepspeed else state}
    print(
        "round\traw_s\traw_mb_per_s\tsave_s\tsave_over_raw\tstall_s\tbackground_s\tbackground_over_raw\tstall_over_save\t"
        "call_over_save\tcopied_over_save"
    )
    rounds = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        manager = CheckpointManager(root / "checkpoints")
        with AsyncSaver(manager) as saver:
            # Untimed: the first copy allocates the host memory, which later ones reuse.
            saver.save(0, states)
            saver.wait()
            for index in range(1, options.repeats + 1):
                shutil.rmtree(manager.root / f"step_{index - 1:08d}")
                raw_s = write_plainly(root / "raw", state)
                (root / "raw").unlink()
                if options.deepspeed:
                    started = time.perf_counter()
                    saver.save(index, states)
                    saver.wait()
                    save_s = time.perf_counter() - started
                else:
                    save_s = save(manager, index, state, num_bytes)
                shutil.rmtree(manager.root / f"step_{index:08d}")
                call_s = saver.save(index, states, copy_in_background=True)
                copied_s = call_s + saver.wait_copied()
                saver.wait()
                shutil.rmtree(manager.root / f"step_{index:08d}")
                started = time.perf_counter()
                stall_s = saver.save(index, states)
                saver.wait()
                background_s = time.perf_counter() - started
                shares = (stall_s / save_s, call_s / save_s, copied_s / save_s)
                rounds.append((save_s / raw_s, background_s / raw_s, *shares))
                print(
                    f"{index}\t{raw_s:.3f}\t{num_bytes / raw_s / 1e6:.0f}\t{save_s:.3f}\t{save_s / raw_s:.2f}\t"
                    f"{stall_s:.4f}\t{background_s:.3f}\t{background_s / raw_s:.2f}\t"
                    + "\t".join(f"{share:.3f}" for share in shares),
                    flush=True,
                )
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    print(
        f"median save_over_raw {medians[0]:.2f}, background_over_raw {medians[1]:.2f}, "
        f"stall_over_save {medians[2]:.3f}, call_over_save {medians[3]:.4f}, copied_over_save {medians[4]:.3f}"
    )


if __name__ == "__main__":
    main()
