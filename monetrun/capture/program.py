"""Runs a module of a schedule without Python between its operators, where kernels take less time than calling them.

fx's generated code spends 2 to 12 microseconds of the host's time on each call of an operator; eager's backward has no
Python at all. Here the calls are handed once to ``cuda_ops/program.cpp``, which makes the same calls in the same order,
and frees each value after its last reader. It is built against the installed torch the first time and kept. Without a
compiler, and for what it does not know, the generated code runs. What is no operator of torch's dispatcher, such as
drawing random numbers again, is called from Python between two runs of calls.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monetrun.core import native
from monetrun.ops import kernels
from monetrun.ops.cuda import launch
from monetrun.ops.cuda.recorded import Recorded

Run = Callable[[list[Any]], Any]

_NONE, _LIST, _EMPTY = -1, -2, -3  # as in program.cpp
_NUMBERS: dict[str, Callable[[Any], Any]] = {"FloatType": float, "BoolType": bool}
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)  # c10's order

_log = logging.getLogger("monetrun")


class _Unsupported(Exception):
    """The module has something that a program cannot do; the text says what."""


def _build() -> Path:
    folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return native.build(
        "program.cpp",
        ("-std=c++20", "-O2", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        includes=(folder / "include",),
        library_folders=(folder / "lib",),
        libraries=("c10", "torch_cpu"),
        # another torch in the same folder has the same flags and another interface
        key=f"{torch.__version__} {torch.version.git_version}",
    )


def prebuild() -> str | None:
    """Build the library if it is missing, without loading it.

    Returns:
        None, or why it cannot be built.
    """
    try:
        _build()
    except native.NativeBuildFailed as error:
        return str(error)
    return None


@functools.cache
def unavailable_reason() -> str:
    """Why there are no programs (no compiler, a failed build, ...); empty where there are. Builds if need be."""
    try:
        torch.classes.load_library(str(_build()))
    except (OSError, native.NativeBuildFailed) as error:
        return str(error)
    return ""


def is_loaded() -> bool:
    """Whether this process has the library; loads none."""
    return bool(unavailable_reason.cache_info().currsize) and not unavailable_reason()


@functools.cache
def library() -> ctypes.CDLL:
    """The library, where it is loaded, for what is called in each step: by its C functions, which take little time."""
    return ctypes.CDLL(str(_build()))


def runs_on_cuda(module: fx.GraphModule) -> bool:
    """Whether a module takes tensors of a CUDA device, where a program is worth its making."""
    values = (node.meta.get("val") for node in module.graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def program(module: fx.GraphModule) -> Run | None:
    """A callable that takes its inputs in a list and empties it, as ``execute.boxed``; None where it cannot be made.

    Args:
        module: of ``execute.build``.
    """
    if reason := unavailable_reason():
        _log.info("generated Python code calls the operators: %s", reason)
        return None
    try:
        return _made(_Calls.of(module))
    except (_Unsupported, RuntimeError, TypeError) as error:  # the latter: torch refuses a constant
        _log.info("generated Python code calls the operators: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class _Known:
    """What an operator of ours does, and with which values."""

    does: Recorded
    device: torch.device
    given: list[int]


@dataclass
class _Call:
    """A call in the form that ``Program.add`` takes."""

    name: str
    overload: str
    constants: list[Any] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    known: _Known | None = None

    def reads(self) -> set[int]:
        """The values among its arguments."""
        return {v for row in self.rows for v in row if v >= 0}


@dataclass
class _PythonCall:
    """A call of a Python function on values."""

    node: fx.Node
    inputs: list[int]
    results: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # no value is within a list or behind a keyword
        self.is_flat = len({a for a in self.node.args if isinstance(a, fx.Node)}) == len(self.inputs)

    def reads(self) -> set[int]:
        """The values among its arguments."""
        return set(self.inputs)

    def check_results(self) -> None:
        """Check that what is read of its results are tensors.

        Raises:
            _Unsupported: it is a number, as flash attention gives some.
        """
        given = self.node.meta.get("val")
        for v, value in zip(self.results, given if isinstance(given, (list, tuple)) else [given], strict=False):
            if v != _NONE and not isinstance(value, (torch.Tensor, type(None))):
                raise _Unsupported(f"{self.node.name} gives {value}, which is not a tensor")

    def run(self, values: Any) -> None:
        """Make it."""
        given = dict(zip(self.node.all_input_nodes, values.read(self.inputs), strict=True))
        if self.is_flat:
            args: Any = [given[a] if isinstance(a, fx.Node) else a for a in self.node.args]
            kwargs: Any = self.node.kwargs
        else:
            args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), given.__getitem__)
        result = self.node.target(*args, **kwargs)  # type: ignore[operator]
        results = result if isinstance(result, (list, tuple)) else [result]
        read = [(v, r) for v, r in zip(self.results, results, strict=False) if v != _NONE]
        values.write([v for v, _ in read], [r for _, r in read])
        values.free(self.freed)


@dataclass
class _Calls:
    """A module's calls on numbered values.

    Attributes:
        values: how many there are; the first are the module's inputs.
        outputs: the value of each output; a constant stands in ``constants``.
        constants: outputs that are no tensors, by position.
    """

    calls: list[_Call | _PythonCall]
    values: int
    outputs: list[int]
    constants: dict[int, Any]

    @classmethod
    def of(cls, module: fx.GraphModule) -> _Calls:
        """Number the values of a module and describe its calls.

        Raises:
            _Unsupported: a program cannot do this.
        """
        numbers: dict[fx.Node, int] = {}
        tensors: dict[fx.Node, torch.Tensor] = {}
        calls: list[_Call | _PythonCall] = []
        values = 0
        results: Any = ()
        for node in module.graph.nodes:
            if node.op == "output":
                results = node.args[0]
            elif node.op == "get_attr":
                tensors[node] = getattr(module, node.target)
            elif node.op == "placeholder":
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise _Unsupported(f"the input {node.name} is not a tensor")
                numbers[node] = values
                values += 1
            elif node.target is not operator.getitem:
                call: _Call | _PythonCall
                if isinstance(node.target, torch._ops.OpOverload):
                    call = _described(node, numbers, tensors)
                else:
                    call = _PythonCall(node, [_number(n, numbers) for n in node.all_input_nodes])
                values = _number_results(node, call, numbers, values)
                if isinstance(call, _PythonCall):
                    call.check_results()
                calls.append(call)
            elif node not in numbers:
                raise _Unsupported(f"{node.name} is an element of what no operator gave")
        if any(n in tensors for n in results):
            raise _Unsupported("a constant tensor is an output")
        found = cls(
            calls,
            values,
            [numbers[n] for n in results if isinstance(n, fx.Node)],
            {k: value for k, value in enumerate(results) if not isinstance(value, fx.Node)},
        )
        found._free(sum(node.op == "placeholder" for node in module.graph.nodes))
        return found

    def parts(self) -> list[_PythonCall | tuple[int, int]]:
        """What a run does: calls of the program, from one to before another, and calls of Python."""
        found: list[_PythonCall | tuple[int, int]] = []
        begin = end = 0
        for call in self.calls:
            if isinstance(call, _Call):
                end += 1
                continue
            found += [(begin, end), call] if begin < end else [call]
            begin = end
        return [*found, (begin, end)] if begin < end else found

    def _free(self, inputs: int) -> None:
        """Free each value after the call that reads it last, or that gives it where none reads it."""
        last = dict.fromkeys(range(inputs), 0)
        for k, call in enumerate(self.calls):
            last.update(dict.fromkeys((*call.reads(), *call.results), k))
        last.pop(_NONE, None)
        for value, k in last.items():
            if value not in self.outputs and self.calls:
                self.calls[k].freed.append(value)


def _number_results(node: fx.Node, call: _Call | _PythonCall, numbers: dict[fx.Node, int], values: int) -> int:
    """Number what a call gives, as far as it is read; gives how many values there are then."""
    elements = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    count, by_element = _results(node)
    if len(elements) != (len(node.users) if by_element else 0):
        raise _Unsupported(f"of {node.name} not just elements are read")
    if not elements:
        call.results = [_NONE] * count
        if node.users:
            call.results = [values]
            numbers[node] = values
            values += 1
        return values
    last: Any = max(user.args[1] for user in elements)  # type: ignore[type-var]
    call.results = [_NONE] * (count or last + 1)
    for element in elements:
        index: Any = element.args[1]
        if call.results[index] == _NONE:
            call.results[index] = values
            values += 1
        numbers[element] = call.results[index]
    return values


def _results(node: fx.Node) -> tuple[int, bool]:
    """How many results a call has (0: a list of any length), and whether they are read one by one."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0, isinstance(node.meta.get("val"), (list, tuple))
    returns = node.target._schema.returns
    is_list = len(returns) == 1 and returns[0].type.kind() == "ListType"
    return (0 if is_list else len(returns)), is_list or len(returns) != 1


def _described(node: fx.Node, numbers: Mapping[fx.Node, int], tensors: Mapping[fx.Node, torch.Tensor]) -> _Call:
    schema = node.target._schema  # type: ignore[union-attr]
    call = _Call(schema.name, schema.overload_name)
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    for argument in schema.arguments:
        value: Any = given.get(argument.name, argument.default_value)
        constant, row = None, []
        if isinstance(value, fx.Node):
            constant, row = (tensors[value], []) if value in tensors else (None, [numbers[value]])
        elif isinstance(value, (list, tuple)) and not value:
            row = [_EMPTY]
        elif isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
            row = [_LIST, *(_NONE if v is None else _number(v, numbers) for v in value)]
        else:
            constant = _constant(argument.type, value)
        call.constants.append(constant)
        call.rows.append(row)
    call.known = _known(node, numbers)
    return call


def _known(node: fx.Node, numbers: Mapping[fx.Node, int]) -> _Known | None:
    """What an operator of ours with a kernel for CUDA does beneath the dispatcher; None where it has to be asked."""
    inputs = [a for a in node.args if isinstance(a, fx.Node)]
    if node.kwargs or len(inputs) < len(set(node.all_input_nodes)) or not numbers.keys() >= set(inputs):
        return None
    given = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    if not all(isinstance(v, torch.Tensor) for v, a in zip(given, node.args, strict=True) if isinstance(a, fx.Node)):
        return None  # the one result of an implementation of an operator that has several, in a layout of its own
    devices = {v.device for v in given if isinstance(v, torch.Tensor)}
    if len(devices) != 1 or not isinstance(node.target, torch._ops.OpOverload):
        return None
    (device,) = devices
    does = kernels.recorded(node.target, given, device)
    return None if does is None else _Known(does, device, [numbers[n] for n in inputs])


def _number(node: Any, numbers: Mapping[fx.Node, int]) -> int:
    if node not in numbers:
        raise _Unsupported(f"{node} is in a list of tensors")
    return numbers[node]


def _constant(type_: Any, value: Any) -> Any:
    """A constant argument as the dispatcher takes it: it converts nothing."""
    kind = type_.kind()
    if value is None:
        return None
    if kind == "OptionalType":
        return _constant(type_.getElementType(), value)
    if kind == "ListType":
        if not isinstance(value, (list, tuple)):
            raise _Unsupported(f"{value} stands for a list")
        return [_constant(type_.getElementType(), v) for v in value]
    if isinstance(value, torch.Tensor):
        raise _Unsupported("a tensor is a constant")
    if isinstance(value, torch.memory_format):
        return _FORMATS.index(value)
    return _NUMBERS[kind](value) if kind in _NUMBERS else value


def _stream(index: int) -> int:
    """The current stream of a CUDA device, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def _made(found: _Calls) -> Run:
    classes = torch.classes.monetrun
    made = classes.Program()
    devices = [call.known.device for call in found.calls if isinstance(call, _Call) and call.known is not None]
    device = devices[0] if devices else torch.device("cpu")
    driver = launch.driver() if devices else 0
    stream_of, index = _stream if device.type == "cuda" else lambda _: 0, device.index
    for call in found.calls:
        if isinstance(call, _Call):
            made.add(call.name, call.overload, tuple(call.constants), call.rows, call.results, call.freed)
            if call.known is not None and call.known.device == device:  # a run has the stream of one device
                does, given = call.known.does, call.known.given
                made.launches(str(device), driver, does.like, given, tuple(does.launches), does.results)
    values_of, count, run_calls = classes.Values, found.values, made.run
    parts, outputs, constants = found.parts(), found.outputs, found.constants

    def run(arguments: list[Any]) -> Any:
        values = values_of(arguments, count, stream_of(index))
        arguments.clear()  # from here on ``values`` alone holds them, and frees them
        for part in parts:
            if isinstance(part, _PythonCall):
                part.run(values)
            else:
                run_calls(values, *part)
        results = values.read(outputs)
        return tuple(_with_constants(results, constants) if constants else results)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_constants(results: Sequence[Any], constants: Mapping[int, Any]) -> list[Any]:
    others = iter(results)
    return [constants[k] if k in constants else next(others) for k in range(len(results) + len(constants))]
