"""The grammar of --budget, and how many bytes a budget is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monetrun.core import codec
from monetrun.core.budget import (
    CPU_RESERVE_BYTES,
    CUDA_RESERVE_BYTES,
    GRAMMAR,
    Budget,
    format_budget,
    format_bytes,
    format_percent,
    parse,
    resolve,
)
from monetrun.core.errors import BudgetSyntaxError, DeviceQueryFailed, UsageError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("auto", "auto", 0.0),
        (" AUTO ", "auto", 0.0),
        ("12GiB", "bytes", 12 * GIB),
        ("12gib", "bytes", 12 * GIB),
        ("12 GiB", "bytes", 12 * GIB),
        ("12GB", "bytes", 12_000_000_000),
        ("512MiB", "bytes", 512 << 20),
        ("1.5GiB", "bytes", 3 * GIB // 2),
        (".5TiB", "bytes", 512 * GIB),
        ("100kB", "bytes", 100_000),
        ("100KiB", "bytes", 102_400),
        ("10b", "bytes", 10),
        ("1073741824", "bytes", GIB),
        ("+2GiB", "bytes", 2 * GIB),
        ("80%", "share_of_free", 0.8),
        ("100%", "share_of_free", 1.0),
        ("12.5 %", "share_of_free", 0.125),
        ("0.6x", "share_of_plain", 0.6),
        ("1X", "share_of_plain", 1.0),
        ("1.25x", "share_of_plain", 1.25),
    ],
)
def test_each_form_of_the_grammar_means_what_it_says(text: str, kind: str, value: float) -> None:
    budget = parse(text)
    assert (budget.kind, budget.value, budget.text) == (kind, value, text.strip())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a budget"),
        ("lots", "is not a budget"),
        ("1e9", "is not a budget"),
        ("12GiB please", "is not a budget"),
        ("12,5GiB", "is not a budget"),
        ("nan", "is not a budget"),
        ("infx", "is not a budget"),
        ("12Q", "no unit that is known ('Q')"),
        ("0.7", "has no unit: 0.7x (of the plain peak), 0.7GiB"),
        ("12ib", "no unit that is known ('ib')"),
        ("12GiBx", "no unit that is known ('GiBx')"),
        ("12%x", "no unit that is known ('%x')"),
        ("0", "is not positive"),
        ("0GiB", "is not positive"),
        ("0%", "is not positive"),
        ("0.0x", "is not positive"),
        ("-5GiB", "is not positive"),
        ("-0.5x", "is not positive"),
        ("100.1%", "is over 100% of what is free"),
        ("12", "is 12 bytes: write its unit (12GiB"),
        ("5000.5", "has no unit: 5000.5x"),
        ("12G", "which unit is meant: GiB (binary) or GB (decimal)"),
        ("12Mi", "which unit is meant: MiB (binary) or MB (decimal)"),
        ("9000TiB", "is over 8 PiB"),
        ("0.1b", "is less than one byte"),
        ("0." + "0" * 400 + "1x", "is out of range"),
    ],
)
def test_a_bad_budget_is_quoted_with_the_reason_and_the_grammar(text: str, reason: str) -> None:
    with pytest.raises(BudgetSyntaxError) as caught:
        parse(text)
    assert caught.value.message.startswith(f"--budget {text!r} ")
    assert reason in caught.value.message
    assert GRAMMAR in caught.value.hint
    assert caught.value.exit_code == 2


@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_a_syntax_error(text: str) -> None:
    try:
        budget = parse(text)
    except BudgetSyntaxError:
        return
    assert budget.kind == "auto" or budget.value > 0


@given(st.integers(1, (1 << 53) - (1 << 20)))
def test_a_budget_in_a_hint_holds_what_it_names_and_no_mebibyte_more(nbytes: int) -> None:
    shown = parse(format_budget(nbytes)).value
    assert nbytes <= shown < nbytes + (1 << 20)


@given(st.sampled_from([parse("auto"), parse("12GiB"), parse("29%"), parse("0.6x")]))
def test_a_budget_survives_json(budget: Budget) -> None:
    assert codec.loads(Budget, codec.dumps(budget)) == budget


def test_a_budget_in_bytes_does_not_depend_on_the_free_memory() -> None:
    assert resolve(parse("12GiB"), free_bytes=GIB, plain_peak_bytes=GIB) == 12 * GIB
    assert resolve(parse("12GiB")) == 12 * GIB


def test_auto_is_the_free_memory_less_the_reserve_and_100_percent_is_the_same() -> None:
    assert resolve(parse("auto"), free_bytes=10 * GIB, reserve_bytes=GIB) == 9 * GIB
    assert resolve(parse("100%"), free_bytes=10 * GIB, reserve_bytes=GIB) == 9 * GIB
    assert resolve(parse("50%"), free_bytes=10 * GIB, reserve_bytes=2 * GIB) == 4 * GIB


def test_the_default_reserve_holds_a_cuda_context() -> None:
    assert resolve(parse("auto"), free_bytes=10 * GIB) == 10 * GIB - CUDA_RESERVE_BYTES
    assert CUDA_RESERVE_BYTES > 670_000_000
    assert CPU_RESERVE_BYTES > 392_064 * 1024


def test_a_share_is_computed_from_the_decimal_digits_that_were_written() -> None:
    # 0.29 * 100 is 28.999999999999996 in binary fractions
    assert resolve(parse("0.29x"), plain_peak_bytes=100) == 29
    assert resolve(parse("29%"), free_bytes=100, reserve_bytes=0) == 29
    assert resolve(parse("0.6x"), plain_peak_bytes=10 * GIB) == 6 * GIB
    assert resolve(parse("1.5x"), plain_peak_bytes=10 * GIB) == 15 * GIB


def test_auto_on_a_full_device_is_refused_with_the_free_memory() -> None:
    with pytest.raises(UsageError, match=r"512\.0 MiB are free on the device, and 1\.0 GiB of them"):
        resolve(parse("auto"), free_bytes=512 << 20)


def test_a_share_of_an_unknown_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.6x is a share of the plain step's peak"):
        resolve(parse("0.6x"), free_bytes=GIB)
    with pytest.raises(DeviceQueryFailed, match="80% needs the device's free memory"):
        resolve(parse("80%"), plain_peak_bytes=GIB)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (10522669875, "9.8 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (1073689395, "1023.9 MiB"),
        (-3 * GIB, "-3.0 GiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_a_reader_would_choose(nbytes: int, shown: str) -> None:
    assert format_bytes(nbytes) == shown


def test_exact_bytes_are_shown_beside_the_rounded_ones() -> None:
    assert format_bytes(10522669875, exact=True) == "9.8 GiB (10522669875 bytes)"
    assert format_bytes(12, exact=True) == "12 bytes"


def test_a_hint_is_rounded_up_but_not_over_the_plain_peak():
    assert format_budget(10 * 1024 + 1) == "11KiB"
    assert format_budget(10 * 1024 + 1, most_bytes=11 * 1024) == "11KiB"
    exact = format_budget(10 * 1024 + 1, most_bytes=10 * 1024 + 5)
    assert exact == "10241B"
    assert resolve(parse(exact)) == 10241


def test_a_percentage_that_rounds_to_nothing_has_no_minus():
    assert [format_percent(x) for x in (0.123, -0.0004, -0.009, 1.0)] == ["12.3%", "0.0%", "-0.9%", "100.0%"]
    assert [format_percent(x, signed=True) for x in (0.123, -0.0004, -0.009)] == ["+12.3%", "+0.0%", "-0.9%"]
