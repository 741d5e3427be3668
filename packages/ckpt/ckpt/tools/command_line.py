"""Lists, verifies, exports, reshapes and uploads checkpoints on the command line.

Exit codes: 0 success, 1 a checkpoint is damaged, 2 wrong usage or any other error.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from ..files import is_disk_full, no_space
from ..manager import PARTIAL_PREFIX, CheckpointManager, folder_name
from ..manifest import MANIFEST_NAME, verify_folder


def _list(options: argparse.Namespace) -> int:
    root: Path = options.dir
    manager = CheckpointManager(root)
    damaged, steps = 0, manager.steps()
    print(f"{'step':>10}  {'created (UTC)':<25}  {'files':>5}  {'bytes':>17}" if steps else _no_checkpoints(root))
    for step in steps:
        try:
            manifest = manager.manifest(step)
        except CheckpointDamagedError as error:
            print(f"{step:>10}  damaged: {error}")
            damaged += 1
            continue
        notes = ["latest"] if step == steps[-1] else []
        notes += [f"{name}={value:g}" for name, value in manifest.metrics.items()]
        line = f"{step:>10}  {manifest.created_at:<25}  {len(manifest.files):>5}  {manifest.num_bytes:>17,}"
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
    folders = _folders(options.dir, options.step)
    num_good = sum([_is_good(folder) for folder in folders])
    print(f"{num_good} of {len(folders)} checkpoints are good")
    return 0 if num_good == len(folders) else 1


def _is_good(folder: Path) -> bool:
    """Verify a checkpoint and print its problems."""
    problems = verify_folder(folder)
    print(f"{folder.name}: {'damaged' if problems else 'good'}", flush=True)
    for problem in problems:
        print(f"  {problem}")
    return not problems


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


def _source(options: argparse.Namespace) -> Path:
    """The checkpoint to read: the chosen or newest one of a folder, verified, or a DeepSpeed folder as it is."""
    source: Path = options.dir
    if options.step is None and not (source / MANIFEST_NAME).exists() and not CheckpointManager(source).steps():
        return source
    folder = _folders(source, options.step)[-1]
    if not _is_good(folder):
        raise CheckpointDamagedError("the checkpoint is damaged", field="dir", value=str(folder))
    return folder


def _export(options: argparse.Namespace) -> int:
    source = _source(options)
    import torch  # only here: the other commands do not need it

    from .deepspeed_export import export_deepspeed

    report = export_deepspeed(
        source,
        options.out,
        model_files_from=options.model_files_from,
        tag=options.tag,
        dtype=options.dtype and getattr(torch, options.dtype),
        overwrite=options.overwrite,
    )
    print(f"{report.path}: {report.num_tensors} tensors, {report.num_bytes:,} bytes, {report.num_shards} weight files")
    return 0


def _reshape(options: argparse.Namespace) -> int:
    source = _source(options)
    from .universal import write_universal

    report = write_universal(source, options.out, tag=options.tag, overwrite=options.overwrite)
    print(
        f"{report.path}: universal checkpoint {report.tag!r} of {report.num_parameters} parameters after "
        f"{report.optimizer_steps} steps, {report.num_bytes:,} bytes of fp32 weights and optimizer states"
    )
    return 0


def _upload(options: argparse.Namespace) -> int:
    from ..store.remote import RemoteCheckpoints

    remote = RemoteCheckpoints(options.url)
    remote.check_writable()
    manager, there = CheckpointManager(options.dir), remote.steps()
    for step in manager.steps():
        if step not in there:
            remote.upload(manager.read(step))
            print(f"uploaded {folder_name(step)}", flush=True)
    print(f"{options.url} has steps {', '.join(map(str, remote.steps())) or 'none'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    prog = "plinth ckpt" if Path(sys.argv[0]).name == "plinth" else "python -m ckpt"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    def add(run: Callable[[argparse.Namespace], int], help_text: str, folder: str) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__.removeprefix("_"), help=help_text)
        command.set_defaults(run=run)
        command.add_argument("dir", type=Path, help=folder)
        return command

    add(_list, "list the checkpoints in a folder", "folder of checkpoints")
    verify = add(_verify, "compare every file with its checksum", "folder of checkpoints, or one checkpoint")
    verify.add_argument("--step", type=int, help="one step of the folder")
    source = "folder of checkpoints, one checkpoint, or a DeepSpeed checkpoint"
    export = add(_export, "write a Hugging Face folder from a DeepSpeed checkpoint", source)
    reshape = add(_reshape, "write a DeepSpeed universal checkpoint, for any ZeRO stage and number of ranks", source)
    for command in (export, reshape):
        command.add_argument("out", type=Path, help="output folder")
        command.add_argument("--step", type=int, help="step (default: the newest)")
        command.add_argument("--tag", help="model to read if the checkpoint holds several, e.g. actor")
        command.add_argument("--overwrite", action="store_true", help="replace OUT")
    export.add_argument("--model-files-from", type=Path, required=True, metavar="MODEL", help="folder with config.json")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model folder's")
    upload = add(_upload, "upload the checkpoints that a storage lacks", "folder of checkpoints")
    upload.add_argument("url", help="any URL of fsspec")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv`, default `sys.argv[1:]`; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        if not options.dir.is_dir():
            raise CheckpointNotFoundError("no such folder", field="dir", value=str(options.dir))
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointDamagedError) else 2
    except OSError as error:
        is_full = is_disk_full(error) and "out" in options
        print(f"error: {no_space(error, options.out, 'it was written') if is_full else error}", file=sys.stderr)
        return 2
