"""Multi-turn episodes in an environment with `reset` and `step`, which may score them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .chat import ChatFormat, images_of
from .environment_process import EnvironmentProcess, EnvironmentSpec
from .episodes import Episode


@dataclass(frozen=True, kw_only=True)
class EnvironmentRollout:
    """Plays one episode in an environment of its own process: `await rollout(episode, prompt)`.

    The episode ends when the environment says so, after max_turns, or when the next observation leaves no tokens for a
    turn; the last two set `episode.is_cut` and call the environment's `cut`. Rewards that the environment gives are the
    score. `info` of the last step is in `episode.data`.
    """

    spec: EnvironmentSpec
    chat: ChatFormat
    max_turns: int
    image_file: Callable[[Sequence[str]], str | None] | None = None
    """Makes the file of images (`Request.images`) for an environment whose observations have some."""

    async def __call__(self, episode: Episode, prompt: Any) -> None:
        async with EnvironmentProcess(self.spec, prompt) as environment:
            opening, shown = await environment.reset(), list(getattr(prompt, "images", ()))
            if opening is not None:
                shown = images_of(opening)
                ids = self.chat.prompt_ids(opening, environment.tools)
                episode.replace_prompt(ids, images=await self._file(shown, episode))
            for turn_number in range(1, self.max_turns + 1):
                turn = await episode.generate()
                step = await environment.step(self.chat.text(turn.response_ids))
                episode.data.update(step.info)
                if step.reward is not None:
                    episode.reward(step.reward)
                if step.done:
                    return
                context = self.chat.context_ids(turn.response_ids, step.observation or "", environment.tools)
                if turn_number == self.max_turns or len(context) >= episode.num_tokens_left:
                    episode.is_cut = True
                    if (reward := await environment.cut()) is not None:
                        episode.reward(reward)
                    return
                new = images_of(step.observation)
                shown += new
                episode.add_context(context, images=await self._file(shown, episode) if new else None)

    async def _file(self, images: Sequence[str], episode: Episode) -> str | None:
        """The file of all images so far, which `episode.data` names."""
        if not images or self.image_file is None:
            return None
        episode.data["images"] = list(images)
        return await asyncio.to_thread(self.image_file, images)
