"""Why a module cannot be captured whole: at which line, and what can be done about it."""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from monetrun.capture.cached_functions import CacheFilled
from monetrun.capture.storages import results_of
from monetrun.core.errors import CaptureFailed
from monetrun.core.step import Break

_log = logging.getLogger("monetrun")

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# kinds of breaks after which other graphs follow in each step: a number or a shape that Dynamo would have to specialize
_FOLLOWS_DATA = re.compile(r"data.dependent|dynamic shape|dynamic slic", re.IGNORECASE)
_FAILS_IN_PIECES_TOO = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.InternalTorchDynamoError)
_ON_DATA = "it depends on the data"
_CPP_PLACE = re.compile(r"^/\S+\.(cpp|h):\d+:\s*")  # where torch was built: it helps no one
_OPEN_SIZES = re.compile(r"SymInt|SymFloat|SymBool|symbolic|unbacked")
_LONGEST = 80  # characters of a line or a reason that are printed


class FollowsData(CaptureFailed):
    """A graph has shapes or numbers that follow from its data, so that no schedule is made for it.

    Attributes:
        where: the file and line of the operator.
        only_read: the number is only read: no operator of the graph uses it.
    """

    def __init__(self, where: str, only_read: bool) -> None:
        super().__init__(f"{where}: {_ON_DATA}")
        self.where = where
        self.only_read = only_read


def is_for_another_call(error: Exception) -> bool:
    """Whether what was traced has to be called again: a cache was filled meanwhile, with which the call goes on."""
    filled = CacheFilled.behind(error)
    if filled is None:
        return False
    filled.restore()
    return True


def check(module: fx.GraphModule) -> None:
    """Check that one of Dynamo's graphs can be planned.

    Raises:
        CaptureFailed: it cannot; ``FollowsData``, where shapes or numbers follow from its data.
    """
    check_static(module)
    _refuse_flex_attention(module)
    _refuse_streams(module)


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    """Its graph, and those of higher-order operators in it."""
    return (inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule))


def _refuse_streams(module: fx.GraphModule) -> None:
    """Look for streams of the script's own in one of Dynamo's graphs: a schedule runs on one, and waits for no other.

    Raises:
        CaptureFailed: there are some.
    """
    for graph in _graphs(module):
        for node in graph.nodes:
            of_its_own = "stream" in node.meta.get("custom", {})
            if of_its_own or isinstance(node.meta.get("example_value"), (torch.Stream, torch.Event)):
                raise CaptureFailed("its forward uses CUDA streams, on which a graph's operators would not run")


def _refuse_flex_attention(module: fx.GraphModule) -> None:
    """Look for flex attention in one of Dynamo's graphs: of a captured graph it would be products of whole matrices.

    Raises:
        CaptureFailed: there is some.
    """
    flex_attention = torch.ops.higher_order.flex_attention
    for graph in _graphs(module):
        if graph.find_nodes(op="call_function", target=flex_attention):
            raise CaptureFailed("flex_attention is one kernel only where the script's own torch.compile makes it one")


def check_static(module: fx.GraphModule) -> None:
    """Check that all shapes and numbers in one of Dynamo's graphs follow from those of its inputs.

    Raises:
        FollowsData: one follows from the data (``item``, ``nonzero``, a boolean mask).
    """
    if None in results_of(module.graph):
        # TorchDynamo loses the result of ``item`` under ``torch.set_default_device``
        raise FollowsData("a value that the graph gives", True)
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op not in ("call_function", "call_method") or not _follows_data(value):
            continue
        number = not isinstance(value, torch.Tensor)
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        where = _place(frames[-1][0], int(frames[-1][1])) if frames else str(node.target)
        raise FollowsData(where, number and _is_only_given(node))


def _is_only_given(node: fx.Node) -> bool:
    """Whether a number is an output of the graph, maybe as a tensor, and nothing in it depends on it."""
    as_tensor = [user for user in node.users if user.target is torch.scalar_tensor]
    return all(user.op == "output" or (user in as_tensor and _is_only_given(user)) for user in node.users)


# What Dynamo calls so, where that says little to those who do not know it.
_IN_PLAIN_WORDS = {
    "Attempted to wrap RNN, GRU, or LSTM": "torch captures no recurrent layers (nn.RNN, nn.GRU, nn.LSTM)",
    "Attempted to wrap sparse Tensor": "torch captures no sparse tensors",
    "Attempted to call function marked as skipped": "it calls what torch does not capture",
}


def of(error: Exception, module: str, name: str) -> Break:
    """Describe what kept a module from being captured whole.

    Args:
        error: what Dynamo raised.
        module: which one.
        name: its class.
    """
    cause: Any = getattr(error, "inner_exception", error)
    if isinstance(cause, FollowsData):
        return Break(module, name, cause.where, _ON_DATA, not cause.only_read)
    if isinstance(cause, CaptureFailed):
        return Break(module, name, name, cause.message.removeprefix(f"{name}: "), in_python=True)
    stack: Sequence[Any] = getattr(error, "real_stack", None) or ()
    where = _place(stack[-1].filename, stack[-1].lineno) if stack else name
    kind = getattr(error, "gb_type", None) or _CPP_PLACE.sub("", str(cause).strip().split("\n")[0])
    if _FOLLOWS_DATA.search(kind) or isinstance(error, torch._dynamo.exc.UserError):
        return Break(module, name, where, _ON_DATA, in_python=True)
    # What the backend cannot compile it cannot compile in pieces either. And Dynamo does not go on after an operator
    # that fails on fake tensors: mostly it is the script's own mistake, of which Python gives the script's traceback.
    fails_again = cause is not error or isinstance(error, _FAILS_IN_PIECES_TOO)
    return Break(module, name, where, _short(_IN_PLAIN_WORDS.get(kind, kind)), in_python=fails_again)


def is_of_open_sizes(error: Exception) -> bool:
    """Whether what Dynamo raised can be due to sizes that are left open, and with fixed ones it may go on."""
    return _OPEN_SIZES.search(str(getattr(error, "inner_exception", error))) is not None


@contextlib.contextmanager
def in_pieces() -> Iterator[None]:
    """Within it what Dynamo fails to capture runs in Python: a forward that has begun cannot be repeated.

    An operator without an implementation for fake tensors, say. Refusals come through as ``Refused``.
    """
    config = torch._dynamo.config
    before = config.suppress_errors
    config.suppress_errors = True
    try:
        yield
    finally:
        config.suppress_errors = before


class Refused(BaseException):
    """Carries a refusal of the backend through Dynamo, which is told to suppress errors.

    Attributes:
        refusal: an exception that must end the training.
    """

    def __init__(self, refusal: Exception) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def quiet_failures(undo: contextlib.ExitStack) -> None:
    """Keep torch from logging the traceback of what it fails to capture, until ``undo`` is closed.

    It is said otherwise.
    """
    for name in ("torch._subclasses.fake_tensor", "torch._dynamo.convert_frame", "torch._dynamo.variables.tensor"):
        logger = logging.getLogger(name)
        logger.addFilter(_is_no_failure)
        undo.callback(logger.removeFilter, _is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    failed = ("failed while attempting to run meta", "fake tensor raised", "WON'T CONVERT", "Graph break from")
    if not str(record.msg).startswith(failed):
        return True
    _log.debug("torch captures something not: %s", record.msg)
    return False


def _follows_data(value: Any) -> bool:
    """Whether a size or a number is known only when the operator has run."""
    if isinstance(value, torch.Tensor):
        return any(map(_follows_data, value.shape))
    if isinstance(value, (tuple, list)):
        return any(map(_follows_data, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _place(file: str, line: int) -> str:
    """``"torchvision/models/detection/transform.py:176, index = int(...)"``."""
    _, installed, within = file.partition("site-packages/")
    here = os.path.relpath(file)
    name = within if installed else file if here.startswith("..") else here
    source = _short(linecache.getline(file, line).strip())
    source += "...)" if source.endswith("(") else ""
    return f"{name}:{line}, {source}" if source else f"{name}:{line}"
