"""Where in a step the script drops the outputs of the last one."""

from dataclasses import replace

import pytest

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.last_outputs import (
    dropped_later,
    dropping_outputs_early,
    last_outputs_bytes,
    with_last_outputs,
    with_outputs_dropped,
)
from monetrun.core.step import LAST_OUTPUTS, OUTSIDE, Event
from support.step_records import chain_record

F0, F1, B0, B1 = (Event(kind, graph) for kind in (FORWARD, BACKWARD) for graph in (0, 1))
OUT = Event(OUTSIDE)
GAN = (F0, OUT, B0, F1, OUT, F0, B0, B1, OUT)


def drop(nbytes):
    return Event(OUTSIDE, -1, -nbytes, 0, LAST_OUTPUTS)


def held(nbytes):
    return Event(OUTSIDE, -1, nbytes, nbytes, LAST_OUTPUTS)


@pytest.mark.parametrize(
    ("events", "nbytes", "graphs", "expected"),
    [
        ((F0, OUT, B0), 0, [], (F0, OUT, B0)),
        ((F0, OUT, B0), 7, [], (held(7), F0, OUT, drop(7), B0)),
        ((F0, OUT, B0), 7, [(0, 5)], (held(7), F0, OUT, drop(7), B0)),
        # of several calls of a graph the first one gives new ones
        ((F0, B0, F0, B0), 7, [(0, 7)], (held(7), F0, drop(7), B0, F0, B0)),
        (GAN, 5, [(1, 5)], (held(5), F0, OUT, B0, F1, OUT, F0, drop(5), B0, B1, OUT)),
        (
            GAN,
            8,
            [(0, 1), (1, 5)],
            (held(8), F0, OUT, drop(3), B0, F1, OUT, F0, drop(5), B0, B1, OUT),
        ),
        # without a backward after it: to the end
        ((F0, B0, F1), 5, [(1, 5)], (held(5), F0, B0, F1, drop(5))),
    ],
)
def test_outputs_are_held_until_the_graph_that_gave_them_has_given_new_ones(events, nbytes, graphs, expected):
    assert tuple(with_last_outputs(events, nbytes, graphs)) == expected


def test_outputs_may_be_dropped_right_after_their_forward():
    events = with_last_outputs(GAN, 8, [(1, 5)])
    assert dropping_outputs_early(events) == (held(8), F0, drop(3), OUT, B0, F1, drop(5), OUT, F0, B0, B1, OUT)
    late_at_first = (held(8), F0, OUT, drop(3), B0, F1, drop(5), OUT, F0, B0, B1, OUT)
    assert dropping_outputs_early(events, all_of_them=False) == late_at_first
    assert dropping_outputs_early(GAN) == GAN


def test_only_what_is_dropped_after_a_backward_is_held_longer():
    assert dropped_later(with_last_outputs(GAN, 8, [(1, 5)])) == [5]
    assert dropped_later(with_last_outputs((F0, B0), 8, [(0, 5)])) == []


def test_what_was_seen_to_be_dropped_is_dropped_once():
    record = chain_record(10)
    both = replace(record, events=tuple(with_last_outputs(GAN, 8, [(1, 5)])))
    seen = with_outputs_dropped(both, [(4, 4)])
    assert last_outputs_bytes(seen) == 8
    freed = [-e.delta_bytes for e in seen.events if e.name == LAST_OUTPUTS and e.delta_bytes <= 0]
    assert freed == [4, 4]
