"""The command line of an app."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import NoReturn, TypeVar

from rollout_vllm import RolloutConfig, RolloutConfigError
from rollout_vllm.servers.device import Device
from rollout_vllm.servers.spawn import prepare_servers
from run_kit import run_cli
from weight_sync import server_env

from ..job_config import JobConfig
from ..ranks.environment import listed_gpus, prepare_imports
from ..supervised_job_config import SupervisedJobConfig
from . import kept
from .import_deepspeed import file_keys

COMMON_KEYS = (
    *("model.path", "checkpoints.folder", "teacher.model", "data.train", "data.val"),
    *("data.system_prompt", "data.max_prompt_length", "reward.method", "reward.function"),
    *("supervised.files", "supervised.epochs", "supervised.batch_size", "supervised.max_length", "supervised.optim.lr"),
    *("sampling.n", "sampling.max_tokens", "sampling.temperature", "batch.train_batch_size", "batch.mini_batch_size"),
    *("actor.optim.lr", "critic.optim.lr", "actor.lora.rank", "engine.lora.rank", "actor.zero.stage"),
    *("engine.zero.stage", "actor.zero.offload.optimizer", "engine.zero.offload.optimizer", "token_budget"),
    *("algorithm.advantage", "algorithm.loss", "algorithm.beta", "algorithm.kl_coef"),
    *("rollout.num_servers", "rollout.tensor_parallel_size"),
    *("trainer.total_training_steps", "trainer.num_ranks", "trainer.max_staleness", "trainer.test_freq"),
    *("trainer.save_freq", "trainer.resume", "trainer.experiment", "trainer.output_dir"),
    *("pass_at", "compare", "experiment", "output_dir", "tracking.wandb_project"),
)
"""Keys that `--help` lists, of all apps that train: each has some of them."""

AppConfigT = TypeVar("AppConfigT", bound=JobConfig | SupervisedJobConfig)


def run_job_cli(
    config_cls: type[AppConfigT],
    main: Callable[[AppConfigT], None],
    argv: Sequence[str] | None = None,
    *,
    common_keys: Sequence[str] = COMMON_KEYS,
) -> NoReturn:
    """`run_kit.run_cli` for an app that runs a preset of its own unless the user gives a model or data.

    That is `smollm2`, a pretrained model, for an app that has it on a host with an NVIDIA GPU; else `demo`.
    The app is the module `main` beside that of the configuration, its presets are in the folder `presets` there.
    """
    preset_dir = Path(inspect.getfile(config_cls)).with_name("presets")
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    data = "supervised.files" if issubclass(config_cls, SupervisedJobConfig) else "data.train"

    origins: dict[str, str] = {}
    app = f"{config_cls.__module__.rpartition('.')[0]}.main"
    command = kept.Command.current(app, sys.argv[1:] if argv is None else argv)

    def prepared(config: AppConfigT) -> int | None:
        minutes = config.trainer.keep_servers if isinstance(config, JobConfig) else 0.0
        if isinstance(config, JobConfig) and (code := kept.run_in_kept(command, minutes)) is not None:
            return code
        prepare_imports()  # before the app imports a library
        from ..resolve.resolved import ORIGINS

        token, kept_command = ORIGINS.set(origins), kept.COMMAND.set(command)
        try:
            with nullcontext() if kept.is_standby() else _ahead(config):
                main(config)
        finally:
            ORIGINS.reset(token)
            kept.COMMAND.reset(kept_command)
        return None

    run_cli(
        config_cls,
        prepared,
        app_name=app,
        preset_dir=preset_dir,
        argv=argv,
        common_keys=common_keys,
        default_preset="smollm2" if has_gpu and (preset_dir / "smollm2.yaml").is_file() else "demo",
        default_preset_unless=("model.path", data),
        file_keys=file_keys(config_cls, origins),
        origins=origins,
    )


def servers_ahead(
    rollout: RolloutConfig, *, pushes: bool = True, device: str = "auto", ray_address: str | None = None
) -> AbstractContextManager[None]:
    """Starts the processes of the servers on this host; none for existing servers, and for those of a Ray cluster.

    The devices are a guess, since no library has been imported: a process that turns out to be needless ends.

    Args:
        pushes: the servers get weights.
        device: "auto", "cpu" or "cuda", of the ranks.
    """
    if rollout.urls or ray_address is not None:
        return nullcontext()
    num_gpus = 0 if "cpu" in (device, rollout.device) else listed_gpus()
    guess: Device = "cuda" if num_gpus else "cpu"
    number = rollout.num_servers or max(1, num_gpus // rollout.tensor_parallel_size)
    return prepare_servers(rollout, device=guess, number=number, env=server_env(guess) if pushes else None)


@contextmanager
def _ahead(config: JobConfig | SupervisedJobConfig) -> Iterator[None]:
    from ..launch.ahead import sessions_ahead

    with ExitStack() as stack:
        if isinstance(config, JobConfig):
            trainer, rollout = config.trainer, config.rollout
            # What these servers import differs, as `resolve.job` decides.
            with suppress(RolloutConfigError):  # refused by its key then
                if config.actor.match_servers:
                    rollout = replace(rollout, match_trainer=True)
                elif config.actor.router_replay == "R3" and rollout.routes is None:
                    rollout = replace(rollout, routes=True)
            stack.enter_context(servers_ahead(rollout, device=trainer.device, ray_address=trainer.ray_address))
            num_gpus = 0 if trainer.device == "cpu" or trainer.ray_address is not None else listed_gpus()
            if num_gpus:  # on the CPU, Ray's processes would take the cores from the imports
                Thread(target=_import_app, daemon=True).start()
                from ..launch.local_ray import ray_ahead

                stack.enter_context(ray_ahead(num_gpus))
        stack.enter_context(sessions_ahead())
        yield


def _import_app() -> None:
    with suppress(Exception):  # the app meets it again
        import_module("rl_runtime.app.run")
