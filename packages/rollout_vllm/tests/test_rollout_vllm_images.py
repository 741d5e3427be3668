"""Requests with images: tokens are those of the client, and log-probs those of the model that sees the images."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_vllm_helpers import config_for_tests

from plinth_testing.vision import tiny_vlm
from rollout_vllm import Request, RolloutClient, SamplingConfig, ServerGroup
from rollout_vllm.client.protocol import completion_body


def test_a_server_that_would_not_see_the_images_does_not_know_the_model() -> None:
    sampling = SamplingConfig(n=1, max_tokens=1)
    with_images, without = (
        completion_body([1], sampling, model="policy", seed=None, images=images) for images in ("/a", None)
    )
    assert (with_images["model"], without["model"]) == ("policy+images", "policy")
    assert with_images["vllm_xargs"]["plinth_images"] == "/a"
    assert "plinth_images" not in without["vllm_xargs"]


@pytest.mark.slow
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
