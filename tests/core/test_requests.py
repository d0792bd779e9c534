"""Steps replayed request by request: what they allocate is what ``replay`` says, and what they reserve holds it."""

from dataclasses import replace

import pytest

from monetrun.core import reserved as module
from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.graph import BACKWARD, Requests
from monetrun.core.last_outputs import with_last_outputs
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import plain_schedule
from monetrun.core.replayed_blocks import load_base
from monetrun.core.requests import StepReplay, _Call
from monetrun.core.reserved import LEAST_STEPS, reserved, reserved_under
from monetrun.core.step import BETWEEN_STEPS, LAST_GRADIENTS, LAST_OUTPUTS, OUTSIDE, Event, Segment, replay
from monetrun.core.step_changes import with_excess, with_plain_peaks
from support.step_records import EXPANDABLE, MIB, chain_record, on_a_device, output_of


@pytest.fixture
def record():
    return on_a_device(chain_record(10))


def plain(record):
    return [plain_schedule(g) for g in record.graphs]


def test_what_is_allocated_is_what_replay_adds_up(record):
    found = reserved(record, plain(record))
    assert found.allocated_peak_bytes == replay(record, plain(record)).peak_bytes
    assert found.peak_bytes >= found.allocated_peak_bytes
    assert found.peak_bytes == found.small_bytes + found.large_bytes


def test_pages_and_segments_round_what_is_reserved(record):
    assert reserved(record, plain(record)).large_bytes % (20 * MIB) == 0
    assert reserved_under(record, plain(record), AllocatorSettings()).large_bytes % (2 * MIB) == 0


def test_what_was_seen_beyond_the_plan_is_added(record):
    more = with_excess(record, 7 * MIB)
    assert reserved(more, plain(more)).large_bytes == reserved(record, plain(record)).large_bytes + 7 * MIB
    assert with_excess(more, 6 * MIB) is more


def test_what_other_streams_reserve_is_added_and_what_they_hold_does_not_count_as_held_here(record):
    aside = on_a_device(chain_record(10), other_streams_bytes=22 * MIB)
    assert reserved(aside, plain(aside)).large_bytes == reserved(record, plain(record)).large_bytes + 22 * MIB
    # the optimizer's step has the peak, so that what was freed before it counts
    *events, after, step = record.events
    step = replace(step, requests=(8000 * MIB, -4))
    on_one_stream = replace(record, events=(*events, after, step))
    gathered = replace(after, delta_bytes=after.delta_bytes + 1000 * MIB, elsewhere_bytes=1000 * MIB)
    on_two = replace(record, events=(*events, gathered, step))
    assert reserved(on_two, plain(record)) == reserved(on_one_stream, plain(record))


def test_what_other_streams_hold_is_no_block_among_those_of_the_graphs(record):
    """FSDP2 gathers parameters on a stream of its own, in a stretch that requests nothing else."""
    gathers = Event(OUTSIDE, delta_bytes=1000 * MIB, peak_bytes=1000 * MIB, elsewhere_bytes=1000 * MIB, freed=())
    frees = Event(OUTSIDE, delta_bytes=-1000 * MIB, elsewhere_bytes=-1000 * MIB)
    aside = replace(record, events=(gathers, *record.events, frees))
    found, alone = (StepReplay(of, plain(record), CachingAllocator(EXPANDABLE)) for of in (aside, record))
    for step in (found, alone):
        step.step(first=True)
    assert found.allocator.peak_allocated_bytes == alone.allocator.peak_allocated_bytes
    assert found.allocator.peak_reserved_bytes == alone.allocator.peak_reserved_bytes


def test_an_optimizers_state_stays_and_its_temporaries_do_not(record):
    before = reserved(record, plain(record)).allocated_peak_bytes
    step = Event(OUTSIDE, name="SGD.step", requests=(40 * MIB, 500 * MIB, -2))
    found = reserved(replace(record, events=(*record.events, step)), plain(record))
    # 500 MiB are taken beside the state, and are above all else; the state stays
    assert found.allocated_peak_bytes > 500 * MIB
    without = Event(OUTSIDE, name="SGD.step", requests=(40 * MIB,))
    held = reserved(replace(record, events=(*record.events, without)), plain(record)).allocated_peak_bytes
    assert held == before + 40 * MIB


def test_steps_are_replayed_until_they_leave_the_large_pool_as_an_earlier_one_did(monkeypatch):
    # the parts of the batch and the gradients that stay come to lie elsewhere from step to step: the fourth needs more
    record = on_a_device(chain_record(3, (35, 36, 27)), batch=(109 * MIB, 83 * MIB, 11 * MIB))
    (graph,) = record.graphs
    gradients = [op.outputs[0] for op in graph.operators if op.name.endswith("weight_grad")]
    sizes = dict(zip(gradients, (85 * MIB, 87 * MIB, 60 * MIB), strict=True))
    tensors = tuple(replace(t, nbytes=sizes.get(t.id, t.nbytes)) for t in graph.tensors)
    *events, freed, step = record.events
    freed = replace(freed, delta_bytes=freed.delta_bytes + 1500 * MIB - sum(sizes.values()))
    record = replace(record, graphs=(replace(graph, tensors=tensors),), events=(*events, freed, step))
    found = reserved(record, plain(record))
    assert found.steps == 7
    for steps, large_bytes in ((3, found.large_bytes - 20 * MIB), (40, found.large_bytes)):
        monkeypatch.setattr(module, "LEAST_STEPS", steps)
        monkeypatch.setattr(module, "MOST_STEPS", steps)
        assert reserved(record, plain(record)).large_bytes == large_bytes


def test_a_batch_is_replaced_after_the_next_one_is_there(record):
    size = 30 * MIB
    memory = replace(record.memory, base=(*record.memory.base, Segment(False, (size,))), batch=(size,))
    one = replace(record, memory=replace(memory, batch=()), base_bytes=record.base_bytes + size)
    assert reserved(replace(one, memory=memory), plain(one)).peak_bytes >= reserved(one, plain(one)).peak_bytes


def test_gradients_that_are_there_before_the_first_step_are_freed_where_it_frees_them(record):
    """Between forward and backward; further steps free those of the step before."""
    of_weights = [t.nbytes for t in record.graphs[0].tensors if t.kept][1:]
    waiting = sum(of_weights)
    forward, loss, backward, end, step = record.events
    end = replace(end, delta_bytes=end.delta_bytes + waiting)
    before = Event(OUTSIDE, -1, waiting, waiting, LAST_GRADIENTS)
    events = (before, forward, loss, replace(before, delta_bytes=-waiting, peak_bytes=0), backward, end, step)
    segments = (*record.memory.base, Segment(False, (-MIB, *of_weights)))
    there = replace(record, events=events, memory=replace(record.memory, base=segments, gradients=(1, 2, 3, 4, 5, 6)))
    there.memory.check()
    peak = replay(there, plain(there)).peak_bytes
    assert reserved(there, plain(there)).allocated_peak_bytes == peak
    for_ever = replace(there, memory=replace(there.memory, gradients=()))
    assert reserved(for_ever, plain(there)).allocated_peak_bytes == peak + waiting
    with pytest.raises(ValueError, match="gradients or outputs are not among"):
        replace(there.memory, gradients=(7,)).check()


def test_all_of_the_last_gradients_are_freed_also_what_rounding_adds_to_their_blocks(record, monkeypatch):
    of_weights = [t.nbytes for t in record.graphs[0].tensors if t.kept][1:]
    waiting = sum(of_weights)
    forward, loss, backward, *rest = record.events
    begin, free = Event(OUTSIDE, -1, waiting, waiting, LAST_GRADIENTS), Event(OUTSIDE, -1, -waiting, 0, LAST_GRADIENTS)
    base = (*record.memory.base, Segment(False, tuple(n + 512 for n in of_weights)))
    rounded = replace(record, events=(begin, forward, loss, free, backward, *rest))
    rounded = replace(rounded, memory=replace(record.memory, base=base, gradients=(1, 2, 3, 4, 5, 6)))
    found = []
    backward_of = StepReplay._backward
    monkeypatch.setattr(
        StepReplay,
        "_backward",
        lambda replayed, event: (found.append(replayed.allocator.allocated_bytes), backward_of(replayed, event))[1],
    )
    for step in (record, rounded):
        allocator = CachingAllocator(EXPANDABLE)
        replayed = StepReplay(step, plain(step), allocator)
        replayed.begin_with(step.memory)
        replayed.step(first=True)
    assert found[0] == found[1]


def test_a_gradient_of_the_batchs_size_is_not_taken_for_the_batch(record):
    size = 30 * MIB
    memory = replace(record.memory, base=(Segment(False, (size, size)),), batch=(size,), gradients=(1,))
    allocator = CachingAllocator(EXPANDABLE)
    replayed = StepReplay(replace(record, memory=memory), plain(record), allocator)
    replayed.begin_with(memory)
    assert [b.address for b in replayed.batch.blocks[0]] != [b.address for b in replayed.gradients]


def test_a_part_of_the_batch_that_is_freed_within_the_step_is_no_gradient(record):
    """The script makes the next inputs, then frees the first ones; the next step replaces the latest of them."""
    size = 30 * MIB
    base = (*record.memory.base, Segment(False, (size,)))
    allocator = CachingAllocator(EXPANDABLE)
    with_batch = replace(record, memory=replace(record.memory, base=base, batch=(size,)))
    replayed = StepReplay(with_batch, plain(record), allocator)
    replayed.batch.find(load_base(with_batch.memory, allocator))
    held = [replayed._new(40 * MIB), replayed._new(20 * MIB)]
    replayed.gradients = list(held)
    before = allocator.allocated_bytes
    event = Event(OUTSIDE, peak_bytes=size, requests=(size,), batch_freed=((0, 1),))
    replayed._outside(event, 0, first=True)
    assert replayed.gradients == held
    assert allocator.allocated_bytes == before
    replayed.gradients.clear()
    replayed.batch.is_last_of(replayed._script, 1)
    assert not replayed._script
    allocator.reset_peaks()
    replayed.batch.replace()
    assert allocator.allocated_bytes == before
    assert allocator.peak_allocated_bytes == before + size
    with pytest.raises(ValueError, match="part of the batch"):
        replace(record, events=(event,)).check()


def test_between_steps_the_script_does_what_was_seen(record):
    """A new batch beside the gradients, then these are freed, then the old batch: its place is the next new one's."""
    size = 33 * MIB
    base = (*record.memory.base, Segment(False, (size,)))
    graph = record.graphs[0]
    kept = [t for t in graph.tensors if t.kept and not t.external]
    gradients = [t.nbytes for t in kept if graph.operators[graph.writer[t.id]].phase == BACKWARD]
    before = sum(n > 0 for event in record.events for n in event.requests)
    between = Event(
        OUTSIDE,
        name=BETWEEN_STEPS,
        requests=(size, 3 * MIB, -(before + 2)),
        freed=tuple((nbytes, 1) for nbytes in gradients),
        batch_freed=((0, 3),),
    )
    events = [event for event in record.events if event.delta_bytes >= 0]  # gradients stay
    one = replace(
        record, events=tuple(events), memory=replace(record.memory, base=base, batch=(size,), between=between)
    )
    one.check()
    steps = _noted(one)
    assert len(gradients) > 0
    seen = [size, *(-n for n in gradients), 3 * MIB, -3 * MIB, -size]
    end = len(steps) - steps[::-1].index(-size)
    assert steps[end - len(seen) : end] == seen
    assert steps.count(size) == steps.count(-size) == 3
    unseen = _noted(replace(one, memory=replace(one.memory, between=None)))
    assert unseen.count(size) == unseen.count(-size) == 2


def test_what_replaces_a_part_between_steps_may_have_other_sizes(record):
    """As DistributedDataParallel's buckets, which it makes anew once: they stay, and what they replaced is gone."""
    base = (*record.memory.base, Segment(False, (30 * MIB,)))
    between = Event(OUTSIDE, name=BETWEEN_STEPS, requests=(13 * MIB, 17 * MIB), batch_freed=((0, 0),), freed=())
    memory = replace(record.memory, base=base, batch=(30 * MIB,), between=between)
    one = replace(record, base_bytes=record.base_bytes + 30 * MIB, memory=memory)
    one.check()
    held = replace(record, base_bytes=one.base_bytes, memory=replace(record.memory, base=base))
    steps = _noted(one)
    assert steps.count(13 * MIB) == steps.count(17 * MIB) == 3
    assert steps.count(-13 * MIB) == steps.count(-17 * MIB) == 2
    peaks = [reserved_under(r, plain(r), EXPANDABLE).allocated_peak_bytes for r in (one, held)]
    assert peaks[0] == peaks[1]


def test_steps_that_follow_the_recorded_one_in_its_process_begin_where_its_schedules_left_things(record):
    (kept,) = plain(record)
    again = kept.forward[:8]  # run again as the backward begins
    frugal = (replace(kept, backward=(*again, *kept.backward)),)
    one = replace(record, memory=replace(record.memory, begun_under=frugal))
    one.check()
    state = 40 * MIB  # of an optimizer, which the first step allocates once its activations are gone
    optimizer = Event(OUTSIDE, -1, state, state, "Adam.step", requests=(state,))
    with_state = replace(record, events=(*record.events, optimizer))
    assert reserved(one, plain(one)).allocated_peak_bytes == reserved(record, plain(record)).allocated_peak_bytes
    begun = replace(with_state, memory=one.memory)
    apart = [reserved(r, plain(r)) for r in (with_state, begun)]
    assert apart[0].allocated_peak_bytes == apart[1].allocated_peak_bytes
    assert apart[0].large_bytes != apart[1].large_bytes
    with pytest.raises(ValueError, match="begun under 2 schedules"):
        replace(one, memory=replace(one.memory, begun_under=frugal * 2)).check()
    broken = replace(frugal[0], forward=frugal[0].forward[1:])
    with pytest.raises(ValueError, match="cannot run"):
        replace(one, memory=replace(one.memory, begun_under=(broken,))).check()


def _noted(record):
    """What three steps request, and (negative) free."""
    noted = []

    class Noting(CachingAllocator):
        def allocate(self, nbytes, stream=0):
            address = super().allocate(nbytes, stream)
            noted.append(nbytes)
            sizes[address] = nbytes
            return address

        def free(self, address):
            super().free(address)
            noted.append(-sizes.pop(address))

    allocator, sizes = Noting(EXPANDABLE), {}
    replayed = StepReplay(record, plain(record), allocator)
    loaded = load_base(record.memory, allocator)
    sizes.update(loaded)
    replayed.batch.find(loaded)
    for number in range(LEAST_STEPS):
        replayed.step(first=number == 0)
    return noted


def test_what_the_script_frees_of_gradients_is_freed_by_its_size_and_place(record):
    """Without sizes the latest gradients that are together no more are freed."""
    allocator = CachingAllocator(EXPANDABLE)
    replayed = StepReplay(record, plain(record), allocator)
    sizes = [32 * MIB, 8 * MIB, 1 * MIB]

    def left(freed):
        replayed.gradients = [replayed._new(n) for n in sizes]
        before = allocator.allocated_bytes
        allocator.reset_peaks()
        event = Event(OUTSIDE, delta_bytes=-32 * MIB, requests=(4 * MIB, -1), freed=freed)
        replayed._outside(event, 0, first=True)
        return [b.nbytes for b in replayed.gradients], allocator.peak_allocated_bytes - before

    assert left(None) == ([32 * MIB], 4 * MIB)
    assert left(((32 * MIB, 0),)) == ([8 * MIB, 1 * MIB], 0)
    assert left(((32 * MIB, 1),)) == ([8 * MIB, 1 * MIB], 4 * MIB)
    assert left(((32 * MIB, 2), (8 * MIB, 2), (7 * MIB, 2))) == ([1 * MIB], 4 * MIB)


def test_a_forward_without_a_backward_leaves_nothing_after_its_step(record):
    one = replace(record, events=(record.events[0], *record.events))
    allocator = CachingAllocator(EXPANDABLE)
    replayed = StepReplay(one, plain(one), allocator)
    held = []
    for number in range(3):
        replayed.step(first=number == 0)
        held.append(allocator.allocated_bytes)
    assert held[1] == held[2]


def test_inputs_that_only_the_backward_holds_are_freed_in_it(record):
    graph = record.graphs[0]
    x = next(t.id for t in graph.tensors if t.external)
    nbytes = graph.tensors[x].nbytes
    base = (*record.memory.base, Segment(False, (nbytes,)))
    one = replace(record, memory=replace(record.memory, base=base, batch=(nbytes,)))
    allocator = CachingAllocator(EXPANDABLE)
    replayed = StepReplay(one, plain(one), allocator)
    replayed.batch.find(load_base(one.memory, allocator))
    before = allocator.allocated_bytes
    replayed._release(_Call([]), graph, x)
    assert allocator.allocated_bytes == before - nbytes


def test_a_record_of_a_cpu_has_nothing_to_reserve():
    with pytest.raises(ValueError, match="does not have the device's memory"):
        reserved(chain_record(10), plain(chain_record(10)))


def test_the_plain_peak_tells_when_the_last_outputs_are_dropped(record):
    """Held until the backward they add to the loss's peak; dropped after the forward they do not."""
    first = next(i for i, e in enumerate(record.events) if e.kind == "backward")
    loss = Event(OUTSIDE, peak_bytes=20_000 * MIB)
    held = Event(OUTSIDE, delta_bytes=50 * MIB, peak_bytes=50 * MIB, name=LAST_OUTPUTS)
    drop = Event(OUTSIDE, delta_bytes=-50 * MIB, name=LAST_OUTPUTS)
    events = (held, *record.events[:first], loss, drop, *record.events[first:])
    late = replace(record, events=events)
    peak = replay(late, plain(late)).peak_bytes
    kept = with_plain_peaks(late, PlainPeaks(peak, 2 * peak, 0, 3))
    assert kept.events == events
    assert kept.memory.plain_reserved_bytes == 2 * peak
    early = with_plain_peaks(late, PlainPeaks(peak - 50 * MIB, peak, 0, 3))
    forward = next(i for i, e in enumerate(early.events) if e.kind == "forward")
    assert early.events[forward + 1] == drop
    assert replay(early, plain(early)).peak_bytes < peak


def test_last_outputs_are_held_in_the_replay_until_their_own_forward_has_given_new_ones(record):
    """As in a GAN, whose critic's backward comes before the generator's forward."""
    other = record.graphs[0]
    output = output_of(other)
    nbytes = other.tensors[output].nbytes
    steps = (record.events[0], *record.events[2:3])  # a forward and its backward
    two = tuple(replace(e, graph=1, released=()) for e in steps)
    events = with_last_outputs((*steps, *two), 2 * nbytes, [(0, nbytes), (1, nbytes)])
    one = replace(record, graphs=(other, other), costs=record.costs * 2, events=tuple(events))
    allocator = CachingAllocator(EXPANDABLE)
    replayed = StepReplay(one, plain(one), allocator)
    held = []
    for kind in ("_forward", "_backward"):
        call = getattr(replayed, kind)

        def seen(event, kind=kind, call=call):
            held.append((kind, allocator.allocated_bytes))
            call(event)

        setattr(replayed, kind, seen)
    for number in range(3):
        replayed.step(first=number == 0)
    first, *_, last = (held[4 * i : 4 * i + 4] for i in range(3))
    more = [b - a for (_, a), (_, b) in zip(first, last, strict=True)]
    assert more == [2 * nbytes, nbytes, nbytes, 0]


# ---- what a call of an operator requests


def in_halves(record):
    """``record`` whose operators take their workspace in two halves, one after the other, around their outputs."""
    rows = []
    for op, workspaces in zip(record.graphs[0].operators, record.costs[0].workspace_bytes, strict=True):
        row = []
        for implementation, nbytes in zip(op.implementations, workspaces, strict=True):
            new = op.outputs[0 if implementation.in_place_of is None else 1 :]
            half = nbytes // 2
            sizes = [*([half, -1] if half else []), *(record.graphs[0].tensors[t].nbytes for t in new)]
            first = 2 if half else 1
            last = first + len(new)
            row.append(Requests((*sizes, half, -last) if half else tuple(sizes), tuple(range(first, last))))
        rows.append(tuple(row))
    return replace(record, costs=(replace(record.costs[0], requests=tuple(rows)),))


def test_workspaces_one_after_the_other_need_less_than_both_together(record):
    both, one = reserved(record, plain(record)), reserved(in_halves(record), plain(record))
    assert one.allocated_peak_bytes < both.allocated_peak_bytes
    none = replace(record.costs[0], workspace_bytes=tuple((0,) * len(r) for r in record.costs[0].workspace_bytes))
    assert one.allocated_peak_bytes > reserved(replace(record, costs=(none,)), plain(record)).allocated_peak_bytes


def test_an_output_is_dropped_at_its_place_among_the_scripts_requests(record):
    output = output_of(record.graphs[0])
    nbytes = record.graphs[0].tensors[output].nbytes
    peaks = []
    for after in ((2,), ()):
        allocator = CachingAllocator(EXPANDABLE)
        replayed = StepReplay(record, plain(record), allocator)
        replayed._forward(0)
        allocator.reset_peaks()
        requests = (nbytes, -1, nbytes, nbytes, -2, -3)
        event = Event(OUTSIDE, dropped=((0, output),), requests=requests, dropped_after=after)
        replayed._outside(event, 0, first=True)
        peaks.append(allocator.peak_allocated_bytes)
    assert peaks[1] - peaks[0] == nbytes


@pytest.mark.parametrize(
    ("sizes", "results"), [((-1,), ()), ((5, -1, -1), ()), ((5,), (2,)), ((5, -1), (1,)), ((5, -2, 5), ())]
)
def test_requests_that_cannot_be_are_refused(sizes, results):
    with pytest.raises(ValueError, match="request"):
        Requests(sizes, results).check()


def test_a_pool_that_does_not_fit_a_gap_lies_behind_it(record):
    """Requests that are served one by one fill the gap; once a pool is held, they are served from that."""
    base = (*record.memory.base, Segment(False, (30 * MIB,), gap_bytes=100 * MIB))
    record = replace(record, memory=replace(record.memory, base=base))
    one_by_one = reserved_under(record, plain(record), EXPANDABLE)
    found = reserved(record, plain(record))
    assert found.large_bytes >= one_by_one.large_bytes
    assert reserved_under(record, plain(record), EXPANDABLE, held_bytes=found.large_bytes).large_bytes == (
        found.large_bytes
    )
    held = reserved_under(record, plain(record), EXPANDABLE, held_bytes=one_by_one.large_bytes + 40 * MIB)
    assert held.large_bytes >= one_by_one.large_bytes + 40 * MIB
    seen = reserved(with_excess(record, 60 * MIB), plain(record))  # is a part of the pool, and counts once
    assert seen.large_bytes == found.large_bytes + 60 * MIB
    a_little_more = reserved_under(record, plain(record), EXPANDABLE, held_bytes=one_by_one.large_bytes + 1)
    assert a_little_more.large_bytes > one_by_one.large_bytes
