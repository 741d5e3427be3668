"""The game of stones: rules, strategy, and the content of the files."""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_data import DataConfig, load_prompts, write_task
from rl_data.tasks.stones import STARTS, best_move, question, random_move, read_move, rows
from rl_data.tasks.tiny_model import build_tiny_tokenizer


@given(st.integers(1, 99), st.integers())
def test_the_best_move_leaves_a_multiple_of_four_if_it_can(stones: int, seed: int) -> None:
    move = best_move(stones, random.Random(seed))
    assert 1 <= move <= min(3, stones)
    assert (stones - move) % 4 == 0 or stones % 4 == 0


@given(st.sampled_from(STARTS), st.integers())
def test_the_first_player_wins_every_start_against_any_opponent(stones: int, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        stones -= best_move(stones, rng)
        if stones == 0:
            return
        stones -= random_move(stones, rng)
        assert stones > 0


@pytest.mark.parametrize(
    ("text", "move"),
    [("take 2", 2), (" take 3\n", 3), ("take 4", None), ("take 0", None), ("2", None), ("take 2 take 2", None)],
)
def test_moves_are_read(text: str, move: int | None) -> None:
    assert read_move(text, 9) == move


def test_more_than_there_is_cannot_be_taken() -> None:
    assert read_move("take 3", 2) is None


def test_demonstrations_are_games_and_mediocre() -> None:
    _, _, demonstrations = rows(random.Random(1), num_train=1, num_val=1, num_demonstrations=2000)
    moves: list[bool] = []
    for row in demonstrations:
        (stones,) = map(int, re.findall(r"\d+", row["question"]))
        for index, part in enumerate(row["answer"]):
            if index % 2:  # the opponent has moved
                (left,) = map(int, re.findall(r"\d+", part))
                assert 1 <= stones - left <= 3
                stones = left
                continue
            move = read_move(part.removesuffix(" <eos>"), stones)
            assert move is not None
            if stones % 4:
                moves.append((stones - move) % 4 == 0)
            stones -= move
        assert row["answer"][-1].startswith("take ")
        assert stones <= 3
    assert 0.6 < sum(moves) / len(moves) < 0.75


def test_validation_starts_occur_in_no_other_game(tmp_path: Path) -> None:
    task = write_task(tmp_path, kind="stones", num_train=500, num_val=100, num_demonstrations=500, seed=2)
    tables: list[list[dict[str, Any]]] = [
        pq.read_table(f).to_pylist() for f in (task.train, task.val, task.demonstrations)
    ]
    train, val, demonstrations = ({row["question"] for row in table} for table in tables)
    assert val
    assert not val & (train | demonstrations)
    positions = {text for row in tables[2] for part in row["answer"][1::2] for text in part.splitlines()}
    assert val <= positions, "other games reach every start of the validation"
    tokenizer = build_tiny_tokenizer()
    prompts = load_prompts([task.train], tokenizer, DataConfig())
    assert all(prompt.text == f"{question(prompt.extra['stones'])}\n" for prompt in prompts)
    assert all(tokenizer.unk_token_id not in prompt.token_ids for prompt in prompts)
    assert tokenizer.decode(tokenizer("take 3")["input_ids"]) == "take 3"
