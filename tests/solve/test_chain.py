"""The chain algorithms against brute force, and the schedules that they lead to, by the replay."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monetrun.core import graph as graphs
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.options import Options
from monetrun.core.plan import Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import chain, checkpoints
from support.examples import examples
from support.random_graphs import joint_graphs

SOLVERS = {
    "hong-dp": chain.solve_hong_dp,
    "hong-linear": chain.solve_hong_linear,
    "sqrt": chain.solve_sqrt,
    "none": chain.solve_none,
}

sizes = st.integers(0, 12) | st.integers(0, 10**9)
node_lists = st.lists(sizes, min_size=1, max_size=13)


@st.composite
def chains(draw):
    """``d`` and ``e`` of a chain up to n = 12; e is nothing, as in the paper, in half of them."""
    d = draw(node_lists)
    e = draw(st.lists(sizes, min_size=len(d), max_size=len(d))) if draw(st.booleans()) else []
    return d, e


def segment(d, e, i, j):
    inner = [e[t] for t in range(i + 1, j + 1)] if e else []
    return sum(d[t] for t in range(i + 1, j)) + sum(inner) + max(d[t] for t in range(i, j))


def choices(n):
    for size in range(n):
        for inside in itertools.combinations(range(1, n), size):
            yield (0, *inside, n)


def stored(d, e, c):
    return sum(d[t] for t in c) + max(segment(d, e, i, j) for i, j in itertools.pairwise(c))


def released(d, e, c):
    return max(sum(d[t] for t in c[: k + 2]) + segment(d, e, c[k], c[k + 1]) for k in range(len(c) - 1))


@settings(max_examples=examples(300), deadline=None)
@given(chains())
def test_the_cubic_program_equals_brute_force(case):
    d, e = case
    found = checkpoints.hong_dp(d, e)
    if len(d) == 1:
        assert found == checkpoints.Checkpoints((0,), d[0])
        return
    assert found.peak_bytes == min(stored(d, e, c) for c in choices(len(d) - 1))
    assert found.peak_bytes == stored(d, e, found.nodes) == checkpoints.stored_peak_bytes(d, found.nodes, e)


@settings(max_examples=examples(300), deadline=None)
@given(chains())
def test_the_linear_algorithm_equals_brute_force(case):
    d, e = case
    found = checkpoints.hong_linear(d, e)
    if len(d) == 1:
        assert found == checkpoints.Checkpoints((0,), d[0])
        return
    assert found.peak_bytes == min(released(d, e, c) for c in choices(len(d) - 1))
    assert found.peak_bytes == released(d, e, found.nodes) == checkpoints.released_peak_bytes(d, found.nodes, e)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 9), min_size=14, max_size=90))
def test_the_linear_algorithm_equals_its_quadratic_recurrence_on_longer_chains(d):
    n = len(d) - 1
    total = [0] * n + [d[n]]
    for i in range(n - 1, -1, -1):
        total[i] = d[i] + min(max(segment(d, [], i, j) + d[j], total[j]) for j in range(i + 1, n + 1))
    found = checkpoints.hong_linear(d)
    assert found.peak_bytes == total[0] == released(d, [], found.nodes)


def test_equal_nodes_give_the_known_optima():
    # 16 layers of one byte: all checkpoints and one segment, 2 sqrt(n) or so; with release less is held at the end
    d = [0] + [1] * 16
    assert checkpoints.none(d) == checkpoints.Checkpoints(tuple(range(17)), 17)
    assert checkpoints.sqrt(d) == checkpoints.Checkpoints((0, 4, 8, 12, 16), 4 + 3 + 1)
    assert checkpoints.hong_dp(d).peak_bytes == 8
    assert checkpoints.hong_linear(d).peak_bytes == 7
    nodes = checkpoints.hong_linear(d).nodes
    lengths = [j - i for i, j in itertools.pairwise(nodes)]
    assert lengths[1:] == [5, 4, 3, 2, 1]  # later segments are shorter: more checkpoints are held with them


def test_a_million_nodes_take_the_linear_algorithm_under_two_seconds():
    d = [(i * 2654435761) % 1000003 for i in range(1_000_001)]
    took = []
    for _ in range(3):  # the least of three, and of this thread's own time: the machine is shared
        start = time.thread_time()
        found = checkpoints.hong_linear(d)
        took.append(time.thread_time() - start)
        if took[-1] < 2:
            break
    assert min(took) < 2, took
    assert found.nodes[0] == 0
    assert found.nodes[-1] == 1_000_000
    assert found.peak_bytes == checkpoints.released_peak_bytes(d, found.nodes)
    assert found.peak_bytes < sum(d) / 100


@pytest.mark.parametrize("algorithm", checkpoints.SELECTIONS.values())
def test_invalid_sizes_are_refused_with_their_value(algorithm):
    with pytest.raises(ValueError, match="got none"):
        algorithm([])
    with pytest.raises(ValueError, match="got -3"):
        algorithm([1, -3, 2])
    with pytest.raises(ValueError, match="2 entries for 3 nodes"):
        algorithm([1, 2, 3], [0, 0])


def linear_graph(node_bytes, *, dropout_after=(), output_bytes=1):
    """A network whose layer t reads node t-1, writes node t, and whose backward reads both node t-1 and the gradient.

    Node 0 is the batch. After the nodes in ``dropout_after``, a mask of one byte is drawn, which the next layer reads
    and its backward too.
    """
    tensors = [Tensor(0, node_bytes[0], external=True)]
    operators = []

    def tensor(nbytes, **flags):
        tensors.append(Tensor(len(tensors), nbytes, **flags))
        return len(tensors) - 1

    def run(phase, inputs, outputs, **flags):
        i = len(operators)
        operators.append(
            Operator(i, f"op{i}", "test.op", phase, outputs, (Implementation("default", inputs),), **flags)
        )

    node, reads = 0, []
    n = len(node_bytes) - 1
    for t in range(1, n + 1):
        mask = ()
        if t - 1 in dropout_after:
            mask = (tensor(1),)
            run(FORWARD, (), mask, replayable=False)
        output = tensor(node_bytes[t])
        run(FORWARD, (node, *mask), (output,))
        reads.append((node, *mask))
        node = output
    run(FORWARD, (node,), (tensor(output_bytes, kept=True),))
    gradient = tensor(node_bytes[n], external=True)
    for t in range(n, 0, -1):
        below = tensor(node_bytes[t - 1], kept=t == 1)
        run(BACKWARD, (*reads[t - 1], gradient), (below,), replayable=False)
        gradient = below
    graph = Graph("linear", tuple(tensors), tuple(operators))
    costs = Costs("test", ((1.0,),) * len(operators), ((0,),) * len(operators))
    graphs.check(graph, costs)
    return graph, costs


def test_a_linear_network_is_cut_after_every_layer():
    graph, _ = linear_graph([3, 5, 7, 9, 4])
    cut = chain.linearize(graph)
    assert cut.cuts == (0, 1, 2, 3, 4, 5)
    assert cut.node_bytes == (0, 5, 7, 9, 4, 0)
    assert [None if t is None else graph.tensors[t].nbytes for t in cut.tensors] == [None, 5, 7, 9, 4, None]
    assert cut.inner_bytes == (0,) * 6


def test_a_skip_connection_leaves_no_narrow_point_beneath_it():
    tensors = (Tensor(0, 1, external=True), *(Tensor(i, 10 + i) for i in range(1, 6)), Tensor(6, 1, kept=True))
    reads = [(0,), (1,), (2,), (3, 1), (4,), (5,)]  # 1 skips over 2 and 3 to the writer of 4
    operators = [
        Operator(i, f"f{i}", "t", FORWARD, (i + 1,), (Implementation("default", r),)) for i, r in enumerate(reads)
    ]
    operators.append(Operator(6, "b", "t", BACKWARD, (), (Implementation("default", (1, 2, 3, 4)),), replayable=False))
    graph = Graph("skip", tensors, tuple(operators))
    graphs.check(graph)
    cut = chain.linearize(graph)
    assert cut.tensors == (None, 1, 4, 5, None)
    assert cut.cuts == (0, 1, 4, 5, 6)
    assert cut.node_bytes == (0, 11, 14, 15, 0)
    assert cut.inner_bytes == (0, 0, 12 + 13, 0, 0)  # what backward reads inside the block; 14 crosses


def forward_graph(reads, outputs, *, random=(), backward_reads=(), nbytes=None):
    """Forward operators that read and write the tensors given (0 is the batch), and one backward operator."""
    count = 1 + max(t for o in outputs for t in o)
    nbytes = nbytes or [8] * count
    operators = [
        Operator(i, f"f{i}", "t", FORWARD, o, (Implementation("default", r),), replayable=i not in random)
        for i, (r, o) in enumerate(zip(reads, outputs, strict=True))
    ]
    last = (Implementation("default", backward_reads),)
    operators.append(Operator(len(reads), "b", "t", BACKWARD, (), last, replayable=False))
    graph = Graph("g", tuple(Tensor(t, nbytes[t], external=t == 0) for t in range(count)), tuple(operators))
    graphs.check(graph)
    return graph


def test_two_branches_leave_no_narrow_point_between_fork_and_join():
    graph = forward_graph([(0,), (1,), (1,), (2, 3), (4,)], [(1,), (2,), (3,), (4,), (5,)])
    cut = chain.linearize(graph)
    assert (cut.cuts, cut.tensors) == ((0, 1, 4, 5), (None, 1, 4, None))


def test_blocks_that_end_in_a_random_operator_are_cut_there():
    # what a random operator gives stays anyway, so that nothing else crosses after it
    graph = forward_graph(
        [(0,), (1, 2), (3,), (4, 5), (6,), (7, 8)], [(1, 2), (3,), (4, 5), (6,), (7, 8), (9,)], random=(1, 3, 5)
    )
    cut = chain.linearize(graph)
    assert (cut.cuts, cut.tensors) == ((0, 2, 4, 6), (None, None, None, None))


def test_a_counter_that_is_copied_at_the_end_hides_no_narrow_point():
    reads, outputs = [(0,), (1,), (3,), (2,)], [(1, 2), (3,), (4,), ()]
    graph = forward_graph(reads, outputs, backward_reads=(1, 3, 4), nbytes=[1, 1000, 30, 1000, 1000])
    cut = chain.linearize(graph)
    assert (cut.cuts, cut.tensors) == ((0, 1, 2, 3, 4), (None, 1, 3, None, None))
    assert cut.inner_bytes == (0, 0, 0, 1000, 0)
    graph = forward_graph(reads, outputs, backward_reads=(1, 3, 4), nbytes=[1, 1000, 31, 1000, 1000])
    assert chain.linearize(graph).tensors == (None, 2, None)  # over a hundredth of what backward reads: not small


def test_operators_that_backwards_reads_depend_on_are_recomputed():
    graph = forward_graph([(0,), (1,), (2,), (2,), (4,)], [(1,), (2,), (3,), (4,), (5,)], backward_reads=(2, 5))
    found = chain.schedule_of(graph, chain.linearize(graph), (0, 3, 4))
    assert chain.linearize(graph).tensors == (None, 1, 2, 4, None)
    assert [s.operator for s in found.backward] == [0, 1, 5]  # not 2: nothing reads tensor 3


def test_a_segment_is_recomputed_when_backward_reaches_it():
    graph, costs = linear_graph([1, 1, 1, 1, 1])
    cut = chain.linearize(graph)
    found = chain.schedule_of(graph, cut, (0, 2, 4, 5))
    forward = [s.operator for s in found.forward]
    assert forward == [0, 1, 2, 3, 4]
    # backward of layer 4 reads node 3: layer 3 runs again; that of 3 reads checkpoint 2; that of 2 reads node 1
    assert [s.operator for s in found.backward] == [2, 5, 6, 0, 7, 8]
    assert simulate(graph, costs, found).seconds == 11.0


def test_the_last_segment_is_not_dropped():
    graph, _ = linear_graph([1, 1, 1, 1, 1])
    cut = chain.linearize(graph)
    assert chain.schedule_of(graph, cut, (0, 5)) == plain_schedule(graph)
    assert [s.operator for s in chain.schedule_of(graph, cut, (0, 2, 5)).backward] == [5, 6, 0, 7, 8]


def test_a_dropout_mask_is_drawn_once_and_its_layer_may_be_recomputed():
    graph, costs = linear_graph([1, 4, 4, 4, 4], dropout_after=(0, 1, 2, 3))
    cut = chain.linearize(graph)
    found = chain.schedule_of(graph, cut, tuple(range(0, len(cut.cuts), 2)))
    again = [s.operator for s in found.backward if graph.operators[s.operator].phase == FORWARD]
    assert again
    assert all(graph.operators[op].replayable for op in again)
    assert any(len(graph.operators[op].inputs) == 2 for op in again)
    assert simulate(graph, costs, found).peak_bytes < simulate(graph, costs, plain_schedule(graph)).peak_bytes


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(0, 20), min_size=3, max_size=25))
def test_on_a_linear_network_the_simulated_peak_is_at_most_the_objective(node_bytes):
    graph, costs = linear_graph(node_bytes, output_bytes=1)
    cut = chain.linearize(graph)
    for nodes, objective in (
        (checkpoints.hong_linear(cut.node_bytes).nodes, checkpoints.released_peak_bytes),
        (checkpoints.hong_dp(cut.node_bytes).nodes, checkpoints.stored_peak_bytes),
        (checkpoints.sqrt(cut.node_bytes).nodes, checkpoints.released_peak_bytes),
    ):
        peak_bytes = simulate(graph, costs, chain.schedule_of(graph, cut, nodes)).peak_bytes
        # the output, and the batch's gradient, are kept and not nodes of the chain; the smallest tensors stay
        assert peak_bytes <= objective(cut.node_bytes, nodes) + 1 + node_bytes[0] + sum(node_bytes) // 100


def test_checkpoints_halve_the_peak_of_a_long_network_and_release_beats_storing():
    graph, costs = linear_graph([1] * 100)
    peaks = {name: simulate(graph, costs, chain.schedule(graph, name)).peak_bytes for name in checkpoints.SELECTIONS}
    assert peaks["none"] == 100  # nodes 1 to 98, the first gradient and the output
    assert peaks["hong-linear"] <= peaks["hong-dp"] <= 22
    assert peaks["hong-linear"] <= peaks["sqrt"]


@settings(max_examples=examples(200), deadline=None)
@given(joint_graphs(max_forward=12), st.sampled_from(sorted(SOLVERS)))
def test_every_random_graph_gives_a_valid_schedule_within_its_budget_or_none(case, name):
    graph, costs = case
    found = chain.schedule(graph, name)
    timeline = simulate(graph, costs, found)  # raises if it breaks a rule
    fits = SOLVERS[name](graph, costs, timeline.peak_bytes, Options())
    assert fits.schedule == found
    assert fits.status in ("feasible", "optimal")
    assert fits.bound_seconds <= timeline.seconds * (1 + 1e-12)
    tight = SOLVERS[name](graph, costs, timeline.peak_bytes - 1, Options())
    assert (tight.schedule, tight.status, tight.solver) == (None, "unknown", name)
    masks = {op.id for op in graph.operators if not op.replayable}
    assert masks.isdisjoint(s.operator for s in found.backward if s.operator < graph.forward_count)


def test_without_recomputation_the_plain_schedule_is_the_only_one():
    graph, costs = linear_graph([1] * 30)
    plain = plain_schedule(graph)
    peak_bytes = simulate(graph, costs, plain).peak_bytes
    solution = chain.solve_hong_dp(graph, costs, peak_bytes, Options(recompute=False))
    assert solution.schedule == plain
    assert solution.status == "optimal"
    assert solution.bound_seconds == 60.0 - 1
    assert chain.solve_hong_dp(graph, costs, peak_bytes - 1, Options(recompute=False)).status == "unknown"
    assert Step(0) not in plain.backward


def test_an_unknown_algorithm_is_refused_with_the_names_there_are():
    graph, _ = linear_graph([1, 1, 1])
    with pytest.raises(ValueError, match=r"'chen'; there are hong-dp, hong-linear, sqrt, none"):
        chain.schedule(graph, "chen")
