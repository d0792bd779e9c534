"""A model of what connects the ranks: a latency and a bandwidth, and the seconds of collectives over it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from monetrun.core.errors import UsageError

GRAMMAR = "BANDWIDTH,LATENCY, such as 400Gbps,5us: Mbps, Gbps, Tbps, MB/s or GB/s; then ns, us, ms or s"

_BYTES_PER_SECOND = {"mbps": 1e6 / 8, "gbps": 1e9 / 8, "tbps": 1e12 / 8, "mb/s": 1e6, "gb/s": 1e9}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_AMOUNT = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-zµ/]+)\s*")


@dataclass(frozen=True, slots=True)
class Link:
    """What each rank sends over, and receives over at the same time.

    Attributes:
        bytes_per_second: in one direction.
        latency_seconds: of one collective, whatever its bytes.
        text: as the user wrote it.
    """

    bytes_per_second: float
    latency_seconds: float
    text: str = ""

    def all_reduce_seconds(self, nbytes: int, ranks: int) -> float:
        """Seconds of an all-reduce in a ring: each rank sends 2 (n - 1) / n of the bytes."""
        if ranks < 2:
            return 0.0
        return self.latency_seconds + 2 * (ranks - 1) / ranks * nbytes / self.bytes_per_second

    def all_gather_seconds(self, nbytes: int, ranks: int) -> float:
        """Seconds of an all-gather, or of a reduce-scatter, in a ring: each rank sends (n - 1) / n of the bytes.

        Args:
            nbytes: of what all ranks have together.
            ranks: of the group.
        """
        if ranks < 2:
            return 0.0
        return self.latency_seconds + (ranks - 1) / ranks * nbytes / self.bytes_per_second


def parse(text: str) -> Link:
    """The link that ``text`` (``"400Gbps,5us"``) describes.

    Raises:
        UsageError: it does not follow ``GRAMMAR``.
    """
    bandwidth, comma, latency = text.partition(",")
    rate, delay = _amount(bandwidth, _BYTES_PER_SECOND), _amount(latency, _SECONDS)
    if not comma or rate is None or delay is None:
        raise UsageError(f"--link {text!r} is not a link", f"give {GRAMMAR}")
    if rate == 0:
        raise UsageError(f"--link {text!r} passes nothing on", "give a bandwidth above 0")
    return Link(rate, delay, text)


def _amount(text: str, units: dict[str, float]) -> float | None:
    found = _AMOUNT.fullmatch(text)
    if found is None or found["unit"].lower() not in units:
        return None
    return float(found["number"]) * units[found["unit"].lower()]
