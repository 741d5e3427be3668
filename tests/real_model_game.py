"""The environment of test_real_model.py: it asks again, in text that is no plain ASCII, up to three times."""

from typing import Any

RETORTS = ("“No”: think again,\n\t7 × 5 ≠ 36. 🙂 ", "それは違います。  <b>Größe</b>?\r\n")


class Doubter:
    """Doubts every answer; the score of a turn is the share of digits in it."""

    def reset(self, prompt: Any) -> None:
        self.turns = 0

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turns += 1
        reward = sum(map(str.isdigit, action)) / max(1, len(action))
        is_over = self.turns > len(RETORTS)
        return "" if is_over else RETORTS[self.turns - 1], reward, is_over, {}
