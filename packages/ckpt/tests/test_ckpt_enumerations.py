"""Members of enumerations in DeepSpeed's files, in both forms in which versions of Python pickle them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ckpt_fakes import Call
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ckpt import ShardError, UntrustedFileError
from ckpt.zero.deepspeed_load import _SafeReader
from ckpt.zero.zero_checkpoint import load_file
from plinth_testing import raises


def reader() -> _SafeReader:
    return _SafeReader(SimpleNamespace())


@pytest.mark.parametrize("stage", list(ZeroStageEnum), ids=lambda stage: stage.name)
@pytest.mark.parametrize("by_name", [True, False], ids=["3.11.0 to 3.11.3", "others"])
def test_stages_of_every_python_are_read(tmp_path: Path, stage: ZeroStageEnum, by_name: bool) -> None:
    call = Call(getattr, ZeroStageEnum, stage.name) if by_name else Call(ZeroStageEnum, stage.value)
    torch.save({"zero_stage": call}, tmp_path / "a.pt")
    assert reader().load(str(tmp_path / "a.pt")) == {"zero_stage": stage}
    assert load_file(tmp_path / "a.pt") == {"zero_stage": stage.value}


@pytest.mark.parametrize(
    ("owner", "name"), [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "from_bytes"), (LossScaler, "__init__")]
)
def test_nothing_else_is_an_attribute(tmp_path: Path, owner: type, name: str) -> None:
    torch.save({"zero_stage": Call(getattr, owner, name)}, tmp_path / "a.pt")
    with raises(UntrustedFileError, value=str(tmp_path / "a.pt")):
        reader().load(str(tmp_path / "a.pt"))
    with raises(ShardError, value=str(tmp_path / "a.pt")):
        load_file(tmp_path / "a.pt")
