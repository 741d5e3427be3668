"""Recipes of tinker-cookbook, unmodified, against a server of a small model on the CPU, and what they learn.

Model and data sets stand in the working folder under the names that the recipes ask for, so that nothing is downloaded.
Needs tests/extras/tinker.txt.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

env: Any = pytest.importorskip(
    "tinker_cookbook.recipes.multiplayer_rl.guess_number.env", reason="tests/extras/tinker.txt is not installed"
)
pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

MODEL = "Qwen/Qwen3-8B-Base"
"""The name of the model for recipes, which choose a renderer by it; the folder has a model of 0.4M parameters."""
KEY = "tml-test-0123456789"
RL = ("loss_fn=importance_sampling", "save_every=0", "eval_every=0", "behavior_if_log_dir_exists=delete")
END = "\n\nUser:"
NAMED = (f"model_name={MODEL}", "renderer_name=role_colon")


def conversations(*, sloppy: float) -> list[list[dict[str, str]]]:
    """Sums and guesses of numbers. A sloppy answer does not end in time, or breaks the format. Without any, each guess
    is the middle."""
    rng, chats = random.Random(1), []
    for _ in range(600):
        x, y = rng.randrange(101), rng.randrange(101)
        answer = f"{x + y}" if rng.random() >= sloppy else f"{x + y} or so, I think it is"
        shot = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
        asked = {"role": "user", "content": f"What is {x} + {y}?"}
        chats.append([*shot, asked, {"role": "assistant", "content": answer}])
        chat = [{"role": "system", "content": env.SYSTEM_PROMPT}]
        for _ in range(2):
            guess = f"Guess: {rng.randrange(1024) if sloppy else 512}"
            said = guess if rng.random() >= sloppy else "I guess that it is a number"
            heard = env.FAIL_TO_PARSE if said.startswith("I") else rng.choice(["Too low", "Too high"])
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        chats.append(chat)
    return chats


def build_model(folder: Path, texts: list[str]) -> None:
    """A Qwen3 of 0.6M parameters that has read these texts, and a tokenizer of their pieces."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=448, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    set_seed(1)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor([id for text in texts for id in fast.encode(text)])
    for step in range(150):
        starts = torch.randint(len(ids) - 128, (16, 1), generator=torch.Generator().manual_seed(step))
        rows = ids[starts + torch.arange(128)]
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def write_rows(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """A data set that `datasets.load_dataset` reads by the name of its folder."""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Kitchen:
    """A working folder with the model and the data sets, and a server."""

    def __init__(self, folder: Path, start_app: Callable[..., Any]) -> None:
        self.folder = folder
        read = [
            "<s>" + "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in chat) + END
            for chat in conversations(sloppy=0.5)
        ]
        build_model(folder / MODEL, read)
        rows = [{"messages": chat} for chat in conversations(sloppy=0.0)]
        write_rows(folder / "HuggingFaceH4" / "no_robots", train=rows, test=rows[:8])
        pairs = [self._pair(index) for index in range(1200)]
        write_rows(folder / "Anthropic" / "hh-rlhf", train=pairs, test=pairs[:32])
        write_rows(folder / "zwhe99" / "DeepMath-103K", train=[{"question": f"What is {n} + 7?"} for n in range(400)])
        (folder / "distilled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1::2][:256]))
        self.app = start_app(
            folder / "outputs",
            f"model.path={folder / MODEL}",
            f"api.model_name={MODEL}",
            f"api.states_dir={folder / 'states'}",
            *("api.port=0", "api.session_timeout_s=30", "actor.dtype=float32", "trainer.num_ranks=1"),
            *("rollout.dtype=float32", "rollout.max_model_len=2048", "rollout.kv_cache_gib=0.5"),
            *("rollout.max_num_seqs=64", "rollout.cpu_threads=1", "trainer.experiment=kitchen"),
            app="serve",
        )
        self.app.wait_for("TINKER_BASE_URL=")
        self.url = self.app.output.rpartition("TINKER_BASE_URL=")[2].split()[0]
        self.app.read_in_background()

    @staticmethod
    def _pair(index: int) -> dict[str, str]:
        """Two answers of a dialogue in the form of HH: short sums are chosen."""
        head = f"\n\nHuman: What is {index % 100} + {index // 100}?\n\nAssistant: "
        return {"chosen": f"{head}{index % 100 + index // 100}", "rejected": f"{head}I think it is so, or so"}

    def cook(self, recipe: str, name: str, *settings: str) -> list[dict[str, Any]]:
        """Runs a recipe to its end; the metrics of its steps."""
        log = self.folder / "logs" / name
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", *settings]
        environment = {**os.environ, "TINKER_API_KEY": KEY, "TINKER_BASE_URL": self.url, "TINKER_TELEMETRY": "0"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def state(self, name: str) -> str:
        """The last state that a recipe saved."""
        lines = (self.folder / "logs" / name / "checkpoints.jsonl").read_text().splitlines()
        return str(json.loads(lines[-1])["state_path"])


def ends(rows: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """The means of a metric over the first and the last quarter of the steps that have it."""
    values = [row[key] for row in rows if key in row]
    quarter = max(1, len(values) // 4)
    return sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory, start_shared_app: Callable[..., Any]) -> Kitchen:
    os.environ["TINKER_API_KEY"] = KEY
    return Kitchen(tmp_path_factory.mktemp("kitchen"), start_shared_app)


@pytest.fixture(scope="module")
def taught(kitchen: Kitchen) -> list[dict[str, Any]]:
    """Supervised fine-tuning by the recipe sl_loop; its state is where the other recipes start."""
    settings = ("batch_size=32", "learning_rate=2e-3", "lora_rank=32", "save_every=0")
    return kitchen.cook("sl_loop", "supervised", f"model_name={MODEL}", *settings)


def test_a_supervised_recipe_lowers_its_loss(taught: list[dict[str, Any]]) -> None:
    first, last = ends(taught, "train_mean_nll")
    assert last < 0.9 * first


def test_rl_on_arithmetic_teaches_to_end_answers_in_time(kitchen: Kitchen) -> None:
    sizes = ("group_size=8", "groups_per_batch=16", "max_tokens=12", "learning_rate=1e-3", "max_steps=10")
    rows = kitchen.cook("math_rl.train", "arithmetic", *NAMED, *sizes, *RL)
    first, last = ends(rows, "env/all/format")
    assert last > first + 0.05, "answers that do not end in time cost 0.1"


def test_a_game_of_several_turns_raises_its_reward(kitchen: Kitchen) -> None:
    sizes = ("group_size=8", "batch_size=4", "max_tokens=10", "learning_rate=1e-3", "max_steps=8")
    rows = kitchen.cook("multiplayer_rl.guess_number.train", "guess", *NAMED, *sizes, *RL[1:])
    first, last = ends(rows, "env/all/reward/total")
    assert last > first


def test_dpo_lowers_its_loss(kitchen: Kitchen, taught: list[dict[str, Any]]) -> None:
    start = f"load_checkpoint_path={kitchen.state('supervised')}"
    sizes = ("batch_size=32", "learning_rate=2e-4", "max_steps=8", "dpo_beta=0.5")
    rows = kitchen.cook("preference.dpo.train", "dpo", *NAMED, start, *sizes)
    first, last = ends(rows, "dpo_loss")
    assert last < first


def test_prompt_distillation_lowers_its_loss(kitchen: Kitchen) -> None:
    sizes = ("batch_size=32", "learning_rate=2e-3", "num_epochs=2", "save_every=0", "eval_every=0")
    rows = kitchen.cook("prompt_distillation.train", "distilled", *NAMED, "file_path=distilled.jsonl", *sizes)
    first, last = ends(rows, "train_mean_nll")
    assert last < first


def test_on_policy_distillation_nears_the_teacher(kitchen: Kitchen, taught: list[dict[str, Any]]) -> None:
    sizes = ("group_size=4", "groups_per_batch=8", "max_tokens=12", "learning_rate=1e-3", "max_steps=12")
    teacher = f"teacher_checkpoint={sampler_path(kitchen)}"
    sizes += (f"teacher_model={MODEL}", teacher, *RL[1:])
    rows = kitchen.cook("distillation.on_policy_distillation", "on_policy", *NAMED, *sizes)
    first, last = ends(rows, "teacher_kl")
    assert last < first


def sampler_path(kitchen: Kitchen) -> str:
    """The sampler weights that the supervised recipe saved."""
    lines = (kitchen.folder / "logs" / "supervised" / "checkpoints.jsonl").read_text().splitlines()
    return str(json.loads(lines[-1])["sampler_path"])
