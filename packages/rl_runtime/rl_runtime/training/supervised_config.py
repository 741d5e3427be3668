"""Configuration of supervised training: demonstrations, fine-tuning, preferences."""

import math
from dataclasses import dataclass, field

from ds_engine import OptimConfig
from rl_data import TurnsTrained
from rl_data.config import expand_files

from ..rules import check_at_least, check_value


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """Learning rates by what is trained: all weights, LoRA adapters, or the built-in model."""

    full: float
    lora: float
    builtin: float


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Supervised training on demonstrations: the SFT app, and the warm start before reinforcement learning."""

    steps: int = 0
    """Number of optimizer steps; 0: no warm start."""
    batch_size: int = 64
    """Examples (demonstrations, pairs or labeled responses) per step, over all ranks and micro batches."""
    files: tuple[str, ...] = ()
    """Files of demonstrations, of the kinds of `data.train`; empty: those of the built-in task. Their columns are
    `question` and `answer`, `messages`, `prompt` and `completion`, or `text` (docs/data.md)."""
    turns: TurnsTrained = "all"
    """Turns of a conversation that are trained on. `all`: every assistant turn. `each`: every one, as a sequence of its
    own with the messages before it as the prompt, for templates that render earlier turns differently. `last`: only the
    last one."""
    max_length: int | None = None
    """Maximum tokens of a prompt with one response; `data.overlong` says what happens to examples with a longer one.
    None of them is cut, which would teach to stop anywhere. null: no limit."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, schedule="cosine"))
    """The optimizer; the schedule is as long as the training. A learning rate of null is chosen for the model: 1e-5 for
    all weights, between Tulu 3's 5e-6 (8B, arXiv:2411.15124) and Llama 2's 2e-5 (arXiv:2307.09288); 1e-4 for LoRA,
    which wants about ten times as much ('LoRA Without Regret', Schulman 2025; QLoRA takes 1e-4 to 2e-4,
    arXiv:2305.14314); 2e-3 for `builtin:tiny`, which has 0.4M parameters and starts from random weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", expand_files("files", self.files))
        check_at_least(0, self, "steps")
        check_at_least(1, self, "batch_size")
        check_value(self, "max_length", self.max_length is None or self.max_length >= 2, "2 or more tokens, or null")
        check_value(self, "optim.total_steps", self.optim.total_steps is None, "null, because the run sets it")

    @property
    def trains(self) -> bool:
        """True if there is anything to train."""
        return self.steps > 0

    @property
    def learning_rates(self) -> LearningRates:
        """The value of `optim.lr=null`."""
        return LearningRates(full=1e-5, lora=1e-4, builtin=2e-3)


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(SupervisedConfig):
    """Examples of an SFT run, and its validation."""

    steps: int = 0
    """Number of optimizer steps; 0: as many as `epochs` have."""
    epochs: float = 1.0
    """Passes over the demonstrations, where `steps` is 0; the last step has what is left of them."""
    val_files: tuple[str, ...] = ()
    """Files of held-out examples, for the validation loss; empty: `val_size`, or the built-in task's preferences."""
    val_size: int = 0
    """Without `val_files`: number of examples that are held out of `files`, chosen by `trainer.seed`."""
    num_samples: int = 4
    """Greedy responses to the first held-out prompts at each validation, in `rollouts/`; 0: none. The training engine
    decodes them without a key/value cache: exact at every ZeRO stage and without a server, at the cost of a forward
    pass for each token."""
    sample_tokens: int = 64
    """Maximum tokens of such a response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "val_files", expand_files("val_files", self.val_files))
        check_at_least(0, self, "val_size", "num_samples")
        check_at_least(1, self, "sample_tokens")
        check_value(self, "epochs", 0 < self.epochs < math.inf, "above 0")
        is_read = not self.val_files or not self.val_size
        check_value(self, "val_size", is_read, "0 with val_files, which are all held out")

    @property
    def trains(self) -> bool:
        """Always."""
        return True

    def num_steps(self, num_demonstrations: int) -> int:
        """Optimizer steps of the run: `steps`, or those of `epochs`."""
        return self.steps or max(1, -(-self.num_drawn(num_demonstrations) // self.batch_size))

    def num_drawn(self, num_demonstrations: int) -> int:
        """Demonstrations of all steps."""
        return self.steps * self.batch_size or max(1, round(self.epochs * num_demonstrations))


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainingConfig(FineTuningConfig):
    """Examples of a reward model or a preference run, and its validation."""

    files: tuple[str, ...] = ()
    """Files of preferences, of the kinds of `data.train`; empty: those of the built-in task. Pairs have the columns
    `question` or `prompt`, `chosen`, `rejected` and optionally `margin`; labeled responses (KTO) `prompt`, `completion`
    and `label` (docs/data.md)."""
    num_samples: int = 0
    """Greedy responses to the first held-out prompts at each validation, in `rollouts/`, by the training engine; 0:
    none. A reward model has none."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, schedule="cosine"))
    """The optimizer; the schedule is as long as the training. A learning rate of null is chosen for the model. Reward
    models: 1e-5 for all weights (InstructGPT's is 9e-6, arXiv:2203.02155), 1e-4 for LoRA. DPO, IPO and KTO: 1e-6 for
    all weights (DPO's paper, arXiv:2305.18290), 1e-5 for LoRA. `builtin:tiny`: 1e-3 and 3e-4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value(self, "turns", self.turns == "all", "all, because a preference is about the last turn")
