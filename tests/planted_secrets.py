"""Secrets to plant in an environment and in URLs, and the search for them in what a run writes."""

from collections.abc import Iterable
from pathlib import Path

ENVIRONMENT = {
    "WANDB_API_KEY": "planted-wandb-0f1e2d3c4b5a",
    "HF_TOKEN": "hf_plantedABCDEFGHIJKL",
    "AWS_ACCESS_KEY_ID": "PLANTEDKEYID12345678",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret+0123456789",
    "AWS_SESSION_TOKEN": "planted-session-token-987",
    "PLANTED_API_KEY": "planted-key-of-a-server-42",
}
PASSWORD = "planted-password"
PARAMETER = "planted-parameter"
ALL = (*ENVIRONMENT.values(), PASSWORD, PARAMETER)


def leaks(output: str, folder: Path, secrets: Iterable[str] = ALL) -> list[str]:
    """`place: secret` for each secret in the output of a run and in the names and bytes of the files of its folder."""
    texts = {"the output": output.encode()}
    texts |= {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [
        f"{name}: {secret}"
        for name, text in texts.items()
        for secret in secrets
        if secret.encode() in text or secret in name
    ]
