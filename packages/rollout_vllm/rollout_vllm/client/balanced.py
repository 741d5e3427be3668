"""A client that spreads its requests over several servers and leaves out those that are out of service."""

from collections.abc import Callable, Sequence

from plinth_base import Endpoint

from ..config import RolloutConfig, require
from .dispatch import Dispatcher
from .request_runner import RequestRunner
from .transport import HttpClient


class BalancedClient(HttpClient):
    """Base class of the clients whose servers a `ServerWatch` can restart."""

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig, *, thread_name: str) -> None:
        require(bool(endpoints), "endpoints", endpoints, "at least one: launch a ServerGroup or give urls")
        super().__init__(endpoints, config, thread_name=thread_name)
        self.endpoints, self.config = tuple(endpoints), config
        self._urls = [endpoint.url for endpoint in self.endpoints]
        self.dispatcher = Dispatcher(len(self.endpoints), max_in_flight=config.max_samples_in_flight)
        self._runner = RequestRunner(config, self._transport, self.dispatcher)

    @property
    def policy_version(self) -> int:
        """The version of the servers' weights; 0 for a model that never changes."""
        return 0

    def report_suspects_to(self, report: Callable[[int], None]) -> None:
        """Call `report(server)` when a server cannot be reached or does not answer (see ServerWatch)."""
        self._runner.report_suspect = report
