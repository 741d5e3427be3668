"""A run whose host is lost resumes elsewhere from `trainer.checkpoint_url`, with the bits of an uninterrupted run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager, RemoteCheckpoints
from tests.run_folders import exact_metrics, only
from tests.test_bit_exact_resume import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_a_run_resumes_on_another_host_bit_for_bit(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """PLINTH_CHECKPOINT_URL: another storage than a folder, such as s3://bucket/runs."""
    url = os.environ.get("PLINTH_CHECKPOINT_URL", f"file://{tmp_path}/storage")
    arguments = [*ARGUMENTS, "trainer.experiment=job", f"trainer.checkpoint_url={url}"]
    whole = start_app(tmp_path / "whole", *arguments)
    assert whole.finish() == 0, whole.output
    uninterrupted = only((tmp_path / "whole").iterdir())
    uploads = RemoteCheckpoints(f"{url}/{uninterrupted.name}")
    assert uploads.steps() == CheckpointManager(uninterrupted / "checkpoints").steps() == [4, 5]
    assert f"checkpoints in {uploads.url}: step 4, step 5" in whole.output
    assert "checkpoint/upload_s" in (uninterrupted / "metrics.tsv").read_text()

    lost = start_app(tmp_path / "lost", *arguments)
    lost.wait_for("step 2/5")
    lost.press_ctrl_c()
    assert lost.finish() == 130, lost.output
    first = only((tmp_path / "lost").iterdir())
    shutil.rmtree(tmp_path / "lost")

    elsewhere = tmp_path / "elsewhere"
    resumed = start_app(elsewhere, *arguments, "trainer.resume=auto")
    assert resumed.finish() == 0, resumed.output
    assert f"was downloaded from {url}/{first.name} to {elsewhere}/.downloads/{first.name}" in resumed.output
    second = only(path for path in elsewhere.iterdir() if path.name.startswith("job_"))
    expected, found = exact_metrics(uninterrupted), exact_metrics(second)
    assert found
    assert set(found) < set(expected), "the resumed run did everything again"
    assert found == {step: expected[step] for step in found}
    for weights in (uninterrupted / "model").glob("*.safetensors"):
        assert weights.read_bytes() == (second / "model" / weights.name).read_bytes()
