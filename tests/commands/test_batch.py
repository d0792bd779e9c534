"""`monetrun batch`: its limits and the placeholder for the batch."""

from __future__ import annotations

import pytest

from monetrun.commands.batch import prepare_parser, read_limits, with_batch
from monetrun.core.errors import UsageError

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
    assert (read.budget_bytes, read.max_overhead, read.multiple, read.trials) == (99, 0.125, 3, (6, 12))
    assert (read.algorithm, read.options.seconds) == ("greedy", 3.0)
    read = read_limits(*parsed("--trials=32,16", "--max-overhead=0.1", "train.py", "{batch}"), 99)
    assert (read.trials, read.max_overhead) == ((16, 32), 0.1)
