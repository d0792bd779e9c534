"""Modules of ``torch.fx`` whose generated source goes with them.

``torch.fx`` keeps the source of each module that it has made, for tracebacks, for as long as the process lives. In a
run whose input sizes vary, graphs come and go.
"""

from __future__ import annotations

import linecache
import weakref
from typing import Any

from torch import fx
from torch.fx import graph_module as _fx

_PREFIX = "<eval_with_key>"  # of the file names that it makes up


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs ``graph``, with what it reads of ``root``."""
    module = fx.GraphModule(root, graph)
    _forget_with(module)
    return module


def generate_anew(module: fx.GraphModule, codegen: Any) -> None:
    """Generate ``module``'s source by ``codegen``, in place of what it has."""
    _forget(_file_of(module))
    module.graph.set_codegen(codegen)
    module.recompile()
    _forget_with(module)


def _forget_with(module: fx.GraphModule) -> None:
    weakref.finalize(module, _forget, _file_of(module)).atexit = False


def _file_of(module: fx.GraphModule) -> str:
    code = getattr(module.forward, "__code__", None)
    return "" if code is None else code.co_filename


def _forget(file: str) -> None:
    if file.startswith(_PREFIX):
        for sources in (_fx._loader.eval_cache, linecache.cache):
            sources.pop(file, None)
