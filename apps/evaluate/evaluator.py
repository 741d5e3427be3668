"""The servers of an evaluation, which hold one model after the other, and the prompts that each model answers."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from apps.evaluate.config import EvaluateConfig
from plinth_base.errors import prefix_fields
from rl_runtime import (
    InputError,
    Inputs,
    PlacementError,
    RolloutFailed,
    RolloutPhase,
    Scorer,
    Validation,
    prepare_driver,
)
from rl_runtime.app.inputs import chat_format
from rl_runtime.ranks.environment import GpuId, visible_gpus
from rl_runtime.resolve.resolved import ResolvedConfig
from rollout_vllm import RolloutClient, ServerGroup
from run_kit.tracking.progress import duration_text
from weight_sync import HfFolderSource, WeightPusher, server_args, server_env

_PROGRESS_S = 30.0
"""Seconds between two lines of progress."""


def usable_gpus(config: EvaluateConfig) -> list[GpuId]:
    """The GPUs for the servers; empty: they run on the CPU.

    Raises:
        InputError: `rollout.device` is cuda and there is none.
    """
    prepare_driver(config.rollout.device)
    gpus = [] if config.rollout.device == "cpu" else visible_gpus()
    if config.rollout.device == "cuda" and not gpus:
        raise InputError(
            "rollout.device is cuda, but no GPU was found on this host; allowed: auto, or cpu; `plinth doctor` lists "
            "GPUs, driver and CUDA build"
        )
    return gpus


def choose_servers(config: EvaluateConfig, *, num_gpus: int) -> ResolvedConfig[EvaluateConfig]:
    """Fills in the settings of the servers that are null: they have the GPUs to themselves.

    Raises:
        PlacementError: more GPUs are requested than there are.
    """
    devices = f"{num_gpus} GPUs" if num_gpus else "the CPU"
    choice = ResolvedConfig(config=config, devices=devices)
    if config.rollout.urls or config.only_compare:
        return choice
    size = config.rollout.tensor_parallel_size
    longest = config.data.max_prompt_length + config.sampling.max_tokens
    choice = choice.with_default("rollout.max_model_len", longest, "the longest prompt and response")
    if not num_gpus:
        return choice.with_default("rollout.num_servers", 1, "one on the CPU")
    choice = choice.with_default("rollout.num_servers", max(1, num_gpus // size), f"one per {size} GPUs")
    choice = choice.with_default("rollout.gpu_memory_utilization", 0.9, "no trainer shares the GPUs")
    choice = choice.with_default("rollout.enforce_eager", False, "CUDA graphs decode faster")
    servers = choice.config.rollout.server_count
    if servers * size > num_gpus:
        raise PlacementError(
            f"{servers} servers of {size} GPUs need {servers * size} GPUs, there are {num_gpus}; lower "
            "rollout.num_servers or rollout.tensor_parallel_size, or set rollout.device=cpu"
        )
    return choice


class Evaluator:
    """Samples and scores the held-out prompts with the model that `load` gave the servers."""

    def __init__(
        self, config: EvaluateConfig, inputs: Inputs, scorer: Scorer, folder: Path, *, several_models: bool
    ) -> None:
        self._config, self._inputs, self._scorer, self._folder = config, inputs, scorer, folder
        self._several_models = several_models
        self._servers: ServerGroup | None = None
        self._client: RolloutClient
        self._stack = ExitStack()
        self._num_pushed = 0

    def load(self, model: Path | None) -> None:
        """Gives the servers a model: starts them with the first one, and pushes the others.

        None: existing servers keep their model; servers that are started have that of the inputs.

        Raises:
            rollout_vllm.ServerStartError: a server did not start.
            rollout_vllm.ServerDiedError: a server died.
            weight_sync.WeightSyncError: the model does not fit that of the servers; they wait for the next one.
        """
        if self._servers is not None:
            assert model is not None
            self._servers.check()
            self._num_pushed += 1
            with WeightPusher(HfFolderSource(model), self._servers.endpoints, self._config.sync) as pusher:
                pusher.push(self._num_pushed)
            self._client.set_policy_version(self._num_pushed)
            return
        self._servers = self._stack.enter_context(self._launch(model or self._inputs.model_path))
        self._servers.wait_ready()
        self._client = RolloutClient(self._servers.endpoints, self._config.rollout)
        self._stack.callback(self._client.close)
        config, tokenizer = self._config, self._inputs.tokenizer
        self._phase = RolloutPhase(
            self._client,
            tokenizer,
            scorer=self._scorer,
            seed=config.seed,
            episode=config.episode,
            chat=chat_format(tokenizer, config.data) if config.episode.environment is not None else None,
        )

    def evaluate(self, name: str) -> Validation:
        """The scored samples of all prompts; the seeds depend on `config.seed` and the prompt alone.

        Raises:
            RolloutFailed: no sample could be generated and scored.
            rollout_vllm.ServerDiedError: because a server died.
        """
        assert self._servers is not None, "load a model first"
        prompts, num_done, began = self._inputs.val_prompts, 0, time.monotonic()
        shown = began

        def on_scored() -> None:
            nonlocal num_done, shown
            num_done, now = num_done + 1, time.monotonic()
            if now - shown >= _PROGRESS_S:
                shown = now
                print(f"{name}: {num_done} of {len(prompts)} prompts in {duration_text(now - began)}", flush=True)

        try:
            return self._phase.validate(prompts, self._config.sampling, step=0, on_scored=on_scored)
        except RolloutFailed:
            self._servers.check()
            raise

    def close(self) -> None:
        """Ends the servers that were started here."""
        self._stack.close()

    def _launch(self, model: Path) -> ServerGroup:
        config = self._config
        gpus, size = usable_gpus(config), config.rollout.tensor_parallel_size
        device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
        pushed = self._several_models and not config.rollout.urls
        with prefix_fields("rollout"):
            return ServerGroup.launch(
                model,
                config.rollout if config.rollout.urls else replace(config.rollout, device=device),
                log_dir=self._folder / "servers",
                extra_args=server_args(config.sync, device) if pushed else (),
                env=server_env(config.sync, device) if pushed else None,
                gpu_ids_per_server=[gpus[i * size : (i + 1) * size] for i in range(config.rollout.server_count)]
                if gpus
                else None,
            )


@contextmanager
def open_evaluator(
    config: EvaluateConfig, inputs: Inputs, folder: Path, *, several_models: bool
) -> Iterator[Evaluator]:
    """An evaluator whose servers and scoring processes end with the block; `folder` gets their logs."""
    with Scorer(config.reward, printed_dir=folder / "rewards") as scorer:
        evaluator = Evaluator(config, inputs, scorer, folder, several_models=several_models)
        try:
            yield evaluator
        finally:
            evaluator.close()
