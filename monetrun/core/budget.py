"""The grammar of ``--budget``, and how many bytes a budget is.

    auto      the free memory of the device, less a reserve for memory that torch does not allocate
    12GiB     bytes, with a binary (KiB, MiB, GiB, TiB) or a decimal unit (kB, MB, GB, TB), or a plain integer
    80%       a share of what ``auto`` would be
    0.6x      a share of the plain step's peak

A budget bounds the bytes that torch allocates on one device at any moment of a training step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from monetrun.core.errors import BudgetSyntaxError, DeviceQueryFailed, UsageError

AUTO = "auto"
BYTES = "bytes"
SHARE_OF_FREE = "share_of_free"
SHARE_OF_PLAIN = "share_of_plain"

GRAMMAR = "auto | 12GiB | 12GB | 512MiB | 80% (of what is free) | 0.6x (of the plain peak) | bytes"

CUDA_RESERVE_BYTES = 1 << 30
"""GPU memory that a rank uses outside of torch's allocator: its CUDA context with loaded kernels (290 to 670 MB,
depending on device and driver), the rest for buffers of NCCL and cuBLAS."""

CPU_RESERVE_BYTES = 512 << 20
"""CPU memory that a rank uses outside of tensors: the interpreter with torch and torchvision imported, oneDNN's
primitives, autograd's threads. 383 MiB anonymous (beside 317 MiB of mapped libraries, which the kernel can drop) after
a step of one small convolution, torch 2.15 on x86-64 Linux; what a script imports itself is added to that."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_NUMBER = re.compile(r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(?P<unit>[A-Za-z%]*)", re.ASCII)
_LEAST_PLAIN_BYTES = 4096  # a bare "12" is a forgotten unit, not twelve bytes
_MOST_BYTES = 1 << 53  # 8 PiB; above it a float cannot represent every integer


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed ``--budget``.

    Attributes:
        kind: ``"auto"``, ``"bytes"``, ``"share_of_free"`` or ``"share_of_plain"``.
        value: bytes (a whole number), the share as a fraction (0.8 for ``80%``), or 0.0 for ``auto``.
        text: as the user wrote it, for messages.
        at_most_bytes: where another node has less; 0: no such limit.
    """

    kind: str
    value: float
    text: str
    at_most_bytes: int = 0


def parse(text: str, name: str = "--budget") -> Budget:
    """Read a budget.

    Args:
        text: what follows ``--budget``; case and surrounding blanks do not matter.
        name: of the option or argument, for messages.

    Raises:
        BudgetSyntaxError: it does not follow the grammar, or its value is out of range (zero, negative, over 100% of
            the free memory); the message quotes it with the reason, the hint is the grammar.
    """
    try:
        return _parsed(text)
    except ValueError as refused:
        hint = f"A budget is {GRAMMAR}."
        with_point = text.replace(",", ".", 1).strip()
        if "," in text and _NUMBER.fullmatch(with_point):
            hint = f"did you mean {with_point}? {hint}"
        raise BudgetSyntaxError(f"{name} {text!r} {refused}", hint) from None


def _parsed(text: str) -> Budget:
    """As ``parse``; what is wrong is a ``ValueError``."""
    stripped = text.strip()
    if stripped.lower() == AUTO:
        return Budget(AUTO, 0.0, stripped)
    match = _NUMBER.fullmatch(stripped)
    if match is None:
        raise ValueError("is not a budget")
    number, unit = Decimal(match["number"]), match["unit"].lower()
    if unit and f"{unit}b" in _UNITS:
        letter = unit[0].upper()
        raise ValueError(f"does not say which unit is meant: {letter}iB (binary) or {letter}B (decimal)")
    if unit not in ("", "%", "x") and unit not in _UNITS:
        raise ValueError(f"has no unit that is known ({match['unit']!r})")
    if number <= 0:
        raise ValueError("is not positive")
    if unit == "%":
        if number > 100:
            raise ValueError("is over 100% of what is free")
        return Budget(SHARE_OF_FREE, _positive(float(number / 100)), stripped)
    if unit == "x":
        return Budget(SHARE_OF_PLAIN, _positive(float(number)), stripped)
    return Budget(BYTES, float(_whole_bytes(number, unit, stripped)), stripped)


def _whole_bytes(number: Decimal, unit: str, text: str) -> int:
    if not unit:
        if number != number.to_integral_value():
            raise ValueError(f"has no unit: {text}x (of the plain peak), {text}GiB, ...")
        if number < _LEAST_PLAIN_BYTES:
            raise ValueError(f"is {number} bytes: write its unit ({text}GiB, {text}%, ...)")
    nbytes = number * _UNITS[unit or "b"]
    if nbytes > _MOST_BYTES:
        raise ValueError("is over 8 PiB")
    if nbytes < 1:
        raise ValueError("is less than one byte")
    return int(nbytes)


def _positive(share: float) -> float:
    if share <= 0.0 or share == float("inf"):
        raise ValueError("is out of range")
    return share


def resolve(
    budget: Budget,
    free_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    reserve_bytes: int = CUDA_RESERVE_BYTES,
) -> int:
    """The budget in bytes on each device.

    Args:
        budget: from ``parse``.
        free_bytes: the smallest free memory of all ranks; needed by ``auto`` and a percentage.
        plain_peak_bytes: the plain step's peak; needed by a share of it.
        reserve_bytes: device memory that each rank uses outside of torch's allocator. ``auto`` and percentages are of
            the free memory less this, so ``100%`` and ``auto`` are the same.

    Raises:
        DeviceQueryFailed: ``auto`` or a percentage, and the free memory is unknown.
        UsageError: nothing is left on the device after the reserve, or the plain peak is unknown.
    """
    if budget.kind == BYTES:
        return int(budget.value)
    if budget.kind == SHARE_OF_PLAIN:
        if plain_peak_bytes is None:
            raise UsageError(
                f"the budget {budget.text} is a share of the plain step's peak, which is not known yet",
                "Give the budget in bytes (12GiB), or let the model be captured first.",
            )
        nbytes = max(1, _share(budget.value, plain_peak_bytes))
        return min(nbytes, budget.at_most_bytes) if budget.at_most_bytes else nbytes
    if free_bytes is None:
        raise DeviceQueryFailed(
            f"the budget {budget.text} needs the device's free memory, which could not be read",
            "Give the budget in bytes (12GiB) or as a share of the plain peak (0.6x).",
        )
    usable_bytes = free_bytes - reserve_bytes
    if usable_bytes <= 0:
        raise UsageError(
            f"the budget {budget.text}: {format_bytes(free_bytes)} are free on the device,"
            f" and {format_bytes(reserve_bytes)} of them are kept for what is not torch's",
            "End what else runs on the device, or give the budget in bytes.",
        )
    return usable_bytes if budget.kind == AUTO else max(1, _share(budget.value, usable_bytes))


def is_auto(budget: Budget) -> bool:
    """Whether the user has stated no amount; also where the nodes have made bytes of it."""
    return budget.text.lower() == AUTO


def smallest(budgets: Sequence[Budget]) -> Budget:
    """The smallest of budgets in bytes and of shares of the plain peak, at least one."""
    known = [b for b in budgets if b.kind == BYTES]
    shares = [b for b in budgets if b.kind == SHARE_OF_PLAIN]
    least = min(known, key=lambda b: b.value, default=None)
    if not shares:
        assert least is not None
        return least
    share = min(shares, key=lambda b: b.value)
    return share if least is None else replace(share, at_most_bytes=int(least.value))


def _share(share: float, nbytes: int) -> int:
    # Of the decimal digits that the user wrote, not of the nearest binary fraction: 0.29x of 100 is 29, not 28.
    return int(Decimal(repr(share)) * nbytes)


def format_bytes(nbytes: int, *, exact: bool = False) -> str:
    """``"9.8 GiB"``; with ``exact``, ``"9.8 GiB (10522669875 bytes)"``."""
    size, unit = abs(nbytes), 0
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    # 1023.95 and more would print as 1024.0 instead of 1.0 of the next unit.
    while unit + 1 < len(units) and size * 20 >= (20 * 1024 - 1) << (10 * unit):
        unit += 1
    if unit == 0:
        return f"{nbytes} bytes"
    rounded = f"{nbytes / (1 << (10 * unit)):.1f} {units[unit]}"
    return f"{rounded} ({nbytes} bytes)" if exact else rounded


def format_budget(nbytes: int, most_bytes: int | None = None) -> str:
    """The smallest budget in whole MiB (KiB below 16 MiB) that holds ``nbytes``, as ``parse`` reads it.

    Rounded up, so that a budget copied from a hint does not fail again; in bytes where that is over ``most_bytes``.
    """
    unit, name = (1 << 20, "MiB") if nbytes >= 16 << 20 else (1 << 10, "KiB")
    rounded = max(1, -(-nbytes // unit))
    return f"{rounded}{name}" if most_bytes is None or rounded * unit <= most_bytes else f"{nbytes}B"


def format_share(nbytes: int, plain_bytes: int) -> str:
    """The smallest share of ``plain_bytes`` in hundredths that holds ``nbytes``, as ``parse`` reads it."""
    return f"{-(-100 * nbytes // plain_bytes) / 100:.2f}x"


def format_percent(share: float, *, signed: bool = False) -> str:
    """``"12.3%"``, or with its sign ``"+12.3%"``; what rounds to 0 has no minus."""
    rounded = round(share, 3) + 0.0
    return f"{rounded:+.1%}" if signed else f"{rounded:.1%}"


def format_overhead(overhead: float, bound: float) -> str:
    """``"+12.3% (bound 11.8%, gap 0.5%)"``."""
    gap = format_percent(overhead - bound)
    return f"{format_percent(overhead, signed=True)} (bound {format_percent(bound)}, gap {gap})"
