"""Address of a server."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Endpoint:
    """One vLLM server, or another one with the same API."""

    url: str
    """``http://host:port``."""
    api_key: str | None = field(default=None, repr=False)
    """Bearer token."""
    model: str | None = None
    """Name of the server's model; with None a client asks the server at first use."""
