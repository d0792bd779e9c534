"""`monetrun batch`: its limits and the placeholder for the batch."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from monetrun.commands.batch import Accumulation, prepare_parser, read_limits, show, with_batch
from monetrun.core.errors import UsageError
from monetrun.planning.batch import Found, Verified, feeds_only
from monetrun.planning.batch_sizes import Sizes

pytestmark = pytest.mark.usefixtures("plain_surroundings")


def parsed(*words):
    return prepare_parser().parse_launch(words)


def test_the_batch_replaces_the_placeholder():
    options, _ = parsed("train.py", "--lr=1", "--batch={batch}", "{batch}")
    assert with_batch(options, 12).script_args == ("--lr=1", "--batch=12", "12")
    assert options.script_args[2] == "{batch}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", "--batch", "8"], "train.py contains {batch}"),
        (["--max-overhead", "much", "train.py", "{batch}"], "'much'"),
        (["--max-overhead", "20", "train.py", "{batch}"], "'20'"),
        (["--max-overhead=-5%", "train.py", "{batch}"], "'-5%'"),
        (["--multiple", "0", "train.py", "{batch}"], "--multiple 0"),
        (["--trials", "4", "train.py", "{batch}"], "'4'"),
        (["--trials", "4,4", "train.py", "{batch}"], "'4,4'"),
        (["--trials", "4, 4", "train.py", "{batch}"], "'4, 4'"),
        (["--trials", "4,04", "train.py", "{batch}"], "'4,04'"),
        (["--trials", "4,8,8", "train.py", "{batch}"], "'4,8,8'"),
        (["--trials", "0,4", "train.py", "{batch}"], "'0,4'"),
    ],
)
def test_limits_that_cannot_be_used_are_quoted_with_an_example(words, message):
    with pytest.raises(UsageError, match=message) as refused:
        read_limits(*parsed(*words), 1 << 30)
    assert refused.value.hint


def test_a_share_of_the_plain_peak_is_no_limit_for_a_batch():
    with pytest.raises(UsageError, match=r"0\.5x is a share of the plain peak, which grows with the batch"):
        read_limits(*parsed("--budget=0.5x", "train.py", "{batch}"), None)


def test_limits_are_read():
    words = ["--multiple=3", "--max-overhead=12.5%", "--algorithm=greedy", "--solver-seconds=3", "train.py", "{batch}"]
    read = read_limits(*parsed(*words), 99)
    assert (read.budget_bytes, read.max_overhead, read.sizes, read.trials) == (99, 0.125, Sizes(3), (6, 12))
    assert (read.algorithm, read.options.seconds) == ("greedy", 3.0)
    read = read_limits(*parsed("--trials=32,16", "--max-overhead=0.1", "train.py", "{batch}"), 99)
    assert (read.trials, read.max_overhead) == ((16, 32), 0.1)


def test_accumulated_batches_are_the_divisors_of_a_devices_share():
    words = ["--accumulate=96", "--multiple=2", "train.py", "{batch}", "--passes={accumulate}"]
    assert read_limits(*parsed(*words), 99).sizes.among == (2, 4, 6, 8, 12, 16, 24, 32, 48, 96)
    assert read_limits(*parsed(*words), 99, 2).sizes.among == (2, 4, 6, 8, 12, 16, 24, 48)
    assert read_limits(*parsed("--accumulate=96", "train.py", "{batch}", "{global}"), 99, 8).sizes.among[-1] == 12


def test_the_script_is_told_the_passes_and_the_samples_of_a_step():
    options, _ = parsed("--accumulate=96", "train.py", "-b={batch}", "--passes", "{accumulate}", "--all={global}")
    step = Accumulation(96, 2)
    assert with_batch(options, 12, step).script_args == ("-b=12", "--passes", "4", "--all=96")
    assert with_batch(options, 4, step, 2).script_args == ("-b=4", "--passes", "2", "--all=16")  # a trial's


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        (["--accumulate=96", "train.py", "{batch}"], 1, r"no argument of train.py contains \{accumulate\} or \{global"),
        (["--accumulate=-1", "train.py", "{batch}", "{global}"], 1, "--accumulate -1 is not a positive number"),
        (["--accumulate=97", "train.py", "{batch}", "{global}"], 2, "--accumulate 97 is not a multiple of the 2 dev"),
        (["--accumulate=9", "--multiple=2", "train.py", "{batch}{global}"], 1, "--multiple 2 does not divide the 9"),
        (["train.py", "{batch}", "{accumulate}"], 1, r"\{accumulate\} needs the samples of a step"),
    ],
)
def test_a_step_that_cannot_be_divided_is_refused(words, world_size, message):
    with pytest.raises(UsageError, match=message):
        read_limits(*parsed(*words), 99, world_size)


def test_where_the_scripts_data_ends_that_is_why_no_larger_batch_fits():
    out = Console(file=io.StringIO(), width=120)
    failed = Verified(4509, False, feeds_only(2048))
    show(Found(2048, 2049, 99, 0.2, 200, 90, 0.1, 0.05, (failed,)), Accumulation(0, 1), out)
    assert "batch 2049: the script feeds 2048 only" in out.file.getvalue()


def test_what_makes_up_a_step_is_shown():
    found = Found(12, 16, 99, 0.2, 200, 90, 0.1, 0.05, ())
    out = Console(file=io.StringIO(), width=120)
    show(found, Accumulation(96, 2), out)
    assert "12 samples x 2 devices x 4 forward passes = 96 in a step" in out.file.getvalue()
    assert "batch 16: predicted not to fit 99 bytes at 20% overhead (--max-overhead)" in out.file.getvalue()
    assert "reserved" not in out.file.getvalue()
    show(Found(48, 0, 99, 0.2, 200, 90, 0.1, 0.05, ()), Accumulation(96, 2), out)
    assert "no larger one: it is all that a device has in a step" in out.file.getvalue()


def test_on_a_device_the_reserved_bytes_stand_beside_the_budget_that_bounds_them():
    found = Found(12, 16, 99, 0.2, 200, 80, 0.1, 0.05, (), plain_reserved_bytes=220, planned_reserved_bytes=99)
    out = Console(file=io.StringIO(), width=120)
    show(found, Accumulation(), out)
    assert [line.partition(" | overhead")[0] for line in out.file.getvalue().splitlines()[1:4]] == [
        "  budget 99 bytes | planned 99 bytes (0.45x)",
        "  reserved on the device; of it allocated: plain 200 bytes, planned 80 bytes",
        "  without monetrun it takes 220 bytes",
    ]
