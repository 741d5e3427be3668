"""A plain PyTorch loop that resumes bit-exactly after it was killed at any instant.

    python packages/ckpt/examples/plain_torch.py RUN_FOLDER [--steps 200] [--save-every 20]

Start it, kill it, and start it again with the same folder. The last line is a checksum of the weights.
"""

import argparse
import hashlib
from pathlib import Path

import torch

from ckpt import AsyncSaver, CheckpointManager, Retention, capture_rng, load_state_dict, restore_rng


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    teacher = torch.randn(64)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shuffle = torch.Generator().manual_seed(1)

    keep = Retention(keep_last=2, keep_best=1, metric="loss", mode="min")
    manager = CheckpointManager(options.run_folder / "checkpoints", retention=keep)
    first = 1
    newest = manager.newest_good()  # the newest that verifies; None on the first start
    if newest is not None:
        model.load_state_dict(load_state_dict(newest.path / "model.safetensors"))
        optimizer.load_state_dict(load_state_dict(newest.path / "optimizer.safetensors"))
        restore_rng(newest.state["rng"])
        shuffle.set_state(load_state_dict(newest.path / "shuffle.safetensors"))
        manager.discard_after(newest.step)
        first = newest.step + 1
        print(f"resumed after step {newest.step}")

    with AsyncSaver(manager) as saver:
        for step in range(first, options.steps + 1):
            inputs = torch.randn(32, 64, generator=shuffle)
            loss = (model(inputs).squeeze(1) - inputs @ teacher).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % options.save_every == 0 or step == options.steps:
                stall_s = saver.save(
                    step,
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "shuffle": shuffle.get_state()},
                    state={"rng": capture_rng()},
                    metrics={"loss": loss.item()},
                )
                print(
                    f"step {step}: loss {loss.item():.4f}, the save blocked the loop for {1000 * stall_s:.1f} ms",
                    flush=True,
                )

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print(f"weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
