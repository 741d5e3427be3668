"""The environment of the preset `game`."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from apps.grpo.stones import StoneGame
from rl_data.tasks.stones import STARTS, best_move, random_move


def play(stones: int, seed: int, move_of: Any) -> tuple[float, int]:
    """The score and the number of turns."""
    game, rng = StoneGame(), random.Random(seed)
    game.reset(SimpleNamespace(extra={"stones": stones, "seed": seed}))
    score = 0.0
    for turn in range(1, 100):
        _, reward, done, _ = game.step(f"take {move_of(game.stones, rng)}")
        score += reward
        if done:
            return score, turn
    raise AssertionError("the game does not end")


@pytest.mark.parametrize("stones", STARTS)
def test_the_right_moves_win_within_the_turns_of_the_preset(stones: int) -> None:
    for seed in range(20):
        score, turns = play(stones, seed, best_move)
        assert score == 1.0
        assert turns <= 12


def test_random_moves_mostly_lose() -> None:
    scores = [play(stones, seed, random_move)[0] for stones in STARTS for seed in range(50)]
    assert 0.0 < sum(scores) / len(scores) < 0.35


@pytest.mark.parametrize("text", ["take 4", "", "<unk>"])
def test_an_illegal_move_loses(text: str) -> None:
    game = StoneGame()
    game.reset(SimpleNamespace(extra={"stones": 9, "seed": 1}))
    assert game.step(text)[1:3] == (0.0, True)
