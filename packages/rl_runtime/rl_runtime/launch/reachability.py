"""Checks which addresses this host reaches."""

import socket

_PROBE_TIMEOUT_S = 10.0


def why_unreachable(host: str, port: int) -> str:
    """Reason why a connection to the address fails; empty if something listens there."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""
