"""What a vLLM server must be started with so that weights can be pushed into it."""

import json

from .config import SyncConfig

#: The name under which the plugin registers its engine with vLLM; one engine speaks every transport.
BACKEND = "plinth"


def server_args(config: SyncConfig, device_type: str) -> list[str]:
    """Command-line arguments for ``python -m vllm.entrypoints.openai.api_server`` (device_type ``cpu`` or ``cuda``)."""
    del config, device_type  # one engine speaks all transports on both devices; the pusher chooses per sync
    return ["--weight-transfer-config", json.dumps({"backend": BACKEND})]


def server_env(config: SyncConfig, device_type: str = "cuda") -> dict[str, str]:
    """Environment variables of the server process. They open vLLM's control routes: keep the port private.

    For ``cpu`` they also let the C library ask for huge pages, which packs large layers up to 1.8 times faster.
    """
    del config
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if device_type == "cpu" else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **huge_pages}
