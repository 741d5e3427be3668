"""An example of an environment that owns its reward: a game against an opponent.

Use it with `episode.environment=apps.grpo.stones:StoneGame` on the task `stones`; the preset `game` does.
"""

import random
from typing import TYPE_CHECKING, Any

from rl_data.tasks.stones import best_move, question, read_move

if TYPE_CHECKING:
    from rl_data import Prompt


class StoneGame:
    """Whoever takes the last stone wins. The model moves first; an illegal move loses.

    The reward is 1 for a game that the model wins, else 0.
    """

    def reset(self, prompt: "Prompt") -> None:
        """Starts from the number of stones that the prompt names."""
        self.stones = int(prompt.extra["stones"])
        self.opponent = random.Random(prompt.extra["seed"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Plays the model's move and the opponent's answer."""
        move = read_move(action, self.stones)
        if move is None:
            return "", 0.0, True, {"end": "illegal move"}
        self.stones -= move
        if self.stones == 0:
            return "", 1.0, True, {"end": "won"}
        self.stones -= best_move(self.stones, self.opponent)
        if self.stones == 0:
            return "", 0.0, True, {"end": "lost"}
        return f"{question(self.stones)}\n", 0.0, False, {}
