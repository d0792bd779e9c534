"""Alternatives whose results have another form than their operator's are left out."""

import pytest
import torch
from torch import fx

from monetrun.capture.operators import signature
from monetrun.capture.result_forms import ResultForms
from monetrun.ops.registry import Alternative, Call

aten = torch.ops.aten


@pytest.fixture
def graph():
    """A placeholder of a shape and its strides, and a call of it."""
    graph, mode = fx.Graph(), torch._subclasses.fake_tensor.FakeTensorMode()

    def make(shape, strides, target, *arguments):
        node = graph.placeholder("x")
        with mode:
            node.meta["val"] = torch.empty_strided(shape, strides)
            call = graph.call_function(target, (node, *arguments))
            call.meta["val"] = target(node.meta["val"], *arguments)
        return node, call

    return make


IMAGES = ((2, 3, 4, 5), (60, 1, 15, 3))
ONE_CHANNEL = ((2, 1, 4, 5), (20, 1, 5, 1))  # channels-last, by the stride of the one channel


@pytest.mark.parametrize(
    ("form", "call", "same"),
    [
        (IMAGES, (aten.neg.default,), True),
        (IMAGES, (aten.clone.default,), True),
        (IMAGES, (aten._to_copy.default, {"dtype": torch.float64}), False),
        (IMAGES, (aten.clone.default, {"memory_format": torch.contiguous_format}), False),
        (IMAGES, (aten.transpose.int, 0, 1), False),
        (ONE_CHANNEL, (aten.clone.default,), True),
        (ONE_CHANNEL, (aten.clone.default, {"memory_format": torch.contiguous_format}), False),
        (((2, 1, 1, 1), (1, 1, 1, 1)), (aten.clone.default, {"memory_format": torch.channels_last}), True),
        (((1, 1, 4, 1), (9, 4, 1, 1)), (aten.clone.default,), True),
    ],
    ids=str,
)
def test_an_alternative_of_another_form_is_not_the_same(graph, form, call, same):
    x, operator = graph(*form, aten.clone.default)
    target, *arguments = call
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    alternative = Alternative("output", Call(target, (x, *arguments), keywords))
    assert ResultForms(signature).same(operator, alternative) == same


def test_only_the_results_that_are_read_count(graph):
    x, norm = graph((6, 8), (8, 1), aten.native_layer_norm.default, [8], None, None, 1e-5)
    other = Alternative("output", Call(aten.native_layer_norm.default, (x, [6, 8], None, None, 1e-5)))
    read = norm.graph.call_function(torch.ops.aten.alias.default, (norm, 0))
    assert ResultForms(signature).same(norm, other)
    read.args = (norm, 1)
    assert not ResultForms(signature).same(norm, other)


def test_one_result_stands_for_the_only_one_that_is_read(graph):
    x, norm = graph((6, 8), (8, 1), aten.native_layer_norm.default, [8], None, None, 1e-5)
    forms = ResultForms(signature)
    assert forms.same(norm, Alternative("output", Call(aten.neg.default, (x,), only=0)))
    assert not forms.same(norm, Alternative("output", Call(aten.neg.default, (x,), only=1)))


def test_what_is_written_over_has_the_results_form(graph):
    x, operator = graph(*IMAGES, aten.clone.default)
    y, _ = graph((2, 3, 4, 5), (60, 20, 5, 1), aten.clone.default)
    forms = ResultForms(signature)
    assert forms.same(operator, Alternative("in-place", Call(aten.neg_.default, (x,)), x))
    assert not forms.same(operator, Alternative("in-place", Call(aten.neg_.default, (y,)), y))


def test_a_call_that_does_not_run_on_fake_tensors_is_used(graph):
    x, operator = graph(*IMAGES, aten.clone.default)

    def library_operator(value):
        raise NotImplementedError("no fake kernel")

    assert ResultForms(signature).same(operator, Alternative("output", Call(library_operator, (x,))))
