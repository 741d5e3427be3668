"""Lists, verifies, exports, reshapes, uploads and prunes checkpoints on the command line.

Exit codes: 0 success, 1 a checkpoint is damaged, 2 wrong usage or any other error.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import upstream
from ..errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, CheckpointUsageError
from ..files import is_disk_full, no_space
from ..manager import LATEST_NAME, PARTIAL_PREFIX, CheckpointManager, folder_name
from ..manifest import MANIFEST_NAME, verify_folder
from ..retention import Retention


def _size(num_bytes: float) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


@contextmanager
def _progress(title: str) -> Iterator[Callable[..., None]]:
    """Shows a bar of bytes on standard error, or a line every 10 s without a terminal.

    Yields a function of the bytes just done and, if it is known, the total.
    """
    pause_s = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(
        desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False, mininterval=pause_s, delay=pause_s
    ) as bar:

        def add(num_bytes: int, total_bytes: int | None = None) -> None:
            bar.total = total_bytes
            bar.update(num_bytes)

        yield add


def _list(options: argparse.Namespace) -> int:
    root: Path = options.dir
    manager = CheckpointManager(root)
    pointer = root / LATEST_NAME
    latest = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None
    damaged, steps = 0, manager.steps()
    print(f"{'step':>10}  {'created (UTC)':<25}  {'files':>5}  {'size':>10}" if steps else _no_checkpoints(root))
    for step in steps:
        try:
            manifest = manager.manifest(step)
        except CheckpointDamagedError as error:
            print(f"{step:>10}  damaged: {error}")
            damaged += 1
            continue
        notes = ["latest"] if latest == folder_name(step) else []
        notes += [f"{name}={value:g}" for name, value in manifest.metrics.items()]
        line = f"{step:>10}  {manifest.created_at:<25}  {len(manifest.files):>5}  {_size(manifest.num_bytes):>10}"
        print("  ".join([line, *notes]))
    for path in sorted(root.glob(f"{PARTIAL_PREFIX}*")):
        print(f"unfinished: {path.name} (a save in progress, or left by a killed process; the next save deletes it)")
    return 1 if damaged else 0


def _no_checkpoints(directory: Path) -> str:
    """The message about a folder without checkpoints; it names a folder that has some, if there is one."""
    if (directory / MANIFEST_NAME).exists():
        return f"{directory} is one checkpoint; give its folder: {directory.absolute().parent}"
    inner = min((path.parents[1] for path in directory.glob(f"*/*/{MANIFEST_NAME}")), default="RUN/checkpoints")
    return f"no checkpoints in {directory}; give the folder that has them, such as {inner}"


def _verify(options: argparse.Namespace) -> int:
    return _verify_folders(_folders(options.dir, options.step))


def _verify_folders(folders: Sequence[Path]) -> int:
    damaged = 0
    for folder in folders:
        with _progress(folder.name) as add:
            problems = verify_folder(folder, on_read=add)
        print(f"{folder.name}: {'damaged' if problems else 'good'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
        damaged += bool(problems)
    print(f"{len(folders) - damaged} of {len(folders)} checkpoints are good")
    return 1 if damaged else 0


def _folders(directory: Path, step: int | None) -> list[Path]:
    """The checkpoint folders of `directory`: itself if it is a checkpoint, else those in it."""
    if (directory / MANIFEST_NAME).exists() and step is None:
        return [directory]
    steps = CheckpointManager(directory).steps()
    if not steps:
        raise CheckpointNotFoundError(_no_checkpoints(directory))
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise CheckpointNotFoundError(f"no such checkpoint in {directory}", field="step", value=step, allowed=known)
    return [directory / folder_name(one) for one in (steps if step is None else [step])]


def _source(options: argparse.Namespace) -> Path | None:
    """The checkpoint to read, verified if it has a manifest; None when it is damaged."""
    source: Path = options.dir
    if options.step is not None or (source / MANIFEST_NAME).exists() or CheckpointManager(source).steps():
        source = _folders(source, options.step)[-1]
        if _verify_folders([source]):
            return None
    return source


def _export(options: argparse.Namespace) -> int:
    source = _source(options)
    if source is None:
        return 1
    import torch  # only here: the other commands do not need it

    from .deepspeed_export import export_deepspeed

    with _progress("read") as add:
        report = export_deepspeed(
            source,
            options.out,
            model_files_from=options.model_files_from,
            tag=options.tag,
            dtype=options.dtype and getattr(torch, options.dtype),
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            on_tensor=lambda _, num_bytes: add(num_bytes),
        )
    dtype = options.dtype or "the model folder's dtype"
    shards = "1 file" if report.num_shards == 1 else f"{report.num_shards} files"
    print(f"{report.path}: {report.num_tensors} tensors, {report.num_bytes:,} bytes in {dtype}, {shards}")
    return 0


def _reshape(options: argparse.Namespace) -> int:
    source = _source(options)
    if source is None:
        return 1
    from .universal import write_universal

    with _progress("written") as add:
        report = write_universal(
            source,
            options.out,
            tag=options.tag,
            overwrite=options.overwrite,
            on_tensor=lambda _, *sizes: add(*sizes),
        )
    print(
        f"{report.path}: universal checkpoint {report.tag!r} of {report.num_parameters} parameters after "
        f"{report.adam_steps} steps, {report.num_bytes:,} bytes of fp32 weights and moments"
    )
    return 0


def _upload(options: argparse.Namespace) -> int:
    from ..store.remote import RemoteCheckpoints

    remote = RemoteCheckpoints(options.url)
    remote.check_writable()
    manager, there = CheckpointManager(options.dir), remote.steps()
    missing = [step for step in manager.steps() if step not in there]
    for step in missing:
        with _progress(folder_name(step)) as add:
            remote.upload(manager.read(step), on_file=add)
        print(f"uploaded {folder_name(step)}", flush=True)
    print(f"{options.url} has steps {', '.join(map(str, remote.steps())) or 'none'}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    rule = Retention(
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        keep_best=options.keep_best,
        metric=options.metric,
        mode=options.mode,
    )
    if rule.keeps_all:
        allowed = "at least one of --keep-last, --keep-every, and --keep-best with --metric"
        raise CheckpointUsageError("no rule keeps a checkpoint", field="prune", allowed=allowed)
    manager = CheckpointManager(options.dir, retention=rule)
    deleted = manager.prune() if options.yes else manager.prunable()
    for step in deleted:
        print(f"{'deleted' if options.yes else 'would delete'} {folder_name(step)}")
    kept = [step for step in manager.steps() if step not in deleted]
    print(f"{'kept' if options.yes else 'would keep'} {', '.join(map(str, kept)) or 'nothing'}")
    if deleted and not options.yes:
        print("nothing was deleted; add --yes to delete")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckpt", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument("dir", type=Path, help="folder of checkpoints")
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("dir", type=Path, help="folder of checkpoints, one checkpoint, or a DeepSpeed checkpoint")
    source.add_argument("out", type=Path, help="output folder")
    source.add_argument("--step", type=int, help="step (default: the newest)")
    source.add_argument("--tag", help="model to read if the checkpoint holds several, e.g. actor")
    source.add_argument("--overwrite", action="store_true", help="replace OUT")

    def command(run: Callable[[argparse.Namespace], int], base: argparse.ArgumentParser, help_text: str) -> Any:
        name = run.__name__.removeprefix("_")
        added = commands.add_parser(name, parents=[base], help=help_text)
        added.set_defaults(run=run)
        return added

    command(_list, root, "list the checkpoints in a folder")
    verify = command(_verify, root, "read every file of a folder of checkpoints, or of one, and compare its checksum")
    verify.add_argument("--step", type=int, help="verify only this step")
    export = command(_export, source, "write a Hugging Face folder from a DeepSpeed checkpoint")
    export.add_argument(
        "--model-files-from", type=Path, required=True, metavar="MODEL", help="folder with config.json and tokenizer"
    )
    dtypes = ("float32", "bfloat16", "float16")
    export.add_argument("--dtype", choices=dtypes, help="dtype of the weights (default: the model folder's)")
    export.add_argument("--max-shard-bytes", type=int, default=5_000_000_000, metavar="BYTES")
    command(_reshape, source, "write a DeepSpeed universal checkpoint, for any number of ranks and any ZeRO stage")
    upload = command(_upload, root, "upload the checkpoints that a storage lacks")
    upload.add_argument("url", help="any URL of fsspec: s3://bucket/run-7")
    prune = command(_prune, root, "delete checkpoints that no rule keeps; a dry run without --yes")
    prune.add_argument("--keep-last", type=int, metavar="K", help="keep the newest K")
    prune.add_argument("--keep-every", type=int, metavar="N", help="keep every step that is a multiple of N")
    prune.add_argument("--keep-best", type=int, metavar="K", help="keep the best K by --metric")
    prune.add_argument("--metric", help="a metric that was passed to publish")
    prune.add_argument("--mode", choices=("max", "min"), default="max", help="the largest or the smallest is best")
    prune.add_argument("--yes", action="store_true", help="delete them")
    commands.add_parser("doctor", help="list the parts of DeepSpeed that background saves and safe loads need")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv`, default `sys.argv[1:]`; return the exit code."""
    options = _parser().parse_args(argv)
    if options.command == "doctor":
        print(upstream.report())
        return 0
    try:
        if not options.dir.is_dir():
            raise CheckpointNotFoundError("no such folder", field="dir", value=str(options.dir))
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        is_full = is_disk_full(error) and "out" in options
        print(f"error: {no_space(error, options.out, 'it was written') if is_full else error}", file=sys.stderr)
        return 2
