"""The replay's rules, each on a graph small enough to count by hand; then the native replay against the reference."""

from __future__ import annotations

import ctypes
import time
from array import array

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from monetrun.core.errors import ScheduleError
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import core, flatten, simulate, simulate_reference
from support.random_graphs import broken, joint_graphs, schedules
from support.small_graphs import chain, make

needs_native = pytest.mark.skipif(core()[0] is None, reason=core()[1])


def schedule(forward: str, backward: str) -> Schedule:
    """``schedule("0 1", "3/1 4")``: operators, with an implementation behind a slash."""

    def steps(text: str) -> tuple[Step, ...]:
        return tuple(Step(*map(int, word.split("/"))) for word in text.split())

    return Schedule(steps(forward), steps(backward))


# a chain x -> a(8) -> b(4) -> c(2), backwards dc(2), db(4), da(8, kept)
CHAIN = make("5x 8 4 2 2 4 8k", "f: 0 > 1", "f: 1 > 2", "f: 2 > 3", "b: 3 2 > 4", "b: 4 2 1 > 5", "b: 5 1 > 6")


def test_a_tensor_is_alive_from_its_write_to_its_last_read():
    t = simulate(*CHAIN, plain_schedule(CHAIN[0]))
    assert t.before_bytes == (0, 8, 12, 14, 14, 12)
    assert t.during_bytes == (8, 12, 14, 16, 18, 20)
    assert t.after_bytes == (8, 12, 14, 14, 12, 8)
    assert (t.peak_bytes, t.peak_step) == (20, 5)
    assert t.seconds == 21.0


def test_a_recomputed_tensor_is_not_held_between_its_last_read_and_its_next_write():
    graph, costs = CHAIN
    t = simulate(graph, costs, schedule("0 1 2", "3 1 4 0 5"))
    # b (4) is read by step 3 and written again by step 4, which reads a; a is written again by step 6
    assert t.during_bytes == (8, 12, 14, 16, 14, 18, 12, 20)
    assert t.seconds == 21.0 + 2.0 + 1.0


def test_external_tensors_are_not_counted():
    graph, costs = make("100x 1", "f: 0 > 1")
    assert simulate(graph, costs, schedule("0", "")).peak_bytes == 1


def test_a_tensor_that_nothing_reads_is_freed_right_after_its_step():
    graph, costs = make("7 1", "f: > 0", "f: > 1")
    assert simulate(graph, costs, schedule("0 1", "")).during_bytes == (7, 1)


def test_workspace_counts_during_its_step_only():
    graph, costs = make("2 1", "f: > 0 w30", "b: 0 > 1")
    t = simulate(graph, costs, schedule("0", "1"))
    assert (t.during_bytes, t.after_bytes) == ((32, 3), (2, 0))


def test_kept_tensors_stay_and_writing_one_again_is_a_copy_freed_after_the_step():
    graph, costs = make("8k 2 1", "f: > 0 1", "b: 1 > 2")
    t = simulate(graph, costs, schedule("0", "0 1"))
    assert t.during_bytes == (10, 18, 11)
    assert t.after_bytes == (8, 10, 8)


def test_in_place_takes_over_the_storage_of_its_input():
    graph, costs = make("8 8 3", "f: > 0", "b: 0 > 1 2 i0")
    assert simulate(graph, costs, schedule("0", "1")).during_bytes == (8, 19)
    assert simulate(graph, costs, schedule("0", "1/1")).during_bytes == (8, 11)


@pytest.mark.parametrize(
    ("tensors", "operators", "steps", "why"),
    [
        ("8x 8", ("f: 0 > 1 i0",), ("0/1", ""), "is external"),
        ("8k 8", ("f: > 0", "f: 0 > 1 i0"), ("0 1/1", ""), "is kept"),
        ("8 7", ("f: > 0", "f: 0 > 1 i0"), ("0 1/1", ""), "has 8 bytes, but the output has 7"),
        ("8 8 1", ("f: > 0", "f: 0 > 1 i0", "f: 0 > 2"), ("0 1/1 2", ""), "is read again by step 2"),
    ],
)
def test_in_place_is_refused_where_the_input_is_read_again_or_is_not_the_graphs(tensors, operators, steps, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        simulate(*make(tensors, *operators), schedule(*steps))
    assert caught.value.step == len(steps[0].split()) - 1 - (why.endswith("step 2"))


def test_in_place_is_allowed_when_the_input_is_written_again_before_its_next_read():
    graph, costs = make("8 8 1", "f: > 0", "f: 0 > 1 i0", "b: 0 > 2")
    assert simulate(graph, costs, schedule("0 1/1", "0 2")).during_bytes == (8, 8, 8, 9)


THREE = make("1 1 1 1 1", "f: > 0", "f: 0 > 1 r", "f: 0 > 2 o", "b: 1 > 3 a2", "b: > 4")


@pytest.mark.parametrize(
    ("forward", "backward", "step", "why"),
    [
        ("0", "3 4", 1, r"operator 1 \(op1\) is missing from the forward part"),
        ("0 1", "4", 2, r"operator 3 \(op3\) is missing from the backward part"),
        ("0 1", "3", 3, r"operator 4 \(op4\) is missing"),
        ("1 0", "3 4", 0, r"operator 0 \(op0\) is missing"),
        ("0 1", "4 3", 2, r"operator 3 \(op3\) is missing"),
        ("0 1 1", "3 4", 2, "runs after operator 1"),
        ("0 1", "3 3 4", 3, "runs after operator 3"),
        ("0 1", "1 3 4", 2, "must not run again"),
        ("0 1 3", "4", 2, "backward phase, but runs in the forward part"),
        ("0 1", "3/1 4", 2, r"operator 3 \(op3\) reads tensor 2 \(t2\), which no step before it has written"),
        ("0 1", "3/2 4", 2, "implementation 2 of operator 3"),
        ("0 1", "3 9", 3, "operator 9, but there are 5"),
        ("0 1", "3 -1", 3, "operator -1"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_rejected_with_the_step_and_the_operator(forward, backward, step, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        simulate(*THREE, schedule(forward, backward))
    assert caught.value.step == step


def test_optional_operators_may_run_or_not():
    assert simulate(*THREE, schedule("0 1", "3 4")).peak_bytes == 2
    assert simulate(*THREE, schedule("0 1 2", "3/1 4")).seconds == 15.0


def test_an_optional_operator_of_the_plain_step_may_run_later_or_not_at_all():
    graph, costs = make("1 1 2 1 1k", "f: > 0", "f: 0 > 1", "f: 0 > 2 p", "b: 1 > 3 p", "b: 2 3 > 4 a1")
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 4
    assert simulate(graph, costs, schedule("0 1", "3 2 4")).seconds == 15.0
    assert simulate(graph, costs, schedule("0 1", "4/1")).peak_bytes == 2
    with pytest.raises(ScheduleError, match="reads tensor 2"):
        simulate(graph, costs, schedule("0 1", "3 4"))


def test_an_empty_graph_has_no_peak():
    graph, costs = make("")
    t = simulate(graph, costs, schedule("", ""))
    assert (t.peak_bytes, t.peak_step, t.seconds, t.during_bytes) == (0, -1, 0.0, ())


def _verdict(replay, graph, costs, steps):
    try:
        return replay(graph, costs, steps)
    except ScheduleError as error:
        return error.message, error.step


@needs_native
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_the_native_replay_equals_the_reference_to_the_byte(data):
    graph, costs = data.draw(joint_graphs())
    steps = data.draw(schedules(graph))
    if data.draw(st.booleans()):
        steps = broken(data.draw, graph, steps)
    assert _verdict(simulate, graph, costs, steps) == _verdict(simulate_reference, graph, costs, steps)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_after_one_step_is_before_the_next_and_only_kept_tensors_are_left(data):
    graph, costs = data.draw(joint_graphs())
    steps = data.draw(schedules(graph))
    verdict = _verdict(simulate, graph, costs, steps)
    assume(not isinstance(verdict[0] if isinstance(verdict, tuple) else 0, str))
    assert verdict.before_bytes[1:] == verdict.after_bytes[:-1]
    written = {t for s in steps.forward + steps.backward for t in graph.operators[s.operator].outputs}
    assert verdict.after_bytes[-1:] in ((), (sum(t.nbytes for t in graph.tensors if t.kept and t.id in written),))


@needs_native
def test_six_hundred_operators_replay_within_fifty_microseconds():
    n = 307
    graph, costs = chain(n, 1024)
    flat, plain, library = flatten(graph, costs), plain_schedule(graph), core()[0]
    operators = array("i", [s.operator for s in plain.forward + plain.backward])
    chosen = array("i", bytes(4 * len(operators)))
    peak, step, seconds = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_double()
    arguments = [ctypes.byref(flat.struct), n, 2 * n, operators.buffer_info()[0], chosen.buffer_info()[0]]
    arguments += [None, None, None, ctypes.byref(peak), ctypes.byref(step), ctypes.byref(seconds)]
    took = []
    for _ in range(200):
        start = time.thread_time()
        assert library.monet_replay(*arguments) == -1
        took.append(time.thread_time() - start)
    assert peak.value == simulate_reference(graph, costs, plain).peak_bytes
    assert min(took) < 50e-6
