"""The training API of the `tinker` SDK: `plinth serve model.path=FOLDER [section.key=value ...]`.

It starts trainer ranks and rollout servers as `plinth grpo` does, and answers a program that is written with the SDK:
forward_backward, optim_step, sample, save and load. docs/serve.md has five minutes from a recipe to your own GPU.

    plinth serve model.path=Qwen/Qwen3-4B-Instruct-2507
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-... python recipe.py

`--help all` lists all keys. Without a model it serves the built-in one (`preset=demo`).
"""

import os
import secrets
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import rl_runtime
from apps.serve.config import ServeConfig
from run_kit import RunFolder
from run_kit.timing import Laps

if TYPE_CHECKING:
    from rl_runtime.launch.placement import Placement
    from rl_runtime.launch.session import Session

KEY_VARIABLE = "TINKER_API_KEY"
COMMON_KEYS = (
    *("model.path", "api.host", "api.port", "api.api_key_file", "api.full", "api.model_name", "api.states_dir"),
    *("actor.lora.rank", "actor.zero.stage", "actor.zero.offload.optimizer", "rollout.max_model_len"),
    *("rollout.num_servers", "rollout.tensor_parallel_size", "rollout.max_lora_rank"),
    *("trainer.num_ranks", "trainer.experiment", "trainer.output_dir"),
)
"""Keys that `--help` lists; most others are the client's."""
MAX_CONTEXT = 8192
"""Context that is served if `rollout.max_model_len` is null and the model has more."""


def prepare(config: ServeConfig) -> ServeConfig:
    """The configuration with the longest sequence, from which memory is planned."""
    from rl_runtime.app.inputs import read_model_config
    from rl_runtime.config import BUILTIN_MODEL

    longest = config.rollout.max_model_len
    if longest is None:
        from plinth_base.model_folder import find_model_folder

        positions = MAX_CONTEXT
        if config.model.path != BUILTIN_MODEL:
            positions = read_model_config(find_model_folder(config.model.path)).get(
                "max_position_embeddings", positions
            )
        longest = min(positions, MAX_CONTEXT)
    prompt, rollout = max(1, longest // 2), replace(config.rollout, max_model_len=longest)
    if rollout.max_lora_rank is not None:  # in one batch
        rollout = replace(rollout, extra_args=("--max-loras", str(config.num_models), *rollout.extra_args))
    return replace(
        config,
        rollout=rollout,
        data=replace(config.data, max_prompt_length=prompt),
        sampling=replace(config.sampling, max_tokens=longest - prompt),
    )


def check(config: ServeConfig) -> "tuple[Placement, list[str]]":
    """Refuses settings that cannot work before any process starts; plans the devices."""
    from rl_runtime.launch.servers import check_servers
    from rl_runtime.launch.session import plan_session
    from rl_runtime.training.engines import check_engine, check_sequence_parallel

    engine, trainer = config.engine, config.trainer
    rl_runtime.prepare_driver(trainer.device)
    check_sequence_parallel(engine, section="actor", num_ranks=trainer.rank_count)
    placement = plan_session(trainer, config.rollout, sequence_parallel={"actor": engine.sequence_parallel})
    check_engine(engine, section="actor", num_updates=1, is_saved=True)
    lines = rl_runtime.check_architectures(config.model, {"actor": engine}, on_gpu=placement.on_gpu)
    check_servers(config.model, config.rollout, config.sync, trainer, placement)
    return placement, lines


def read_key(config: ServeConfig) -> tuple[str, bool]:
    """The key that clients send, and True if it was drawn now. Raises InputError for one that the SDK refuses."""
    file = config.api.api_key_file
    key = Path(file).read_text().strip() if file is not None else os.environ.get(KEY_VARIABLE, "")
    if not key and file is None:
        return f"tml-{secrets.token_urlsafe(24)}", True
    if not key.startswith("tml-") or len(key) < 12:
        field = KEY_VARIABLE if file is None else "api.api_key_file"
        raise rl_runtime.InputError(field=field, allowed="a key that begins with tml-, of 12 characters or more")
    return key, False


def main(config: ServeConfig) -> None:
    """Starts ranks and servers, and answers requests until a signal ends the process."""
    config.check_given()
    key, is_new = read_key(config)
    resolved = rl_runtime.resolve_job(prepare(config))
    placement, lines = check(resolved.config)
    config, start = resolved.config, Laps()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((config.api.host, config.api.port)))
        run = RunFolder.create(
            config.trainer.output_dir, config.trainer.experiment, private=config.trainer.private_output
        )
        run.write_config(config, resolved.comment())
        stack.enter_context(run)
        print(f"run folder {run.path}; starting {config.trainer.rank_count} ranks and the servers", flush=True)
        for line in (*resolved.lines(), *lines):
            print(line, flush=True)
        inputs = rl_runtime.load_inputs(
            config, config.warm_start, folder=run.path, seed=config.trainer.seed, with_prompts=False
        )
        from rl_runtime.launch.ahead import SessionKeys
        from rl_runtime.launch.session import open_session

        keys = SessionKeys.of(placement, config.trainer, config.rollout, str(inputs.model_path))
        session = stack.enter_context(open_session(keys, log_dir=run.path / "servers", mark=start.mark))
        session.wait_ready()
        start.mark("servers")
        url = f"http://{config.api.host}:{listener.getsockname()[1]}"
        print(f"ready after {start}\nserving {config.api.model_name or config.model.path}; for clients:")
        print(f"export TINKER_BASE_URL={url}{f' {KEY_VARIABLE}={key}' if is_new else ''}", flush=True)
        serve(config, session, listener, model_path=inputs.model_path, key=key)


def serve(config: ServeConfig, session: "Session", listener: socket.socket, *, model_path: Path, key: str) -> None:
    """Answers requests until a signal, or until the ranks cannot go on, which raises."""
    import uvicorn

    from apps.serve.http import application
    from apps.serve.models import Models
    from apps.serve.service import Service
    from apps.serve.states import States

    errors: list[BaseException] = []
    models = Models(config, session, model_path=model_path, states=States(Path(config.api.states_dir)))

    def fail(error: BaseException) -> None:
        errors.append(error)
        server.should_exit = True

    start = partial(Service, config, models, fail=fail)
    app = application(start, key=key, max_request_bytes=config.api.max_request_bytes)
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
    server = uvicorn.Server(settings)
    try:
        server.run(sockets=[listener])
    finally:
        models.thread.shutdown(wait=False, cancel_futures=True)
    if errors:
        session.servers.check()  # a dead server is the cause of what others met
        raise errors[0]


cli = partial(rl_runtime.run_job_cli, ServeConfig, main, common_keys=COMMON_KEYS)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
