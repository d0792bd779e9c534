"""The source of a generated module goes with the module; until then tracebacks show it."""

import gc
import linecache

import torch
from torch import fx
from torch.fx.graph_module import _loader

from monetrun.capture import execute
from monetrun.capture.generated import graph_module


def doubled():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)),))
    return graph_module({}, graph)


def test_sources_go_with_their_modules_and_with_what_is_generated_in_their_place():
    gc.collect()
    before = set(_loader.eval_cache)
    module = doubled()
    run = execute.boxed(module)
    assert len(set(_loader.eval_cache) - before) == 1
    file = module.forward.__code__.co_filename
    assert "aten.mul" in "".join(linecache.getlines(file))
    assert run([torch.ones(1)])[0].item() == 2
    del module
    gc.collect()
    assert run([torch.ones(1)])[0].item() == 2
    assert file in _loader.eval_cache
    del run
    gc.collect()
    assert set(_loader.eval_cache) <= before
    assert file not in linecache.cache
