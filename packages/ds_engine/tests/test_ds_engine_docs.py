"""The README's program and the example run as documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plinth_testing import free_port, launch_ranks, run_script

PACKAGE = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.long
def test_readme_trains_a_model(tiny_model: Path, tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S)
    assert code is not None
    program = code[1].replace("path/to/model", str(tiny_model)).replace("29511", str(free_port()))
    # DeepSpeed loads the compiler's backend, which takes 2 s, only where something is compiled.
    program += "\nimport sys; assert 'torch._inductor.lowering' not in sys.modules\n"
    (tmp_path / "readme.py").write_text(program)
    printed = run_script(tmp_path / "readme.py", timeout_s=200)
    losses = [float(line.split()[0]) for line in printed.splitlines() if re.fullmatch(r"[\d.]+ [\d.]+", line)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.slow
@pytest.mark.long
def test_guard_in_a_plain_fsdp_script() -> None:
    ranks = launch_ranks(PACKAGE / "examples" / "fsdp_with_guard.py", "--break", check=False, timeout_s=200)
    assert "rank 0 step 2" in ranks[0].output
    for number, rank in enumerate(ranks):
        assert rank.code == 1, rank.output
        assert f"collective guard, rank {number}: ranks diverge" in rank.output
        assert "rank 1 called all_reduce of 1 float32 at" in rank.output
        assert "during step 3" in rank.output
