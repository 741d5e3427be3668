"""The servers of an evaluation, which hold one model after the other, and the prompts that each model answers."""

from contextlib import ExitStack
from pathlib import Path

from apps.evaluate.config import EvaluateConfig
from plinth_base.errors import prefix_fields
from rl_runtime import Inputs, RolloutFailed, RolloutPhase, Scorer, Validation, prepare_driver
from rl_runtime.app.inputs import chat_format
from rl_runtime.ranks.environment import GpuId, visible_gpus
from rl_runtime.resolve.resolved import ResolvedConfig
from rl_runtime.rules import check_value
from rollout_vllm import RolloutClient, ServerGroup
from weight_sync import HfFolderSource, WeightPusher, server_args, server_env


def usable_gpus(config: EvaluateConfig) -> list[GpuId]:
    """The GPUs for the servers; empty: they run on the CPU. Raises InputError for `rollout.device=cuda` without any."""
    prepare_driver(config.rollout.device)
    gpus = [] if config.rollout.device == "cpu" else visible_gpus()
    has_device, remedy = config.rollout.device != "cuda" or bool(gpus), "`plinth doctor` lists GPUs and CUDA build"
    check_value(config, "rollout.device", has_device, "auto or cpu without a GPU", remedy=remedy)
    return gpus


def resolve_servers(config: EvaluateConfig, *, num_gpus: int) -> ResolvedConfig[EvaluateConfig]:
    """Fills in the settings of the servers that are null: they have the GPUs to themselves.

    Raises InputError if more GPUs are requested than there are.
    """
    resolved = ResolvedConfig(config=config, devices=f"{num_gpus} GPUs" if num_gpus else "the CPU")
    if config.rollout.urls:
        return resolved
    size = config.rollout.tensor_parallel_size
    longest = config.data.max_prompt_length + config.sampling.response_tokens
    resolved = resolved.with_consequence("rollout.device", "cuda" if num_gpus else "cpu", "the devices of this host")
    resolved = resolved.with_default("rollout.max_model_len", longest, "the longest prompt and response")
    if not num_gpus:
        return resolved.with_default("rollout.num_servers", 1, "one on the CPU")
    resolved = resolved.with_default("rollout.num_servers", max(1, num_gpus // size), f"one per {size} GPUs")
    resolved = resolved.with_default("rollout.gpu_memory_utilization", 0.9, "no trainer shares the GPUs")
    resolved = resolved.with_default("rollout.enforce_eager", False, "CUDA graphs decode faster")
    fits = resolved.config.rollout.server_count * size <= num_gpus
    allowed = (
        f"at most {num_gpus // size} of {size} GPUs each (rollout.tensor_parallel_size), since there are {num_gpus}"
    )
    check_value(resolved.config, "rollout.num_servers", fits, allowed, remedy="set rollout.device=cpu")
    return resolved


class Evaluator(ExitStack):
    """Samples and scores the held-out prompts with the model that `load` gave the servers.

    Servers and scoring processes end with the `with` block; `folder` gets their logs.
    """

    def __init__(self, config: EvaluateConfig, inputs: Inputs, folder: Path) -> None:
        super().__init__()
        self._config, self._inputs, self._folder = config, inputs, folder
        self._servers: ServerGroup | None = None
        self._client: RolloutClient
        self._num_pushed = 0

    def load(self, model: Path | None) -> None:
        """Gives the servers a model: starts them with the first one, and pushes the others.

        None: existing servers keep their model; servers that are started have that of the inputs.

        Raises WeightSyncError if the model does not fit that of the servers; they wait for the next one.
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
        chat = chat_format(self._inputs, config.data) if config.episode.has_process else None
        self._phase = RolloutPhase(
            self._client,
            tokenizer,
            scorer=scorer,
            seed=config.seed,
            episode=config.episode,
            chat=chat,
            max_prompt_tokens=config.data.max_prompt_length,
            images=self._inputs.image_files(self._folder),
        )

    def evaluate(self) -> Validation:
        """The scored samples of all prompts; the seeds depend on `config.seed` and the prompt alone.

        Raises RolloutFailed if there is none, or ServerDiedError if that is because a server died.
        """
        assert self._servers is not None, "load a model first"
        prompts, num_done = self._inputs.val_prompts, 0

        def on_scored() -> None:
            nonlocal num_done
            num_done += 1
            if num_done % max(50, len(prompts) // 10) == 0:
                print(f"{num_done} of {len(prompts)} prompts", flush=True)

        try:
            return self._phase.validate(prompts, self._config.sampling, step=0, on_scored=on_scored)
        except RolloutFailed:
            self._servers.check()
            raise

    def _launch(self, model: Path) -> ServerGroup:
        config, gpus = self._config.rollout, usable_gpus(self._config)
        size, pushes = config.tensor_parallel_size, self._config.checkpoints.folder is not None
        shares = [gpus[i * size : (i + 1) * size] for i in range(config.server_count)]
        with prefix_fields("rollout"):
            return ServerGroup.launch(
                model,
                config,
                log_dir=self._folder / "servers",
                extra_args=server_args() if pushes else (),
                env=server_env(config.device) if pushes else None,
                gpu_ids_per_server=shares if gpus else None,
            )
