"""Checks a teacher before any process starts, and starts it: its servers, or a frozen engine on the ranks."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from plinth_base.errors import prefix_fields
from plinth_base.model_folder import find_model_folder
from rl_data.tasks.tiny_model import VOCABULARY_SIZE
from rollout_vllm import Endpoint, RolloutConfig, ScoringError, ServerGroup, TokenScorer, check_launch, check_running

from ..config import BUILTIN_MODEL, ModelConfig
from ..errors import InputError
from ..job_config import JobConfig
from ..launch.placement import Placement
from ..rollout.watched_servers import WatchedServers
from ..training.engines import check_architectures, check_model_weights
from ..training.teacher import RankTeacher, ServerTeacher
from ..training.teacher_config import TeacherConfig
from .inputs import vocab_size
from .job import Job
from .reward_model import load_scoring_model


def check_teacher(config: JobConfig, teacher: TeacherConfig, placement: Placement) -> None:
    """Refuses a teacher that cannot teach the student of `config`.

    Raises:
        InputError: there is no teacher, its vocabulary is another one, or its servers cannot be started or used.
    """
    if teacher.model is None or teacher.model == BUILTIN_MODEL:
        problem = "" if teacher.model is None else "its weights are random"
        allowed = "a Hugging Face folder, or OWNER/NAME after `hf download`"
        raise InputError(problem, field="teacher.model", value=teacher.model, allowed=allowed)
    read_weights, remedy = not teacher.server.urls, "(student and teacher)"
    folder, _ = load_scoring_model(
        "teacher.model", teacher.model, config.model, need_weights=read_weights, remedy=remedy
    )
    if teacher.on == "ranks":
        _check_on_ranks(config, teacher, folder, placement)
    else:
        _check_servers(teacher, folder, placement)


def open_teacher(job: Job, teacher: TeacherConfig) -> ServerTeacher | RankTeacher:
    """Starts the teacher of a checked configuration; its servers may still be loading, and end with the ranks."""
    folder = find_model_folder(str(teacher.model))
    if teacher.on == "ranks":
        job.tracker.info(f"teacher: {folder}, frozen on the actor's ranks")
        model = job.frozen("teacher", job.config.frozen_engine, model_path=str(folder))
        return RankTeacher(model, full=teacher.signal == "full")
    top_k = teacher.top_k if teacher.signal == "top_k" else 0
    server = teacher.server
    per_server = server.tensor_parallel_size
    gpus = [teacher.gpus[i : i + per_server] for i in range(0, len(teacher.gpus), per_server)]
    with prefix_fields("teacher.server"):
        group = ServerGroup.launch(
            folder,
            server,
            log_dir=job.folder / "teacher_servers",
            extra_args=("--max-logprobs", str(max(top_k, 1))),
            gpu_ids_per_server=gpus or None,
        )
    group, scorer = job.session.enter(group), job.session.enter(TokenScorer(group.endpoints, server))
    job.tracker.info(f"teacher: {folder}, on {', '.join(endpoint.url for endpoint in group.endpoints)}")
    watched = None
    if group.servers and (max_restarts := job.config.trainer.max_server_restarts):
        watched = WatchedServers(
            group, scorer, kind="teacher server", max_restarts=max_restarts, report=job.tracker.info
        )
        job.session.enter(closing(watched))
    rows = vocab_size(job.inputs.model_path)
    return ServerTeacher(group, scorer, top_k=top_k, vocab_size=rows, watched=watched)


def _check_on_ranks(config: JobConfig, teacher: TeacherConfig, folder: Path, placement: Placement) -> None:
    engines, model = {"actor": config.frozen_engine}, ModelConfig(path=str(folder))
    check_architectures(model, engines, on_gpu=placement.on_gpu, key="teacher.model")
    student = (
        VOCABULARY_SIZE if config.model.path == BUILTIN_MODEL else vocab_size(find_model_folder(config.model.path))
    )
    if teacher.signal == "full" and vocab_size(folder) < student:
        raise InputError(
            f"its head has {vocab_size(folder)} rows, and the student's {student}",
            field="teacher.model",
            value=teacher.model,
            allowed="with teacher.signal=full as many rows or more",
        )


def _check_servers(teacher: TeacherConfig, folder: Path, placement: Placement) -> None:
    server = teacher.server
    if server.urls:
        _try_servers(server, teacher)
        return
    check_model_weights(ModelConfig(path=str(folder)), key="teacher.model")
    needed = server.server_count * server.tensor_parallel_size
    if len(teacher.gpus) != (needed if placement.on_gpu else 0):
        allowed = f"{needed} numbers of GPUs" if placement.on_gpu else "none on the CPU"
        allowed += " (teacher.server.num_servers x teacher.server.tensor_parallel_size)"
        raise InputError(field="teacher.gpus", value=list(teacher.gpus), allowed=allowed)
    with prefix_fields("teacher.server"):
        check_launch(folder, server, device_key="trainer.device")


def _try_servers(server: RolloutConfig, teacher: TeacherConfig) -> None:
    """Scores two tokens on each existing server."""
    top_k = teacher.top_k if teacher.signal == "top_k" else 0
    try:
        with prefix_fields("teacher.server"):
            check_running(server)
            api_key = server.read_api_key()
        for url in server.urls:
            with TokenScorer([Endpoint(url, api_key)], replace(server, max_retries=0)) as scorer:
                scorer.run(scorer.score([([0], [0, 0])], top_k=top_k))
    except ScoringError as error:
        raise InputError(str(error), field="teacher.server.urls") from error
