"""Completion requests with images, which vLLM takes for chat alone: token ids, and the file of the decoded images.

vLLM's own processor makes the inputs of the vision tower, and says which tokens stand for each image. The client has
expanded the placeholders already; a request whose tokens vLLM would expand otherwise is refused.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from plinth_base.fence import Replace

IMAGES = "plinth_images"
"""Name in `vllm_xargs` of the file: safetensors with `image.0`, `image.1`..., uint8 [height, width, 3]."""
SUFFIX = "+images"
"""Ends the model's name in such requests, so that a server that would not see the images does not know the model."""


def read_images(file: str) -> list[Any]:
    """The images of a file, in order."""
    from PIL import Image
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        names = sorted((name for name in opened.keys() if name.startswith("image.")), key=lambda one: int(one[6:]))  # noqa: SIM118
        return [Image.fromarray(opened.get_tensor(name)) for name in names]


def take_images(replace: Replace) -> None:
    """Read the images of completion requests in this process's front end."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.inputs import TokensPrompt
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor
    from vllm.renderers.online_renderer import OnlineRenderer

    check, render = OpenAIServingCompletion.render_completion_request, OnlineRenderer.render_completion
    update: Callable[..., Any] = BaseMultiModalProcessor._maybe_apply_prompt_updates

    async def render_completion_request(self: Any, request: Any) -> Any:
        if IMAGES in (request.vllm_xargs or {}):
            request.model = (request.model or "").removesuffix(SUFFIX)
        return await check(self, request)

    async def render_completion(self: Any, request: Any, **options: Any) -> Any:
        if (file := (request.vllm_xargs or {}).pop(IMAGES, None)) is None:
            return await render(self, request, **options)
        try:
            images = await asyncio.to_thread(read_images, file)
        except OSError as error:
            return self.create_error_response(f"the images of the request cannot be read: {error}")
        names, sent = [f"{file}:{index}" for index in range(len(images))], list(request.prompt)
        prompt = TokensPrompt(
            prompt_token_ids=sent, multi_modal_data={"image": images}, multi_modal_uuids={"image": names}
        )
        (engine_input,) = await self.renderer.render_cmpl_async([prompt])
        if (expanded := list(engine_input["prompt_token_ids"])) != sent:
            counts = f"{len(expanded)} tokens instead of {len(sent)}"
            return self.create_error_response(f"vLLM expands the placeholders of the images otherwise: {counts}")
        return [engine_input]

    def _maybe_apply_prompt_updates(self: Any, *args: Any, **named: Any) -> Any:
        """Keep tokens that are what vLLM would expand placeholders to."""
        result = named.get("mm_res")  # vLLM 0.26 has its fields as arguments
        ids = named["prompt_ids"] if result is None else result.prompt_ids
        updates = named["mm_prompt_updates"] if result is None else result.prompt_updates
        places = self._find_mm_placeholders(ids, updates)
        if all(len(places.get(modality, ())) == len(one) for modality, one in updates.items()):
            return ids, places
        return update(self, *args, **named)

    replace(OpenAIServingCompletion, render_completion_request=render_completion_request)
    replace(OnlineRenderer, render_completion=render_completion)
    replace(BaseMultiModalProcessor, _maybe_apply_prompt_updates=_maybe_apply_prompt_updates)
