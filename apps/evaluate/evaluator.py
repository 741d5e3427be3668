"""The servers of an evaluation, which hold one model after the other, and the prompts that each model answers."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

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
from rollout_vllm.servers.device import Device
from weight_sync import HfFolderSource, WeightPusher, server_args, server_env


def usable_gpus(config: EvaluateConfig) -> list[GpuId]:
    """The GPUs for the servers; empty: they run on the CPU.

    Raises:
        InputError: `rollout.device` is cuda and there is none.
    """
    prepare_driver(config.rollout.device)
    gpus = [] if config.rollout.device == "cpu" else visible_gpus()
    if config.rollout.device == "cuda" and not gpus:
        remedy = "`plinth doctor` lists GPUs, driver and CUDA build"
        raise InputError(field="rollout.device", value="cuda", allowed="auto or cpu without a GPU", remedy=remedy)
    return gpus


def resolve_servers(config: EvaluateConfig, *, num_gpus: int) -> ResolvedConfig[EvaluateConfig]:
    """Fills in the settings of the servers that are null: they have the GPUs to themselves.

    Raises:
        PlacementError: more GPUs are requested than there are.
    """
    resolved = ResolvedConfig(config=config, devices=f"{num_gpus} GPUs" if num_gpus else "the CPU")
    if config.rollout.urls or config.only_compare:
        return resolved
    size = config.rollout.tensor_parallel_size
    longest = config.data.max_prompt_length + config.sampling.max_tokens
    resolved = resolved.with_default("rollout.max_model_len", longest, "the longest prompt and response")
    if not num_gpus:
        return resolved.with_default("rollout.num_servers", 1, "one on the CPU")
    resolved = resolved.with_default("rollout.num_servers", max(1, num_gpus // size), f"one per {size} GPUs")
    resolved = resolved.with_default("rollout.gpu_memory_utilization", 0.9, "no trainer shares the GPUs")
    resolved = resolved.with_default("rollout.enforce_eager", False, "CUDA graphs decode faster")
    servers = resolved.config.rollout.server_count
    if servers * size > num_gpus:
        problem = f"{servers} servers of {size} GPUs need {servers * size} GPUs, there are {num_gpus}"
        remedy = "lower rollout.num_servers or rollout.tensor_parallel_size, or set rollout.device=cpu"
        raise PlacementError(problem, field="rollout.num_servers", remedy=remedy)
    return resolved


class Evaluator(ExitStack):
    """Samples and scores the held-out prompts with the model that `load` gave the servers.

    Servers and scoring processes end with the `with` block; `folder` gets their logs.
    """

    def __init__(self, config: EvaluateConfig, inputs: Inputs, folder: Path, *, several_models: bool) -> None:
        super().__init__()
        self._config, self._inputs, self._folder = config, inputs, folder
        self._are_pushed = several_models and not config.rollout.urls
        self._servers: ServerGroup | None = None
        self._client: RolloutClient
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
        config, tokenizer = self._config, self._inputs.tokenizer
        scorer = self.enter_context(Scorer(config.reward, printed_dir=self._folder / "rewards"))
        self._servers = self.enter_context(self._launch(model or self._inputs.model_path))
        self._servers.wait_ready()
        self._client = RolloutClient(self._servers.endpoints, config.rollout)
        self.callback(self._client.close)
        chat = chat_format(tokenizer, config.data) if config.episode.environment is not None else None
        self._phase = RolloutPhase(
            self._client, tokenizer, scorer=scorer, seed=config.seed, episode=config.episode, chat=chat
        )

    def evaluate(self, name: str) -> Validation:
        """The scored samples of all prompts; the seeds depend on `config.seed` and the prompt alone.

        Raises:
            RolloutFailed: no sample could be generated and scored.
            rollout_vllm.ServerDiedError: because a server died.
        """
        assert self._servers is not None, "load a model first"
        prompts, num_done = self._inputs.val_prompts, 0

        def on_scored() -> None:
            nonlocal num_done
            num_done += 1
            if num_done % max(50, len(prompts) // 10) == 0:
                print(f"{name}: {num_done} of {len(prompts)} prompts", flush=True)

        try:
            return self._phase.validate(prompts, self._config.sampling, step=0, on_scored=on_scored)
        except RolloutFailed:
            self._servers.check()
            raise

    def _launch(self, model: Path) -> ServerGroup:
        config, gpus = self._config, usable_gpus(self._config)
        size, device = config.rollout.tensor_parallel_size, _device(gpus)
        shares = [gpus[i * size : (i + 1) * size] for i in range(config.rollout.server_count)]
        with prefix_fields("rollout"):
            return ServerGroup.launch(
                model,
                config.rollout if config.rollout.urls else replace(config.rollout, device=device),
                log_dir=self._folder / "servers",
                extra_args=server_args(config.sync, device) if self._are_pushed else (),
                env=server_env(config.sync, device) if self._are_pushed else None,
                gpu_ids_per_server=shares if gpus else None,
            )


def _device(gpus: list[GpuId]) -> Device:
    return "cuda" if gpus else "cpu"
