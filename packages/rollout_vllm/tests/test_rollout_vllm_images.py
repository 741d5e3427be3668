"""Requests with images: tokens are those of the client, and log-probs those of the model that sees the images."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_vllm_helpers import ByteTokenizer, config_for_tests, group_of_one

from plinth_testing.vision import tiny_vlm
from rollout_vllm import (
    ChatFormat,
    EnvironmentFailedError,
    EnvironmentRollout,
    EnvironmentSpec,
    Group,
    Request,
    RolloutClient,
    SamplingConfig,
    ServerGroup,
    run_episodes,
)
from rollout_vllm.client.protocol import completion_body
from rollout_vllm.episodes.environment_process import EnvironmentProcess


def test_a_server_that_would_not_see_the_images_does_not_know_the_model() -> None:
    sampling = SamplingConfig(n=1, max_tokens=1)
    with_images, without = (
        completion_body([1], sampling, model="policy", seed=None, images=images) for images in ("/a", None)
    )
    assert (with_images["model"], without["model"]) == ("policy+images", "policy")
    assert with_images["vllm_xargs"]["plinth_images"] == "/a"
    assert "plinth_images" not in without["vllm_xargs"]


class PartsTokenizer(ByteTokenizer):
    """With a template that writes `#` for an image."""

    chat_template = "parts"

    def apply_chat_template(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **_: Any) -> str:
        texts = ["".join(one.get("text", "#") for one in message["content"]) for message in messages]
        return "".join(f"<{text}>" for text in texts) + ">" * add_generation_prompt


class SeeingClient:
    """Answers "go" to every turn, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        self.requests.append(request)
        return group_of_one(request, [*b"go", 256])


def test_images_of_observations_travel_as_files_and_every_turn_sees_those_before_it(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def file_of(images: Sequence[str]) -> str:
        asked.append(list(images))
        return f"file {len(images)}"

    def with_placeholders(text: str, images: Sequence[str]) -> list[int]:
        assert text.count("#") == len(images)
        return list(text.replace("#", "##").encode())

    folder, client = tmp_path / "images", SeeingClient()
    spec = EnvironmentSpec(path="rollout_vllm_environments:Painter", image_folder=str(folder))
    chat = ChatFormat(PartsTokenizer(), vision=with_placeholders)
    rollout = EnvironmentRollout(spec=spec, chat=chat, max_turns=2, image_file=file_of)
    requests = [Request(prompt_id="p", prompt_ids=[1])]
    played: Any = lambda episode: rollout(episode, None)  # noqa: E731
    client_of_test: Any = client
    (group,) = asyncio.run(run_episodes(client_of_test, requests, played, SamplingConfig(n=1, max_tokens=64)))
    (sample,) = group.samples
    assert [(bytes(one.prompt_ids[:6]), one.images) for one in client.requests] == [
        (b"<##a>>", "file 1"),
        (b"<##a>>", "file 2"),
    ]
    assert sample.images == "file 2"
    assert bytes(one for one in sample.response_ids.tolist() if one < 256) == b"go><##>>go"
    first, second = asked[-1]
    assert sample.data["images"] == asked[-1]
    assert Path(first).read_bytes() == b"first"
    assert Path(second).read_bytes().startswith(b"\x89PNG")
    assert {Path(first).parent, Path(second).parent} == {folder}


@pytest.mark.parametrize(("isolated", "folder"), [(True, "/images"), (False, None)])
def test_an_environment_that_is_shut_in_names_no_files_of_this_host(isolated: bool, folder: str | None) -> None:
    spec = EnvironmentSpec(path="a:B", isolated=isolated, image_folder=folder)
    seen = [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd" if isolated else {"base64": ""}}]}]
    with pytest.raises(EnvironmentFailedError):
        EnvironmentProcess(spec, None)._seen(seen)


@pytest.mark.slow
@pytest.mark.long  # a server of its own
def test_samples_of_a_prompt_with_images_have_the_log_probs_of_the_model(tmp_path: Path) -> None:
    from PIL import Image
    from safetensors.numpy import save_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tiny_vlm(tmp_path / "model")
    processor = AutoProcessor.from_pretrained(folder)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 56, 3), dtype=np.uint8)
    save_file({f"image.{index}": one for index, one in enumerate(pixels)}, tmp_path / "images.safetensors")
    text = "<|im_start|>user\n<image>a<image>b<|im_end|>\n<|im_start|>assistant\n"
    inputs: Any = processor(
        text=[text], images=[Image.fromarray(one) for one in pixels], add_special_tokens=False, return_tensors="pt"
    )
    ids, file = inputs["input_ids"][0].tolist(), str(tmp_path / "images.safetensors")
    request = Request(prompt_id="a", prompt_ids=ids, seed=1, images=file)
    sampling = SamplingConfig(n=2, max_tokens=6, temperature=1.0, ignore_eos=True)
    config = config_for_tests(max_model_len=256)
    with ServerGroup.launch(folder, config, log_dir=tmp_path) as group:
        group.wait_ready()
        with RolloutClient(group.endpoints, config) as client:
            (finished,) = client.run(client.generate([request], sampling))
            place = ids.index(processor.image_token_id)
            short = dataclasses.replace(request, prompt_ids=ids[:place] + ids[place + 1 :])
            lost = dataclasses.replace(request, images=str(tmp_path / "none"))
            (blind,) = client.run(client.generate([dataclasses.replace(request, images=None)], sampling))
            refused = client.run(client.generate([short, lost], sampling))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for sample in finished.samples:
        assert sample.images == file
        whole = torch.tensor([[*ids, *sample.response_ids.tolist()]])
        given = {name: value for name, value in inputs.items() if name.startswith("pixel")}
        with torch.no_grad():
            logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), **given).logits[0]
        expected = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, whole[0, len(ids) :, None])[:, 0]
        np.testing.assert_allclose(sample.log_probs, expected.numpy(), atol=2e-5)
    assert not np.allclose(finished.samples[0].log_probs[0], blind.samples[0].log_probs[0], atol=1e-4)
    assert [[failure.kind for failure in group.failures] for group in refused] == [["refused"] * 2] * 2
