"""Completion requests with images, which vLLM takes for chat alone: token ids, and the file of the decoded images.

vLLM's own processor makes the inputs of the vision tower, and says which tokens stand for each image. The client has
expanded the placeholders already; a request whose tokens vLLM would expand otherwise is refused.

`_serve.py` loads this file by path, so it imports nothing of this package.
"""

import asyncio
from collections.abc import Callable
from typing import Any

IMAGES = "plinth_images"
"""Name in `vllm_xargs` of the file: safetensors with `image.0`, `image.1`..., uint8 [height, width, 3]."""
SUFFIX = "+images"
"""Ends the model's name in such requests, so that a server that would not see the images does not know the model."""

Replace = Callable[..., Callable[[], None]]
"""`Patch.replace`: (target, name=value) -> function that restores."""


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

    render, update = (
        OpenAIServingCompletion.render_completion_request,
        BaseMultiModalProcessor._maybe_apply_prompt_updates,
    )

    async def render_completion_request(self: Any, request: Any) -> Any:
        file = (request.vllm_xargs or {}).pop(IMAGES, None)
        if file is None:
            return await render(self, request)
        request.model = (request.model or "").removesuffix(SUFFIX)
        if (error := await self._check_model(request)) is not None:
            return error
        self._preflight(request.n or 1)
        try:
            images = await asyncio.to_thread(read_images, file)
        except OSError as error:
            return self.create_error_response(f"the images of the request cannot be read: {error}")
        names = [f"{file}:{index}" for index in range(len(images))]
        prompt = TokensPrompt(
            prompt_token_ids=request.prompt, multi_modal_data={"image": images}, multi_modal_uuids={"image": names}
        )
        (engine_input,) = await self.online_renderer.renderer.render_cmpl_async([prompt])
        if list(engine_input["prompt_token_ids"]) != list(request.prompt):
            counts = f"{len(engine_input['prompt_token_ids'])} tokens instead of {len(request.prompt)}"
            return self.create_error_response(f"vLLM expands the placeholders of the images otherwise: {counts}")
        return [engine_input]

    def _maybe_apply_prompt_updates(self: Any, mm_items: Any, mm_res: Any) -> Any:
        """Keep tokens that are what vLLM would expand placeholders to."""
        places = self._find_mm_placeholders(mm_res.prompt_ids, mm_res.prompt_updates)
        counts = mm_items.get_all_counts()
        if any(len(places.get(modality, ())) != count for modality, count in counts.items()):
            return update(self, mm_items, mm_res)
        self._validate_mm_kwargs(mm_res.kwargs, counts)
        return mm_res.prompt_ids, places

    replace(OpenAIServingCompletion, render_completion_request=render_completion_request)
    replace(BaseMultiModalProcessor, _maybe_apply_prompt_updates=_maybe_apply_prompt_updates)
