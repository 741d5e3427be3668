"""Configuration of a teacher for on-policy distillation."""

from dataclasses import dataclass, field
from typing import Literal

from rl_core import DivergenceKind
from rollout_vllm import RolloutConfig

from ..config import FrozenModel, expand_folder
from ..rules import Feature, Rule, check_value, only

Signal = Literal["sampled", "top_k", "full"]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The teacher, and what the student learns from it."""

    model: str | None = None
    """Hugging Face folder or downloaded OWNER/NAME of the teacher; with `server.urls` only its tokenizer is read."""
    on: Literal["server", "ranks"] = "server"
    """Place of the teacher: on vLLM servers, which this run starts unless `server.urls` names some, or on the
    trainer's ranks as a frozen model, sharded at ZeRO stage 3."""
    signal: Signal = "sampled"
    """Signal of the teacher. `sampled`: the teacher's log-prob of each sampled token, as advantage of a policy
    gradient. `top_k`: a divergence over the teacher's `top_k` most likely tokens and the rest as one outcome (servers).
    `full`: a divergence over the whole vocabulary (ranks). The last two learn more from each sample."""
    top_k: int = 16
    """Tokens of each position, for `signal=top_k`."""
    divergence: DivergenceKind = "reverse"
    """`reverse` (student || teacher) keeps to what the teacher does, `forward` (teacher || student) covers all of it,
    `jsd` is between the two (GKD, arXiv:2306.13649). `signal=sampled` is always reverse."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of `jsd`; above 0, below 1."""
    discount: float = 0.0
    """For `signal=sampled`: share of the next token's advantage that is added to each token's. 0: each token is judged
    by itself; 1: by all that follow it (MiniLLM, arXiv:2306.08543)."""
    weight: float = 1.0
    """Weight of the teacher beside the reward (`algorithm.reward_weight`)."""
    gpus: tuple[int, ...] = ()
    """GPUs of this host for the teacher's servers, `server.tensor_parallel_size` for each of `server.num_servers`."""
    server: RolloutConfig = field(default_factory=RolloutConfig)
    """The teacher's vLLM servers; see `rollout`."""

    def __post_init__(self) -> None:
        if self.model is not None:
            object.__setattr__(self, "model", expand_folder("model", self.model))
        places = {"sampled": ("server", "ranks"), "top_k": ("server",), "full": ("ranks",)}
        has_signal = self.on in places[self.signal]
        check_value(self, "on", has_signal, f"{' or '.join(places[self.signal])} with signal={self.signal}")
        check_value(self, "top_k", self.top_k >= 1, "1 or more")
        is_reverse = self.signal != "sampled" or self.divergence == "reverse"
        check_value(self, "divergence", is_reverse, "reverse with signal=sampled")
        check_value(self, "beta", 0 < self.beta < 1, "above 0 and below 1")
        check_value(self, "discount", 0 <= self.discount <= 1, "0 to 1")
        check_value(self, "weight", 0 < self.weight < float("inf"), "above 0")
        problem = "servers of vLLM 0.32 with LoRA enabled fail on log-probs of given tokens"
        check_value(self, "server.max_lora_rank", self.server.max_lora_rank is None, "null", problem=problem)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The teacher, if it is on the trainer's ranks."""
        if self.on != "ranks" or self.model is None:
            return ()
        return (FrozenModel(key="teacher.model", path=self.model, keeps_distributions=self.signal == "full"),)


TEACHER = Feature(
    key="teacher.on",
    is_on=lambda c: c.teacher.on == "server",
    rules=(
        only(
            "sampling.temperature",
            1,
            why="whose log-probs are those of temperature 1",
            remedy="teacher.on=ranks has the student's temperature",
        ),
        Rule(
            field="teacher.server.urls",
            allowed="with trainer.ray_address the URLs of servers that you have started",
            holds=lambda c: c.trainer.ray_address is None or bool(c.teacher.server.urls),
            why="and this run starts teachers on its own host only",
        ),
    ),
)
