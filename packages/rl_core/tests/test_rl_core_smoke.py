"""Imports, exports and pickling of the package."""

import os
import pickle
import subprocess
import sys

import pytest

import rl_core


def run_alone(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_import_is_light() -> None:
    code = (
        "import sys, rl_core\n"
        "from rl_core import BatchConfig, BatchError, KLKind, LossAggregation, check_clip\n"
        "heavy = {'torch', 'numpy', 'triton', 'deepspeed', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_alone(code)


def test_exports_and_the_cpu_op_do_not_import_triton() -> None:
    code = (
        "import sys, torch, rl_core\n"
        "before = 'triton' in sys.modules\n"
        "for name in rl_core.__all__:\n"
        "    getattr(rl_core, name)\n"
        "rl_core.linear_log_prob(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64))\n"
        "assert before or 'triton' not in sys.modules\n"
    )
    run_alone(code)


def test_every_export_resolves_and_no_name_is_a_module() -> None:
    for name in rl_core.__all__:
        assert type(getattr(rl_core, name)).__name__ != "module", name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rl_core.no_such_name


def test_errors_pickle() -> None:
    for kind in (rl_core.BatchError, rl_core.ShapeError):
        error = pickle.loads(pickle.dumps(kind("said why")))
        assert isinstance(error, (kind, ValueError))
        assert str(error) == "said why"
