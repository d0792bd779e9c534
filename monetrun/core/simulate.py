"""What a schedule allocates at every step, and what it costs: the one definition of both.

Every peak and overhead that monetrun prints, stores or compares comes from ``simulate``. The rules of the replay:

* Only tensors that are not ``external`` are counted.
* The forward part runs every forward operator once, in the graph's order; the backward part runs every backward
  operator once, in the graph's order, and, anywhere between them, replayable forward operators, any number of times.
  An optional operator may be missing from its part (if it is replayable, its first run may be in the backward one).
* A step reads the inputs of its *implementation* and writes all outputs of its operator. A tensor is alive from a
  write to its last read before its next write; one that is not read is freed right after the step.
* A ``kept`` tensor is alive from its first write to the end; writing it again makes a copy, freed after the step.
* Bytes during a step are those alive before it, what it writes, and its workspace. An in-place implementation reuses
  the storage of one input for its first output; the step must be the last that reads this input.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from monetrun.core import native
from monetrun.core.errors import ScheduleError
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.plan import Schedule, Step


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule allocates and costs; one entry for each step, those of the forward part first.

    Attributes:
        before_bytes: alive before the step.
        during_bytes: alive while it runs: before, what it writes, its workspace, and what is held beside it.
        after_bytes: alive after it.
        peak_bytes: the largest of ``during_bytes`` (0 without steps).
        peak_step: the first step at which it is reached (-1 without steps).
        seconds: what all steps cost, added up.
    """

    before_bytes: tuple[int, ...]
    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    seconds: float


def simulate(graph: Graph, costs: Costs, schedule: Schedule) -> Timeline:
    """Replay ``schedule``: natively if there is a compiler (see ``native``), else in plain Python.

    Raises:
        ScheduleError: it breaks a rule of the replay; the message names step, operator and tensor.
    """
    timeline = _without_holds(graph, costs, schedule)
    if not schedule.holds:
        return timeline
    during_bytes = list(timeline.during_bytes)
    for hold in schedule.holds:
        during_bytes[hold.step] += hold.nbytes
    peak_bytes = max(during_bytes)
    return replace(
        timeline,
        during_bytes=tuple(during_bytes),
        peak_bytes=peak_bytes,
        peak_step=during_bytes.index(peak_bytes),
    )


def _without_holds(graph: Graph, costs: Costs, schedule: Schedule) -> Timeline:
    library, _ = core()
    arrays = _schedule_arrays(schedule) if library is not None else None
    if library is None or arrays is None:
        return simulate_reference(graph, costs, schedule)
    flat = flatten(graph, costs)
    steps = len(schedule.forward) + len(schedule.backward)
    profile = (ctypes.c_int64 * (3 * steps))()
    peak_bytes, peak_step, seconds = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_double()
    address = ctypes.addressof(profile)
    bad_step = library.monet_replay(
        ctypes.byref(flat.struct),
        len(schedule.forward),
        steps,
        arrays[0].buffer_info()[0],
        arrays[1].buffer_info()[0],
        address,
        address + 8 * steps,
        address + 16 * steps,
        ctypes.byref(peak_bytes),
        ctypes.byref(peak_step),
        ctypes.byref(seconds),
    )
    if bad_step >= 0:
        simulate_reference(graph, costs, schedule)  # raises, with what is wrong
        raise AssertionError(f"the native replay rejects step {bad_step}, which the reference accepts")
    return Timeline(
        tuple(profile[:steps]),
        tuple(profile[steps : 2 * steps]),
        tuple(profile[2 * steps :]),
        peak_bytes.value,
        peak_step.value,
        seconds.value,
    )


def judge(graph: Graph, schedule: Schedule) -> None:
    """Check that ``schedule`` keeps the rules of the replay for ``graph``, whatever it costs.

    For schedules from files: one pass in plain Python, which takes no longer than ``flatten`` alone, and no compiler.

    Raises:
        ScheduleError: it breaks a rule; the message names step, operator and tensor.
    """
    counts = [len(op.implementations) for op in graph.operators]
    free = Costs("none", tuple((0.0,) * n for n in counts), tuple((0,) * n for n in counts))
    simulate_reference(graph, free, schedule)


def simulate_reference(graph: Graph, costs: Costs, schedule: Schedule) -> Timeline:
    """``simulate`` in plain Python: the definition that the native replay is tested against.

    Raises:
        ScheduleError: it breaks a rule of the replay; the message names step, operator and tensor.
    """
    check_order(graph, schedule)
    steps = schedule.forward + schedule.backward
    last = last_reads(graph, steps)
    tensors, operators = graph.tensors, graph.operators
    alive_until: dict[int, int] = {}  # alive tensors that are not kept -> index of their last reading step
    kept: set[int] = set()
    alive = 0
    before_bytes, during_bytes, after_bytes = [], [], []
    seconds = 0.0
    for i, step in enumerate(steps):
        op = operators[step.operator]
        impl = op.implementations[step.implementation]
        before_bytes.append(alive)
        written = sum(tensors[t].nbytes for t in op.outputs)
        if impl.in_place_of is not None:
            _check_in_place(graph, step, i, alive_until)
            written -= tensors[op.outputs[0]].nbytes
        during_bytes.append(alive + written + costs.workspace_bytes[step.operator][step.implementation])
        for t in impl.inputs:
            if alive_until.get(t) == i:
                del alive_until[t]
                alive -= tensors[t].nbytes
        for t, until in zip(op.outputs, last[i], strict=True):
            if tensors[t].kept:
                if t not in kept:
                    kept.add(t)
                    alive += tensors[t].nbytes
            elif until > i:
                alive_until[t] = until
                alive += tensors[t].nbytes
        after_bytes.append(alive)
        seconds += costs.seconds[step.operator][step.implementation]
    peak_bytes = max(during_bytes, default=0)
    return Timeline(
        tuple(before_bytes),
        tuple(during_bytes),
        tuple(after_bytes),
        peak_bytes,
        during_bytes.index(peak_bytes) if during_bytes else -1,
        seconds,
    )


def check_order(graph: Graph, schedule: Schedule) -> None:
    """Check that both parts run every operator they must, in the graph's order, with implementations that exist.

    Raises:
        ScheduleError: they do not; the message names the step and the operator.
    """
    operators = graph.operators
    last = {FORWARD: -1, BACKWARD: -1}
    for i, step in enumerate(schedule.forward + schedule.backward):
        part = FORWARD if i < len(schedule.forward) else BACKWARD
        if not 0 <= step.operator < len(operators):
            raise ScheduleError(
                f"step {i} runs operator {step.operator}, but there are {len(operators)}",
                "the schedule is of another graph: plan again",
                step=i,
            )
        op = operators[step.operator]
        if not 0 <= step.implementation < len(op.implementations):
            raise ScheduleError(
                f"step {i} runs implementation {step.implementation} of operator {op.id} ({op.name}), "
                f"which has {len(op.implementations)}",
                "the schedule is of another graph: plan again",
                step=i,
            )
        if op.phase != part:
            if part == FORWARD:
                raise _order_error(graph, i, op.id, "is of the backward phase, but runs in the forward part")
            if not op.replayable:
                raise _order_error(graph, i, op.id, "must not run again in the backward part: it is not replayable")
            continue
        if op.id <= last[part]:
            raise _order_error(graph, i, op.id, f"runs after operator {last[part]}, against the graph's order")
        _check_none_missing(graph, range(last[part] + 1, op.id), part, i)
        last[part] = op.id
    forward_count = graph.forward_count
    _check_none_missing(graph, range(last[FORWARD] + 1, forward_count), FORWARD, len(schedule.forward))
    total = len(schedule.forward) + len(schedule.backward)
    _check_none_missing(graph, range(max(last[BACKWARD] + 1, forward_count), len(operators)), BACKWARD, total)


def _order_error(graph: Graph, i: int, operator: int, what: str) -> ScheduleError:
    name = graph.operators[operator].name
    return ScheduleError(f"step {i}: operator {operator} ({name}) {what}", "plan again", step=i)


def _check_none_missing(graph: Graph, skipped: range, part: str, i: int) -> None:
    for o in skipped:
        op = graph.operators[o]
        if op.phase == part and not op.optional:
            raise ScheduleError(
                f"operator {o} ({op.name}) is missing from the {part} part before step {i}", "plan again", step=i
            )


def last_reads(graph: Graph, steps: tuple[Step, ...]) -> list[tuple[int, ...]]:
    """For each step and each of its outputs: the last step that reads that output before it is next written.

    That is the step itself where nothing reads it.
    """
    tensors = graph.tensors
    written_at: dict[int, int] = {}
    last: list[dict[int, int]] = []
    for i, step in enumerate(steps):
        op = graph.operators[step.operator]
        for t in op.implementations[step.implementation].inputs:
            if tensors[t].external:
                continue
            if t not in written_at:
                raise ScheduleError(
                    f"step {i}: operator {op.id} ({op.name}) reads tensor {t} ({tensors[t].name}), which no step "
                    "before it has written",
                    "an optional operator that is read must run first: plan again",
                    step=i,
                )
            last[written_at[t]][t] = i
        for t in op.outputs:
            if not (tensors[t].kept and t in written_at):  # readers of a kept tensor read the first
                written_at[t] = i
        last.append({t: i for t in op.outputs})
    return [tuple(d.values()) for d in last]


def _check_in_place(graph: Graph, step: Step, i: int, alive_until: dict[int, int]) -> None:
    op = graph.operators[step.operator]
    t = op.implementations[step.implementation].in_place_of
    assert t is not None
    target, output = graph.tensors[t], graph.tensors[op.outputs[0]]
    if target.external or target.kept:
        why = f"tensor {t} ({target.name}) is {'external' if target.external else 'kept'}"
    elif target.nbytes != output.nbytes:
        why = f"tensor {t} ({target.name}) has {target.nbytes} bytes, but the output has {output.nbytes}"
    elif alive_until.get(t) != i:
        why = f"tensor {t} ({target.name}) is read again by step {alive_until.get(t)}"
    else:
        return
    raise ScheduleError(
        f"step {i}: operator {op.id} ({op.name}) cannot run in place: {why}",
        "plan again, or use an implementation that is not in place",
        step=i,
    )


class FlatGraphStruct(ctypes.Structure):
    """``FlatGraph`` of ``cuda_ops/flat_graph.hpp``."""

    _fields_ = (
        ("tensors", ctypes.c_int32),
        ("operators", ctypes.c_int32),
        ("forward", ctypes.c_int32),
        ("implementations", ctypes.c_int32),
        ("nbytes", ctypes.c_void_p),
        ("tensor_flags", ctypes.c_void_p),
        ("operator_flags", ctypes.c_void_p),
        ("output_start", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("implementation_start", ctypes.c_void_p),
        ("input_start", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("in_place_of", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class FlatGraph:
    """A graph and its costs as the native core reads them; ``arrays`` own the memory that ``struct`` points to."""

    struct: FlatGraphStruct
    arrays: tuple[array[int] | array[float], ...]


_flat: dict[tuple[int, int], FlatGraph] = {}  # by identity: hashing a graph takes longer than replaying it


def flatten(graph: Graph, costs: Costs) -> FlatGraph:
    """The arrays of ``graph`` and ``costs``, made once for each pair of objects."""
    key = (id(graph), id(costs))
    if key not in _flat:
        _flat[key] = _flatten(graph, costs)
        for owner in (graph, costs):
            weakref.finalize(owner, _flat.pop, key, None)
    return _flat[key]


def _flatten(graph: Graph, costs: Costs) -> FlatGraph:
    implementations = [impl for op in graph.operators for impl in op.implementations]
    in_place = (-1 if impl.in_place_of is None else impl.in_place_of for impl in implementations)
    arrays = (
        array("q", (t.nbytes for t in graph.tensors)),
        array("B", (t.external + 2 * t.kept for t in graph.tensors)),
        array("B", ((op.phase == BACKWARD) + 2 * op.replayable + 4 * op.optional for op in graph.operators)),
        _starts(len(op.outputs) for op in graph.operators),
        array("i", (t for op in graph.operators for t in op.outputs)),
        _starts(len(op.implementations) for op in graph.operators),
        _starts(len(impl.inputs) for impl in implementations),
        array("i", (t for impl in implementations for t in impl.inputs)),
        array("i", in_place),
        array("d", (s for row in costs.seconds for s in row)),
        array("q", (b for row in costs.workspace_bytes for b in row)),
    )
    counts = (len(graph.tensors), len(graph.operators), graph.forward_count, len(implementations))
    return FlatGraph(FlatGraphStruct(*counts, *(a.buffer_info()[0] for a in arrays)), arrays)


def _starts(lengths: Iterable[int]) -> array[int]:
    starts = array("i", [0])
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


def _schedule_arrays(schedule: Schedule) -> tuple[array[int], array[int]] | None:
    steps = schedule.forward + schedule.backward
    try:
        return array("i", [s.operator for s in steps]), array("i", [s.implementation for s in steps])
    except OverflowError:  # no such operator: the reference rejects it with a message
        return None


def core() -> tuple[ctypes.CDLL | None, str]:
    """The native core with its signatures declared and ``""``, or None and the reason."""
    library, reason = native.load("core.cpp")
    if library is not None and library.monet_replay.argtypes is None:
        pointer, int64, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        int32 = ctypes.c_int32
        for name, result, arguments in (
            ("monet_replay", int64, [pointer, int64, int64, *[pointer] * 8]),
            ("monet_search_new", pointer, [pointer, ctypes.c_uint64]),
            ("monet_search_free", None, [pointer]),
            ("monet_search_load", None, [pointer, pointer, int64, int64, pointer, pointer]),
            ("monet_search_budget", None, [pointer, int64]),
            ("monet_search_greedy", int32, [pointer, int64]),
            ("monet_search_anneal", int32, [pointer, int64, double, double, double, int32]),
            ("monet_search_ruin", int32, [pointer, int64, double, double, double]),
            ("monet_search_return_to_best", None, [pointer]),
            ("monet_search_peak", int64, [pointer]),
            ("monet_search_excess", int64, [pointer]),
            ("monet_search_accepted", int64, [pointer]),
            ("monet_search_relayouts", int64, [pointer]),
            ("monet_search_seconds", double, [pointer]),
            ("monet_search_best_seconds", double, [pointer]),
            ("monet_search_read", int64, [pointer, pointer, int32, int64, pointer, pointer, pointer]),
            ("monet_pool_new", pointer, [*[int64] * 5, *[pointer] * 4, int64, int64]),
            ("monet_pool_free", None, [pointer]),
            ("monet_pool_trace", None, [pointer, int64, pointer, pointer, pointer]),
            ("monet_pool_replay", int64, [pointer] * 4),
            ("monet_pool_most_of_variants", int64, [pointer, pointer, pointer, int64]),
            ("monet_pool_keep", None, [pointer]),
            ("monet_pool_count", int64, [pointer, int32]),
            ("monet_pool_served", int64, [pointer, int32, int64, pointer, pointer, int64, pointer]),
        ):
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    return library, reason
