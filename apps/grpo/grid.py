"""An example of an environment whose observations are images: move a blue square to a green one.

Use it with `episode.environment=apps.grpo.grid:GridGame`; the preset `grid` does.
"""

import random
from typing import TYPE_CHECKING, Any

from rl_data.tasks.shapes import MOVE, MOVES, board, draw_board

if TYPE_CHECKING:
    from rl_data import Prompt


class GridGame:
    """The reward is 1 for a model that reaches the goal by a shortest way, else 0."""

    preload = ("PIL.ImageDraw", "PIL.PngImagePlugin")
    """Imported once, and not in the process of each episode."""

    def reset(self, prompt: "Prompt") -> list[dict[str, Any]]:
        """Starts from the board of the seed that the prompt has."""
        self.player, self.goal = board(random.Random(prompt.extra["seed"]))
        self.num_left = sum(abs(a - b) for a, b in zip(self.player, self.goal, strict=True))
        return self._shown()

    def step(self, action: str) -> tuple[list[dict[str, Any]] | str, float, bool, dict[str, Any]]:
        """Moves the square."""
        dx, dy = MOVES.get(action.strip(), (0, 0))
        self.player = (self.player[0] + dx, self.player[1] + dy)
        self.num_left -= 1
        if self.player == self.goal:
            return "", 1.0, True, {"end": "reached"}
        if not self.num_left or not all(0 <= one <= 1 for one in self.player):
            return "", 0.0, True, {"end": "lost"}
        return self._shown(), 0.0, False, {}

    def _shown(self) -> list[dict[str, Any]]:
        image = {"type": "image", "image": draw_board(self.player, self.goal)}
        return [{"role": "user", "content": [image, {"type": "text", "text": MOVE}]}]
