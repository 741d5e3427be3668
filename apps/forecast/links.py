"""How many bytes of a collective each link carries, for NCCL's ring algorithm. Pure functions.

A ring passes over all GPUs host by host. For W ranks on hosts with g GPUs each, every GPU sends a share of (W - 1) / W
of an all-gather's result or a reduce-scatter's input to its successor, and twice that in an all-reduce. Of the W steps
of a ring, one in g leaves a host. NCCL runs g rings that leave a host through the cards of different GPUs, so each GPU
sends 1 / g of its bytes over its own card and the rest over NVLink.
"""

from dataclasses import dataclass

from ds_engine.planning.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes that one GPU sends over each kind of link, and receives as well."""

    nvlink: float = 0.0
    network: float = 0.0

    def __add__(self, other: "Links") -> "Links":
        return Links(nvlink=self.nvlink + other.nvlink, network=self.network + other.network)

    def times(self, number: float) -> "Links":
        """The same bytes `number` times."""
        return Links(nvlink=self.nvlink * number, network=self.network * number)

    def seconds(self, *, nvlink_gb_per_s: float, network_gb_per_s: float) -> float:
        """The slower of the two links; both are busy at the same time."""
        return max(self.nvlink / nvlink_gb_per_s, self.network / network_gb_per_s) / 1e9


def ring_links(traffic: Traffic, *, ranks: int, ranks_per_host: int) -> Links:
    """Bytes of one GPU for collectives over all ranks.

    Args:
        ranks_per_host: ranks of a host; all of them on one host if there are fewer than that.
    """
    sent = (traffic.all_gather + traffic.reduce_scatter + 2 * traffic.all_reduce) * (ranks - 1) / ranks
    leaving = 1 / ranks_per_host if ranks > ranks_per_host else 0.0
    return Links(nvlink=sent * (1 - leaving), network=sent * leaving)
