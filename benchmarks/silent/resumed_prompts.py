"""TRL's GRPOTrainer resumes between two generations with the wrong prompts: some samples twice, others never.

The buffer of generated samples is not in the checkpoint; the first step after it generates the whole window again, and
from then on windows of the data loader and of the trainer are shifted. Public: the fallback that makes it silent is
https://github.com/huggingface/trl/pull/3148, the same class of fault https://github.com/NVIDIA-NeMo/RL/pull/3599.
Prints samples of an epoch that a run with one stop trains twice and never; ours: prompts of a resumed sampler.

    python -m benchmarks.silent.resumed_prompts
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.random_model import write_random_model
from benchmarks.silent.setup import show
from rl_data import PromptSampler

NUM, SAMPLES, WINDOW, STOP = 8, 2, 4, 1


def train(folder: str, out: str, steps: int, resume: str | None = None) -> Counter[str]:
    """Samples of each prompt that steps trained."""
    seen: Counter[str] = Counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    class Recorded(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            seen.update(tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True))
            return super().compute_loss(model, inputs, *args, **options)

    config = GRPOConfig(
        output_dir=out, max_steps=steps, save_steps=STOP, per_device_train_batch_size=SAMPLES, num_generations=SAMPLES,
        steps_per_generation=WINDOW, max_completion_length=4, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": str(number)} for number in range(NUM)])
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    trainer = Recorded(folder, reward, config, data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume)
    return seen


def main() -> None:
    folder, out = str(write_random_model("qwen3-tiny", Path(tempfile.mkdtemp()))), tempfile.mkdtemp()
    seen = train(folder, out, STOP) + train(folder, out, NUM, f"{out}/checkpoint-{STOP}")
    sampler = PromptSampler(NUM, seed=0)
    drawn = sampler.next(STOP)
    resumed = PromptSampler(NUM, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    ours = Counter([*drawn, *resumed.next(NUM - STOP)])
    counts = {"peer": [seen[str(n)] - SAMPLES for n in range(NUM)], "ours": [ours[n] - 1 for n in range(NUM)]}
    show("trl", **{f"{name}_twice": sum(max(0, n) for n in extra) for name, extra in counts.items()},
         **{f"{name}_never": -sum(min(0, n) for n in extra) for name, extra in counts.items()})  # fmt: skip


if __name__ == "__main__":
    main()
