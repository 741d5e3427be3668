"""Runs dummy_server.py in a subprocess."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def dummy_server(*, tokens: int, prompt_tokens: int, tokens_per_s: float, lists: bool = False) -> Iterator[str]:
    """Yield the URL of a server that responds like a rollout server.

    Args:
        tokens_per_s: of each request; 0: respond immediately.
        lists: respond like stock vLLM.
    """
    script = Path(__file__).with_name("dummy_server.py")
    sizes = ["--tokens", str(tokens), "--prompt-tokens", str(prompt_tokens), "--tokens-per-s", str(tokens_per_s)]
    sizes += ["--lists"] if lists else []
    process = subprocess.Popen([sys.executable, str(script), *sizes], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
