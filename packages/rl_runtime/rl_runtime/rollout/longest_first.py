"""The order in which groups are requested: those with the longest expected responses first.

Where a server has more samples than it decodes at once, a long response that starts last makes the others wait for it.
"""

from collections.abc import Sequence

import numpy as np

from rollout_vllm import Group, Request


class EarlierLengths:
    """Mean response length of each prompt's latest group."""

    def __init__(self) -> None:
        self.by_prompt: dict[str, float] = {}

    def note(self, group: Group) -> None:
        """Remember the lengths of a group that has ended."""
        if group.samples:
            self.by_prompt[group.request.prompt.id] = group.num_tokens / len(group.samples)

    def order(self, requests: Sequence[Request | Group]) -> list[Request | Group]:
        """Unfinished groups in their order, then the requests, longest first; a new prompt counts as an average one."""
        average = float(np.mean(list(self.by_prompt.values()))) if self.by_prompt else 0.0

        def key(start: Request | Group) -> tuple[bool, float]:
            if isinstance(start, Group):
                return False, 0.0
            return True, -self.by_prompt.get(start.prompt.id, average)

        return sorted(requests, key=key)
