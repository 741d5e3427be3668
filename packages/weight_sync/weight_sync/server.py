"""What a vLLM server must be started with so that weights can be pushed into it."""

import json
import shlex
from typing import TYPE_CHECKING

from .config import SyncConfig
from .control import ServerControl
from .errors import ServerError, SyncConfigError

if TYPE_CHECKING:
    from .pusher import Endpoint

#: The name under which the plugin registers its engine with vLLM; one engine speaks every transport.
BACKEND = "plinth"

_ARGUMENTS = ("--weight-transfer-config", json.dumps({"backend": BACKEND}))


def server_args(config: SyncConfig, device_type: str) -> list[str]:
    """Command-line arguments for ``python -m vllm.entrypoints.openai.api_server`` (device_type ``cpu`` or ``cuda``)."""
    del config, device_type  # one engine speaks all transports on both devices; the pusher chooses per sync
    return list(_ARGUMENTS)


def server_env(config: SyncConfig, device_type: str = "cuda") -> dict[str, str]:
    """Environment variables of the server process. They open vLLM's control routes: keep the port private.

    For ``cpu`` they also let the C library ask for huge pages, which packs large layers up to 1.8 times faster.
    """
    del config
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if device_type == "cpu" else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **huge_pages}


def check_server(endpoint: "Endpoint", *, timeout_s: float = 120.0) -> None:
    """Whether a server that runs can be pushed to: it is asked and stays as it is. For before a trainer is built.

    A release that does not tell how it was started is taken at its routes; the first push finds out the rest.

    Raises:
        ServerError: no answer within ``timeout_s``, the key is refused, or the control routes are missing.
        SyncConfigError: it was started without this package's backend.
    """
    control = ServerControl(endpoint.url, endpoint.api_key, timeout_s)
    control.world_size()
    try:
        backend = control.backend()
    except LookupError:
        return
    except ServerError as error:
        if error.status == 404:
            return
        raise
    if backend != BACKEND:
        given = f"the weight-transfer backend {backend!r}" if backend else "no weight-transfer backend"
        raise SyncConfigError(
            f"the server at {endpoint.url} was started with {given}; start it with {shlex.join(_ARGUMENTS)}"
        )
