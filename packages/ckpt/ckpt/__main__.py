"""`python -m ckpt list DIR` and `python -m ckpt verify DIR`.

Exit codes: 0 all is well, 1 a checkpoint is damaged, 2 the command was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from .manager import LATEST_NAME, PARTIAL_PREFIX, CheckpointManager
from .manifest import MANIFEST_NAME, verify_folder


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _list(root: Path) -> int:
    manager = CheckpointManager(root)
    steps = manager.steps()
    pointer = root / LATEST_NAME
    latest = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None
    damaged = 0
    print(f"{'step':>10}  {'created (UTC)':<25}  {'files':>5}  {'size':>10}")
    for step in steps:
        try:
            manifest = manager.manifest(step)
        except CheckpointDamagedError as error:
            print(f"{step:>10}  damaged: {error}")
            damaged += 1
            continue
        mark = "  latest" if latest and int(latest.removeprefix("step_")) == step else ""
        size = _size(manifest.num_bytes)
        print(f"{step:>10}  {manifest.created_at:<25}  {len(manifest.files):>5}  {size:>10}{mark}")
    for path in sorted(root.glob(f"{PARTIAL_PREFIX}*")):
        print(f"unfinished: {path.name} (a save under way, or left by a killed one; the next save deletes it)")
    return 1 if damaged else 0


def _verify(folders: Sequence[Path]) -> int:
    damaged = 0
    for folder in folders:
        problems = verify_folder(folder)
        print(f"{folder.name}: {'damaged' if problems else 'good'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
        damaged += bool(problems)
    print(f"{len(folders) - damaged} of {len(folders)} checkpoints are good")
    return 1 if damaged else 0


def _folders(directory: Path, step: int | None) -> list[Path]:
    """The checkpoint folders that `directory` means: itself when it is one, else those in it."""
    if (directory / MANIFEST_NAME).exists() and step is None:
        return [directory]
    manager = CheckpointManager(directory)
    steps = manager.steps()
    if not steps or (step is not None and step not in steps):
        known = f"published steps: {', '.join(map(str, steps))}" if steps else "it holds no checkpoint"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointNotFoundError(f"{directory}: {wanted}; {known}")
    return [directory / f"step_{one:08d}" for one in (steps if step is None else [step])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ckpt", description="Look at checkpoints and check them.")
    commands = parser.add_subparsers(dest="command", required=True)
    lister = commands.add_parser("list", help="list the checkpoints in a folder")
    lister.add_argument("dir", type=Path)
    verifier = commands.add_parser("verify", help="read every file and compare it with its checksum")
    verifier.add_argument("dir", type=Path, help="a folder of checkpoints, or one checkpoint")
    verifier.add_argument("--step", type=int, default=None, help="only this step")
    options = parser.parse_args(arguments)
    try:
        if not options.dir.is_dir():
            raise CheckpointNotFoundError(f"{options.dir}: no such folder")
        if options.command == "list":
            return _list(options.dir)
        return _verify(_folders(options.dir, options.step))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
