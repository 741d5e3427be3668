"""The tree of an episode that branches: tokens in, spans out. No processes.

A turn is a prompt and the tokens that the policy sampled after it. A turn whose prompt begins with all tokens of
another turn continues that one; any other prompt begins a branch, which shares with the rest what its tokens have in
common. A path goes from a first prompt to a turn that no other one continues.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from plinth_base.errors import shown

from ..samples import IntArray, Sample, VersionSpan, merge_spans


@dataclass(frozen=True, eq=False)
class Turn:
    """A prompt and its sampled tokens. parent: index of the turn that it continues; None: a path begins with it."""

    prompt_ids: IntArray
    sample: Sample
    parent: int | None

    @cached_property
    def token_ids(self) -> IntArray:
        """int32, prompt and sampled tokens."""
        return np.concatenate([self.prompt_ids, self.sample.response_ids])


class Path(NamedTuple):
    """turns: indices from the first prompt on. own: those that are trained here; earlier paths train the others."""

    turns: tuple[int, ...]
    own: frozenset[int]


class EpisodeTree:
    """The turns of one episode, in the order in which they ended. decode: the text of tokens, for `lines`."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.decode: Callable[[IntArray], str] = lambda _: ""

    def add(self, prompt_ids: Sequence[int] | IntArray, sample: Sample) -> int:
        """Adds a turn; returns its index. It continues the longest turn that its prompt begins with, the latest one of
        equals."""
        prompt = np.asarray(prompt_ids, np.int32)
        begins = [i for i, turn in enumerate(self.turns) if _common(prompt, turn.token_ids) == turn.token_ids.size]
        parent = max(begins, key=lambda index: (self.turns[index].token_ids.size, index), default=None)
        self.turns.append(Turn(prompt, sample, parent))
        return len(self.turns) - 1

    def paths(self) -> list[Path]:
        """All paths, that of the latest turn first. Each turn is the own turn of exactly one of them."""
        parents = {turn.parent for turn in self.turns}
        leaves = [index for index in range(len(self.turns)) if index not in parents]
        trained: set[int] = set()
        paths = []
        for leaf in [*leaves[-1:], *leaves[:-1]]:
            turns = self._up_to(leaf)
            paths.append(Path(turns, frozenset(turns) - trained))
            trained.update(turns)
        return paths

    def samples(
        self, of_episode: Sample, rewards: dict[int, float], *, start: int | None = None, tail: Sequence[int] = ()
    ) -> list[Sample]:
        """`of_episode` with the tokens of each path, in the order of `paths`.

        In a response only the own turns of its path are sampled tokens. rewards: by turn, at its last token. start:
        tokens of the prompt; None: a path's first prompt is the prompt. tail: context after the last turn of a path.
        """
        return [self._sample(path, of_episode, rewards, start, tail) for path in self.paths()]

    def lines(self) -> list[str]:
        """The tree for a reader: one line for each turn, indented below the turn that it continues."""
        children: dict[int | None, list[int]] = {}
        for index, turn in enumerate(self.turns):
            children.setdefault(turn.parent, []).append(index)

        def below(parent: int | None, depth: int) -> list[str]:
            lines = []
            for index in children.get(parent, ()):
                turn = self.turns[index]
                before = 0 if parent is None else self.turns[parent].token_ids.size
                earlier = self.turns[:index] if parent is None else []
                shared = max((_common(turn.prompt_ids, one.token_ids) for one in earlier), default=0)
                parts = [
                    f"{ids.size} {kind}" + (f" {shown(text)}" if (text := self.decode(ids[start:]).strip()) else "")
                    for ids, start, kind in (
                        (turn.prompt_ids[before:], shared, "context"),
                        (turn.sample.response_ids, 0, f"sampled (version {turn.sample.policy_version})"),
                    )
                ]
                note = f", branches after {shared} common tokens" if shared else ""
                lines.append(f"{'  ' * depth}turn {index}{note}: {', '.join(parts)}")
                # a conversation is a list, not a staircase: only branches are indented
                lines += below(index, depth + (len(children.get(index, ())) > 1))
            return lines

        return below(None, 0)

    def _up_to(self, leaf: int) -> tuple[int, ...]:
        turns = [leaf]
        while (parent := self.turns[turns[-1]].parent) is not None:
            turns.append(parent)
        return tuple(reversed(turns))

    def _sample(
        self, path: Path, of_episode: Sample, rewards: dict[int, float], start: int | None, tail: Sequence[int]
    ) -> Sample:
        turns = [(index, self.turns[index]) for index in path.turns]
        leaf, start = turns[-1][1], turns[0][1].prompt_ids.size if start is None else start
        ids = np.concatenate([leaf.token_ids, np.asarray(tail, np.int32)])
        size = ids.size - start
        mask, log_probs, at_tokens = np.zeros(size, np.bool_), np.zeros(size, np.float32), np.zeros(size, np.float32)
        spans: list[VersionSpan] = []
        end = start
        for index, turn in turns:
            before = spans[-1].policy_version if spans else turn.sample.policy_version
            spans += [VersionSpan(before, turn.prompt_ids.size - end), *turn.sample.version_spans]
            begin, end = turn.prompt_ids.size, turn.token_ids.size
            if index in path.own and end > begin:
                mask[begin - start : end - start] = True
                if turn.sample.log_probs is not None:
                    log_probs[begin - start : end - start] = turn.sample.log_probs
                at_tokens[end - start - 1] = rewards.get(index, 0.0)
        spans.append(VersionSpan(spans[-1].policy_version, len(tail)))
        return replace(
            of_episode,
            prompt_ids=ids[:start],
            response_ids=ids[start:],
            log_probs=None if any(turn.sample.log_probs is None for _, turn in turns) else log_probs,
            response_mask=mask,
            routes=leaf.sample.routes,
            version_spans=merge_spans(spans),
            turn_rewards=at_tokens[mask] if rewards else None,
        )


def _common(first: IntArray, second: IntArray) -> int:
    """Length of the longest common prefix."""
    size = min(first.size, second.size)
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if differs.size else size
