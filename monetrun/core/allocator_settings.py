"""The settings of torch's CUDA caching allocator that decide what it reserves, read from ``PYTORCH_ALLOC_CONF``."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""The variable that, set to anything, has torch take each request from the driver, and count none."""

_MIB = 1 << 20
LEAST_BLOCK = 512
MOST_SMALL = _MIB
"""The largest request that the small pool serves."""
SMALL_SEGMENT = 2 * _MIB
ROUND_LARGE = 2 * _MIB
UNLIMITED = (1 << 64) - 1
_LEAST_OWN_SEGMENT = 10 * _MIB  # requests below it share a segment of ``large_segment_bytes``
# ``roundup_power2_divisions`` is given for requests from 1 MiB to 64 GiB, by powers of two
_DIVISION_INTERVALS = 16


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings in ``PYTORCH_ALLOC_CONF`` that decide what is reserved.

    Attributes:
        expandable: segments grow as needed (``expandable_segments``).
        max_split_bytes: larger blocks are not split (``max_split_size_mb``).
        max_rounding_bytes: by how much more a block that is not split may have (``max_non_split_rounding_mb``).
        large_segment_bytes: of segments for requests up to 10 MiB (``large_segment_size_mb``).
        divisions: for requests of 1 MiB, 2 MiB, 4 MiB, ... and more: into how many steps the next power of two is
            divided (``roundup_power2_divisions``; 0: requests are rounded to 512 bytes). Empty: 0 for all.
    """

    expandable: bool = False
    max_split_bytes: int = UNLIMITED
    max_rounding_bytes: int = 20 * _MIB
    large_segment_bytes: int = 20 * _MIB
    divisions: tuple[int, ...] = ()

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: a number cannot be right.
        """
        if min(self.max_split_bytes, self.max_rounding_bytes, *self.divisions) < 0 or self.large_segment_bytes <= 0:
            raise ValueError("a setting of the allocator is negative")

    def rounded(self, nbytes: int) -> int:
        """The bytes of the block that a request takes."""
        if nbytes < LEAST_BLOCK:
            return LEAST_BLOCK
        steps = self._steps(nbytes)
        if steps > 1 and nbytes > LEAST_BLOCK * steps:
            return _up_to_division(nbytes, steps)
        return -(-nbytes // LEAST_BLOCK) * LEAST_BLOCK

    def segment_bytes(self, nbytes: int) -> int:
        """What is reserved at once for a request of ``nbytes`` that nothing free can serve."""
        if nbytes <= MOST_SMALL:
            return SMALL_SEGMENT
        if nbytes < _LEAST_OWN_SEGMENT:
            return self.large_segment_bytes
        return -(-nbytes // ROUND_LARGE) * ROUND_LARGE

    def _steps(self, nbytes: int) -> int:
        if not self.divisions:
            return 0
        index = max(0, nbytes.bit_length() - _MIB.bit_length())
        return self.divisions[min(index, len(self.divisions) - 1)]


def _up_to_division(nbytes: int, steps: int) -> int:
    """``nbytes`` rounded up to a multiple of (the power of two below it) / ``steps``."""
    if nbytes & (nbytes - 1) == 0:
        return nbytes
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor // steps
    if step == 0:
        return floor << 1
    return nbytes if nbytes % step == 0 else nbytes - nbytes % step + step


def settings_text() -> str:
    """How CUDA's allocator is configured in the environment; where both variables are set, torch reads the old one."""
    found = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return os.environ.get("PYTORCH_ALLOC_CONF", "") if found is None else found


@functools.lru_cache(16)
def parse_settings(text: str) -> AllocatorSettings:
    """Read ``PYTORCH_ALLOC_CONF``: ``"expandable_segments:True,max_split_size_mb:128"``.

    Settings that do not change what is reserved are passed over, and so is what torch itself will refuse.
    """
    found: dict[str, Any] = {}
    for name, value in _pairs(text):
        try:
            if name == "expandable_segments":
                found["expandable"] = value == "True"
            elif name == "max_split_size_mb":
                found["max_split_bytes"] = min(UNLIMITED, int(value) * _MIB)
            elif name == "max_non_split_rounding_mb":
                found["max_rounding_bytes"] = min(UNLIMITED, int(value) * _MIB)
            elif name == "large_segment_size_mb":
                found["large_segment_bytes"] = int(value) * _MIB
            elif name == "roundup_power2_divisions":
                found["divisions"] = _divisions(value)
        except ValueError:
            continue
    if "large_segment_bytes" in found:
        found.setdefault("max_rounding_bytes", found["large_segment_bytes"])
    return AllocatorSettings(**found)


def _pairs(text: str) -> list[tuple[str, str]]:
    """``"a:1,b:[64:2,>:1]"`` as ``[("a", "1"), ("b", "[64:2,>:1]")]``."""
    pairs, depth, start = [], 0, 0
    text = "".join(text.split()) + ","
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            name, _, value = text[start:i].partition(":")
            pairs.append((name, value))
            start = i + 1
    return pairs


def _divisions(value: str) -> tuple[int, ...]:
    """``"4"`` for all sizes, or ``"[256:1,512:2,>:4]"``: from each size in MiB, ``>`` for all that is larger."""
    if not value.startswith("["):
        return (int(value),) * _DIVISION_INTERVALS
    steps = [0] * _DIVISION_INTERVALS
    largest, first = 1, True  # torch leaves the first interval out of ``>``
    for size, count in (pair.split(":") for pair in value.strip("[]").split(",")):
        if size == ">":
            steps[largest:] = [int(count)] * (_DIVISION_INTERVALS - largest)
            continue
        index = min(int(size).bit_length(), _DIVISION_INTERVALS) - 1
        if first:
            steps[:index], first = [int(count)] * index, False
        steps[index] = int(count)
        largest = index + 1
    return tuple(steps)
