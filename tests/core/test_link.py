"""A link's grammar, DistributedDataParallel's buckets, and the two clocks of a step on several ranks."""

import dataclasses

import pytest

from monetrun.core.clocks import step_clocks
from monetrun.core.errors import UsageError
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.link import Link, parse
from monetrun.core.plan import each_once
from monetrun.core.reductions import Reductions
from monetrun.core.step import Event, StepRecord


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("400Gbps,5us", 50e9, 5e-6), ("1.5 GB/s, 2ms", 1.5e9, 2e-3), ("100mbps,0ns", 12.5e6, 0.0)],
)
def test_a_link_is_a_bandwidth_and_a_latency(text, rate, latency):
    link = parse(text)
    assert (link.bytes_per_second, link.latency_seconds) == (pytest.approx(rate), pytest.approx(latency))


@pytest.mark.parametrize("text", ["", "400Gbps", "5us,400Gbps", "400,5us", "-1Gbps,5us", "400Gbps,5us,1", "0Gbps,5us"])
def test_what_is_no_link_is_refused_with_the_rule(text):
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert repr(text) in refused.value.message
    assert "bandwidth" in refused.value.hint.lower()


def test_an_all_reduce_sends_each_byte_round_a_ring():
    link = Link(bytes_per_second=1000.0, latency_seconds=0.5)
    assert link.all_reduce_seconds(4000, ranks=4) == 0.5 + 2 * 3 / 4 * 4.0
    assert link.all_reduce_seconds(4000, ranks=1) == 0.0


def test_buckets_are_full_at_their_caps_and_the_first_one_is_small():
    gradients = tuple((0, t) for t in range(6))
    assert Reductions(gradients, 100, 10).buckets([4, 6, 90, 20, 1, 2]) == [range(0, 2), range(2, 4), range(4, 6)]


def record(bucket_bytes):
    """A forward of 1 s, then three gradients of 100, 200 and 300 bytes, each after 1 s of backward."""
    sizes = (100, 200, 300)
    tensors = (Tensor(0, 8), *(Tensor(i + 1, n, kept=True) for i, n in enumerate(sizes)))

    def operator(i, phase, reads, writes):
        return Operator(i, f"op{i}", "op", phase, writes, (Implementation("default", reads),))

    operators = (
        operator(0, FORWARD, (), (0,)),
        *(operator(i, BACKWARD, (0,), (i,)) for i in (1, 2, 3)),
    )
    graph = Graph("net", tensors, operators)
    costs = Costs("cpu", ((1.0,),) * 4, ((0,),) * 4)
    events = (Event(FORWARD, 0), Event(BACKWARD, 0))
    reductions = Reductions(((0, 1), (0, 2), (0, 3)), bucket_bytes, min(bucket_bytes, 100))
    return StepRecord((graph,), (costs,), events, 0, {}, "cpu", "", reductions=reductions)


def test_communication_hides_behind_the_backward_bucket_by_bucket():
    own = record(bucket_bytes=200)
    schedules = [each_once(own.graphs[0])]
    link = Link(bytes_per_second=200.0, latency_seconds=0.0)  # of two ranks: 0.5, 1 and 1.5 s
    clocks = step_clocks(own, schedules, link, ranks=2)
    assert clocks.compute_seconds == 4.0
    assert clocks.communication_seconds == pytest.approx(3.0)
    # the second begins at 3 s, the third when its gradient is there at 4 s
    assert clocks.step_seconds == pytest.approx(5.5)
    assert clocks.hidden_seconds == pytest.approx(1.5)
    slow = step_clocks(own, schedules, dataclasses.replace(link, bytes_per_second=50.0), ranks=2)
    assert slow.step_seconds == pytest.approx(2.0 + 12.0)  # one after the other from the first gradient on
    alone = step_clocks(record(bucket_bytes=10**9), schedules, link, ranks=2)
    assert (alone.buckets, alone.step_seconds) == (2, pytest.approx(4.0 + 2.5))
    assert step_clocks(own, schedules, link, ranks=1).step_seconds == 4.0


def test_a_gradient_that_waits_for_its_turn_is_reduced_then():
    own = record(bucket_bytes=100)
    own = dataclasses.replace(own, reductions=Reductions(((0, 3), (0, 1), (0, 2)), 100, 100))
    clocks = step_clocks(own, [each_once(own.graphs[0])], Link(600.0, 0.0), ranks=2)
    assert clocks.step_seconds == pytest.approx(4.0 + 1.0)  # all of them begin at 4 s


def test_a_record_that_reduces_what_its_graphs_do_not_have_is_refused():
    own = record(bucket_bytes=100)
    own.check()
    with pytest.raises(ValueError, match="tensor 9 of graph 0"):
        dataclasses.replace(own, reductions=Reductions(((0, 9),), 100, 100)).check()
