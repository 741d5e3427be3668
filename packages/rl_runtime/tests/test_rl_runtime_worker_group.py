"""Losses are sent to ranks by import path."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.errors import InputError
from rl_runtime.ranks.rank_function import RankFunction
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import policy_loss

REPO = Path(__file__).resolve().parents[3]


def test_a_loss_travels_by_import_path_with_its_settings() -> None:
    config = PolicyConfig(clip_low=0.1)
    spec = RankFunction.of(partial(policy_loss, config=config, kl_coef=0.5))
    assert (spec.module, spec.name) == ("rl_runtime.training.policy_loss", "policy_loss")
    loaded: Any = pickle.loads(pickle.dumps(spec)).load()
    assert loaded.func is policy_loss
    assert loaded.keywords == {"config": config, "kl_coef": 0.5}
    assert RankFunction.of(policy_loss).load() is policy_loss


@pytest.mark.skipif(not (REPO / "apps").is_dir(), reason="the package is tested alone, without the apps")
def test_a_loss_of_the_running_program_gets_the_programs_module_name() -> None:
    program = (
        "import runpy, sys; sys.argv = ['apps.ppo.main', '--help']\n"
        "names = runpy.run_module('apps.ppo.main', run_name='apps.ppo.main')\n"
        "import types, importlib.util\n"
        "main = sys.modules['__main__']; main.__spec__ = importlib.util.find_spec('apps.ppo.main')\n"
        "loss = names['critic_loss']; loss.__module__ = '__main__'\n"
        "from rl_runtime.ranks.rank_function import RankFunction\n"
        "spec = RankFunction.of(loss); print(spec.module, spec.name, spec.load().__module__)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["apps.ppo.main", "critic_loss", "apps.ppo.main"], result.stderr


def _local() -> Callable[..., Any]:
    def loss(*_: Any) -> None: ...

    return loss


def _of_a_script() -> Callable[..., Any]:
    loss = partial(policy_loss).func
    function = type(loss)(loss.__code__, {}, "script_loss")
    function.__module__, function.__qualname__ = "__main__", "script_loss"
    return function


@pytest.mark.parametrize(
    "loss",
    [lambda *_: None, _local(), partial(policy_loss, 1), _of_a_script()],
    ids=["lambda", "nested", "positional arguments", "of a script"],
)
def test_a_loss_that_ranks_cannot_import_is_refused(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(InputError):
        RankFunction.of(loss)
