"""Command line of an app: help, presets, overrides, exit codes, signals.

Exit codes: 0 success (or what `main` returns), 1 a failure, 2 a user error, 130 after Ctrl-C, 128 + n after signal n.
A run that listens (`signals.StopRequest`) ends with the same code after the step in which the signal came.
A user error and an error of these packages is one `error: …` message with its notes; its traceback is in the run's
`train.log`. Any other error is printed with its traceback. Only the config classes are imported before the
configuration is validated.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from .config.help import PresetFile, help_text, list_presets
from .config.loader import given_values, load_config
from .config.redaction import redact, secrets_in, yaml_without_secrets
from .config.schema import all_paths, nearest_paths
from .config.trees import Layer, nested
from .errors import OWN_PACKAGES, ConfigError
from .signals import signals_as_exceptions
from .terminal import lasting_streams
from .tracking.metrics_table import is_disk_full

ConfigT = TypeVar("ConfigT")

_HELP = ("--help", "-h", "help")
_SOURCES = ("preset", "overlay", "config")

INVOKED_AS: ContextVar[str] = ContextVar("INVOKED_AS", default="")
"""The command the user typed, such as `plinth grpo` or `python -m apps.grpo.main`; empty outside of `run_cli`."""


@dataclass(frozen=True, kw_only=True)
class FileKey:
    """A key of the command line whose value is a file with settings in another format."""

    doc: str
    read: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]
    """Dotted settings of a file, beside dotted settings that override it. Raises ConfigError."""


def is_user_error(error: BaseException) -> bool:
    """True for a user error: an error of a ValueError class that one of these packages defines."""
    return isinstance(error, ConfigError) or (isinstance(error, ValueError) and _is_own(error))


def _is_own(error: BaseException) -> bool:
    """True if one of these packages defines the class of the error: its message is complete without a traceback."""
    return any(base.__module__.partition(".")[0] in OWN_PACKAGES for base in type(error).__mro__)


@lasting_streams()
def run_cli(
    config_cls: type[ConfigT],
    main: Callable[[ConfigT], int | None],
    *,
    app_name: str,
    preset_dir: Path | None = None,
    argv: Sequence[str] | None = None,
    doc: str = "",
    examples: Sequence[str] = (),
    common_keys: Sequence[str] = (),
    default_preset: str | None = None,
    default_preset_unless: Sequence[str] = (),
    file_keys: Mapping[str, FileKey] = MappingProxyType({}),
    origins: Mapping[str, str] = MappingProxyType({}),
) -> NoReturn:
    """Run an app from its command line; always raises SystemExit with the exit code.

    Args:
        config_cls: the app's config dataclass.
        main: the app. Its `finally` blocks and context managers run on errors, Ctrl-C, SIGTERM, SIGHUP and SIGUSR1.
        app_name: the app's module, for the help: `apps.grpo.main`; with a space in it, the whole command.
        preset_dir: folder of presets (`NAME.yaml`) and of overlays (`overlays/NAME.yaml`).
        argv: arguments without the program's name; None takes those of the process.
        doc: one sentence for the help; empty takes the first line of the config class.
        examples: argument lists for the help.
        common_keys: keys that `--help` lists; `--help all` lists every key. Empty: `--help` lists all.
        default_preset: preset below all others, unless a preset, a config file or an override gives one of the keys
            `default_preset_unless`. Overlays do not count: they change a preset.
        file_keys: keys of files in other formats; they are merged after presets, before overlays and config files.
        origins: key -> origin of settings that `file_keys` read, once they are read; `--print-config` prints them.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    app_name = INVOKED_AS.get() or (app_name if " " in app_name else f"python -m {app_name}")
    try:
        if any(arg in _HELP for arg in args):
            under = next((arg for arg in args if arg not in _HELP and "=" not in arg), "")
            text = help_text(
                config_cls,
                app_name=app_name,
                doc=doc,
                presets=list_presets(preset_dir),
                overlays=list_presets(preset_dir and preset_dir / "overlays"),
                examples=examples,
                common=common_keys,
                file_keys={key: value.doc for key, value in file_keys.items()},
                under=under,
            )
            _print_and_exit(text)
        settings = [arg for arg in args if arg != "--print-config"]
        paths, overrides = _parse(settings, config_cls, preset_dir, default_preset, default_preset_unless, file_keys)
        config = load_config(config_cls, presets=paths, overrides=overrides)
        if len(settings) < len(args):
            comments = [f"# {key}: {origin}\n" for key, origin in origins.items()]
            _print_and_exit("".join(comments) + yaml_without_secrets(config))
    except ConfigError as error:
        _fail(error, app_name)
    for key in secrets_in(overrides):
        print(
            f"warning: every user of this host can read {key} on the command line; write {key}='${{oc.env:NAME}}' to "
            f"take it from the environment, or {key}_file=FILE where there is such a key",
            file=sys.stderr,
        )
    _run(main, config, app_name)


def _run(main: Callable[[ConfigT], int | None], config: ConfigT, app_name: str) -> NoReturn:
    token = INVOKED_AS.set(app_name)
    try:
        with signals_as_exceptions():
            code = main(config)
    except KeyboardInterrupt:
        _say("interrupted")
        raise SystemExit(130) from None
    except Exception as error:
        # Ray wraps errors of its workers; the wrapper's text is a remote traceback.
        cause = getattr(error, "cause", None)
        shown = cause if isinstance(cause, Exception) else error
        if is_user_error(shown):
            _fail(shown, app_name)
        if not (_is_own(error) or (isinstance(error, OSError) and is_disk_full(error))):
            sys.excepthook = _print_redacted
            raise
        _say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
        raise SystemExit(1) from None
    finally:
        INVOKED_AS.reset(token)
    raise SystemExit(code if isinstance(code, int) else 0)


def _print_redacted(_kind: object, error: BaseException, _trace: object) -> None:
    """Print the traceback that ends the process, as Python would."""
    _say("".join(traceback.format_exception(error)).rstrip("\n"))


def _say(text: str) -> None:
    """Print to stderr without secrets."""
    print(redact(text), file=sys.stderr, flush=True)


def _parse(
    args: Sequence[str],
    cls: type,
    preset_dir: Path | None,
    default_preset: str | None,
    default_preset_unless: Sequence[str],
    file_keys: Mapping[str, FileKey],
) -> tuple[list[Path | Layer], list[str]]:
    """The files in the order of their merge, and the overrides."""
    problems: list[ConfigError] = []
    presets: list[Path] = []
    later: list[Path] = []
    overrides: list[str] = []
    foreign: list[tuple[str, str]] = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or arg.startswith(("-", "+")):
            problems.append(ConfigError(_not_an_override(arg, cls)))
        elif key in file_keys:
            foreign.append((key, value))
        elif key not in _SOURCES:
            same = [own for own in file_keys if own.rpartition(".")[2] == key.rpartition(".")[2]]
            if same and key not in all_paths(cls):
                remedy = f"nearest: {', '.join(same)}"
                problems.append(ConfigError("unknown key", field=key, remedy=remedy, source="command line"))
            else:
                overrides.append(arg)
        elif key == "config":
            later.append(Path(os.path.expanduser(value)))  # Path.expanduser raises for ~nobody
        else:
            path = _named_file(key, value, preset_dir, problems)
            (presets if key == "preset" else later).append(path)
    own_files = [*presets, *(Path(os.path.expanduser(arg[7:])) for arg in args if arg.startswith("config="))]
    own_keys = {arg.partition("=")[0] for arg in overrides} | given_values(cls, own_files).keys()
    if default_preset is not None and own_keys.isdisjoint(default_preset_unless):
        presets.insert(0, _named_file("preset", default_preset, preset_dir, problems))
    if problems:
        raise ConfigError.of(problems)
    given = given_values(cls, later, overrides) if foreign else {}
    layers = [
        Layer(source=f"{key}={value}", tree=nested(file_keys[key].read(Path(os.path.expanduser(value)), given)))
        for key, value in foreign
    ]
    return [*presets, *layers, *later], overrides


def _not_an_override(arg: str, cls: type) -> str:
    bare = arg.lstrip("-+")
    key, equals, _ = bare.partition("=")
    if arg.startswith(("-", "+")) and equals and key in (*all_paths(cls), *_SOURCES):
        return f"unknown option {arg!r}; write {bare} without the leading {arg[: len(arg) - len(bare)]}"
    if not equals and bare in all_paths(cls):
        return f"{arg!r} has no value; write {bare}=value"
    near = nearest_paths(cls, key.replace("-", "_"))
    hint = f"; nearest key: {near[0]}=value" if near else "; write key=value"
    return f"unknown argument {arg!r}{hint}; --help all lists every key"


def _named_file(kind: str, name: str, preset_dir: Path | None, problems: list[ConfigError]) -> Path:
    files: list[PresetFile] = list_presets(preset_dir and preset_dir / "overlays") if kind == "overlay" else []
    files += list_presets(preset_dir)
    for file in files:
        if file.name == name:
            return file.path
    names = [file.name for file in files]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    message = f"unknown {kind} {name!r}; "
    message += f"nearest: {', '.join(near)}; " if near else ""
    message += f"available: {', '.join(dict.fromkeys(names))}" if names else "this app has none"
    if name.endswith((".yaml", ".yml")) or "/" in name:
        message += f"; a file of your own is given as config={name}"
    problems.append(ConfigError(message))
    return Path(name)


def _print_and_exit(text: str) -> NoReturn:
    print(text, end="")
    raise SystemExit(0)


def _fail(error: BaseException, app_name: str) -> NoReturn:
    hint = f"\nSee {app_name} --help" if isinstance(error, ConfigError) else ""
    _say(f"error: {error}{hint}")
    raise SystemExit(2) from None
