"""What the plain step requests of the allocator, and holds, beside what a planned one does."""

from dataclasses import replace

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Requests, Tensor
from monetrun.core.plain_step import plain_step, plain_timeline
from monetrun.core.step import StepRecord

COPY, WEIGHT, INPUT, SPACE = 32, 5, 128, 8


def operator(i, phase, inputs, output, **marks):
    return Operator(i, f"op{i}", "aten.x.default", phase, (output,), (Implementation("default", inputs),), **marks)


def graph(**marks):
    """A convolution whose backward is two operators, for eager one call: the weight's gradient, then the input's."""
    tensors = [Tensor(i, nbytes, external=i < 2) for i, nbytes in enumerate((1, COPY, 64, WEIGHT, INPUT))]
    tensors[3:] = [replace(t, kept=True) for t in tensors[3:]]
    operators = (
        operator(0, FORWARD, (0,), 2),
        operator(1, BACKWARD, (1, 2), 3, **marks),
        operator(2, BACKWARD, (1,), 4, plain_holds=(2,)),
    )
    return Graph("model", tuple(tensors), operators)


def costs(of_weight, of_input):
    return Costs("", ((1.0,),) * 3, ((0,), (SPACE,), (SPACE,)), ((Requests(),), (of_weight,), (of_input,)))


def requests(of_weight, of_input):
    record = StepRecord((graph(one_call_with_next=True),), (costs(of_weight, of_input),), (), 0, {}, "cuda", "")
    return [found[0] for found in plain_step(record)[0].costs[0].requests[1:]]


def test_one_call_of_eagers_makes_what_both_operators_make_first_once():
    # each copies the gradient, and frees the copy at its end; the weight's has a second temporary
    of_weight = Requests((COPY, WEIGHT, SPACE, -3, -1, 3, -4), (2,))
    of_input = Requests((COPY, INPUT, SPACE, -3, -1), (2,))
    first, second = requests(of_weight, of_input)
    assert first == Requests((COPY, INPUT, SPACE, -3, WEIGHT, SPACE, -5, -1, 3, -6, -2), (4,))
    assert second == Requests((INPUT,), (1,))
    first.check()


def test_what_only_one_of_them_makes_is_its_own():
    first, second = requests(Requests((WEIGHT, SPACE, -2), (1,)), Requests((INPUT, SPACE, -2), (1,)))
    assert first == Requests((INPUT, SPACE, -2, WEIGHT, SPACE, -4, -1), (3,))
    assert second == Requests((INPUT,), (1,))
    first.check()


def test_an_operator_whose_requests_are_not_known_stays_as_it_is():
    known = Requests((INPUT, SPACE, -2), (1,))
    assert requests(Requests(), known) == [Requests(), known]


def test_what_a_node_has_saved_is_held_until_its_last_operator_has_run():
    known = costs(Requests(), Requests())
    held = plain_timeline(graph(), known)
    operators = tuple(replace(op, plain_holds=()) for op in graph().operators)
    freed = plain_timeline(replace(graph(), operators=operators), known)
    assert (held.peak_bytes, freed.peak_bytes) == (64 + WEIGHT + INPUT + SPACE, WEIGHT + INPUT + SPACE)
