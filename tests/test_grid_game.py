"""The environment of the preset `grid`."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from apps.grpo.grid import GridGame
from rl_data.tasks.shapes import MOVES


def started(seed: int) -> tuple[GridGame, list[dict[str, Any]]]:
    game = GridGame()
    return game, game.reset(SimpleNamespace(extra={"seed": seed}))


@pytest.mark.parametrize("seed", range(12))
def test_a_shortest_way_wins_and_other_moves_lose(seed: int) -> None:
    game, seen = started(seed)
    distance, score, done = game.num_left, 0.0, False
    while not done:
        image = Image.open(io.BytesIO(seen[0]["content"][0]["image"]))
        x, y = game.player
        assert image.getpixel((28 * x + 14, 28 * y + 14)) == (40, 70, 220)
        nearer = {"right": game.goal[0] > x, "left": game.goal[0] < x, "down": game.goal[1] > y, "up": game.goal[1] < y}
        wrong = GridGame()
        wrong.player, wrong.goal, wrong.num_left = game.player, game.goal, game.num_left
        assert wrong.step(next(move for move in MOVES if not nearer[move]))[1] == 0.0
        seen, score, done, _ = game.step(next(move for move in MOVES if nearer[move]))
    assert (score, game.num_left) == (1.0, 0)
    assert distance in (1, 2)


def test_a_turn_that_is_no_move_brings_nobody_nearer() -> None:
    game, _ = started(1)
    where = game.player
    assert game.step("red")[1] == 0.0
    assert game.player == where
