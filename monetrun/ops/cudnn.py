"""cuDNN's plans for a convolution or one of its gradients, and running one (``pip install nvidia-cudnn-frontend``).

For one convolution cuDNN has dozens of plans (an engine and its settings, which are the plan's name), ordered by the
speed that its heuristics expect; ATen runs the first, whatever its workspace. Worth a choice are the first and those
after it with clearly less workspace: for a contiguous convolution in float32 the first may take as much as input and
output together, and the thirtieth nothing.

Operations are named as cuDNN names them, between an *image*, a *filter* and a *response*: ``fprop`` computes the
response, ``dgrad`` the image's gradient, ``wgrad`` the filter's. A transposed convolution is a ``dgrad``, and the
gradient of its input an ``fprop``.

Plans that are not deterministic are left out, so that a recomputation is bitwise identical; so are those that use
TensorFloat-32 where torch does not allow it. Without a CUDA device the package is not imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monetrun.ops import device_errors
from monetrun.ops.memory_format import memory_format

aten = torch.ops.aten

MOST_PLANS = 4  # for one call: each is timed, and is one more choice for the planner
# a plan is worth a choice if its workspace is smaller than that of all before it by this share and by so many bytes
_SHARE_SAVED, _BYTES_SAVED = 0.1, 1 << 20
_ALIGNMENT_BYTES = 16  # of pointers; plans may rely on it

_ROLES = {  # of the operands, and of the result
    "fprop": ("image", "filter", "response"),
    "dgrad": ("response", "filter", "image"),
    "wgrad": ("response", "image", "filter"),
}
DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class Problem:
    """One convolution, or one gradient of it.

    Attributes:
        operation: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        image, filter, response: sizes ([N, C, ...], [K, C / groups, ...], [N, K, ...]).
        stride, padding, dilation: one for each spatial dimension.
        dtype: of all three.
        channels_last: the format of all three; else they are contiguous.
    """

    operation: str
    image: tuple[int, ...]
    filter: tuple[int, ...]
    response: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(
        cls,
        operation: str,
        sizes: Iterable[Sequence[int]],
        window: Iterable[Sequence[int]],
        dtype: torch.dtype,
        channels_last: bool,
    ) -> Problem:
        """From the sizes of image, filter and response, and stride, padding and dilation, as any sequences."""
        image, filter, response = map(tuple, sizes)
        stride, padding, dilation = map(tuple, window)
        return cls(operation, image, filter, response, stride, padding, dilation, dtype, channels_last)

    @property
    def text(self) -> str:
        """All of it, the same in every process."""
        sizes = (self.image, self.filter, self.response, self.stride, self.padding, self.dilation)
        form = "channels-last" if self.channels_last else "contiguous"
        return " ".join([self.operation, *("x".join(map(str, size)) for size in sizes), str(self.dtype), form])

    @property
    def roles(self) -> tuple[str, str, str]:
        """The roles of the two operands, and of the result."""
        return _ROLES[self.operation]

    @property
    def format(self) -> torch.memory_format:
        """``channels_last`` as torch calls it."""
        return memory_format(len(self.image), self.channels_last)

    def empty(self, role: str, device: Any) -> Tensor:
        """A new image, filter or response."""
        return torch.empty(getattr(self, role), dtype=self.dtype, device=device, memory_format=self.format)


# ---- whether it can be used


@functools.cache
def unavailable_reason() -> str | None:
    """Why there are no plans (no package, no device, ...), or None. Imports the package where there is a device."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    if not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
        return "torch sees no CUDA device, or has no cuDNN"
    try:
        version = importlib.import_module("cudnn").backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"nvidia-cudnn-frontend cannot be used: {error}"
    if version != torch.backends.cudnn.version():
        return f"nvidia-cudnn-frontend loads cuDNN {version}, torch {torch.backends.cudnn.version()}"
    return None


def tensor_float_allowed() -> bool:
    """Whether torch computes float32 convolutions in TensorFloat-32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the script set it by its newer name
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions that the package raises where cuDNN does not support a request."""
    return importlib.import_module("cudnn").cudnnGraphNotSupportedError, RuntimeError, ValueError


@contextlib.contextmanager
def _handle(device: torch.device) -> Iterator[Any]:
    """The device's handle, set to the current stream, locked against other threads."""
    with _lock, torch.cuda.device(device):
        handle = _new_handle(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        importlib.import_module("cudnn").set_stream(handle=handle, stream=stream)
        yield handle


_lock = threading.Lock()


@functools.cache
def _new_handle(device: torch.device) -> Any:
    return importlib.import_module("cudnn").create_handle()


# ---- plans


class Drawn:
    """The package's graph of one problem, and its plans.

    Args:
        problem: of the graph.
        where: ``handle=`` of a device, or ``device_property=`` of one that need not be present.

    Raises:
        RuntimeError, ValueError, or the package's error: cuDNN has no plan for it.
    """

    def __init__(self, problem: Problem, **where: Any) -> None:
        frontend = importlib.import_module("cudnn")
        self.problem = problem
        self.graph = frontend.pygraph(
            io_data_type=getattr(frontend.data_type, DTYPES[problem.dtype]),
            intermediate_data_type=frontend.data_type.FLOAT,
            compute_data_type=frontend.data_type.FLOAT,
            **where,
        )
        *operands, result = (problem.empty(role, "meta") for role in problem.roles)
        first, second = (
            self.graph.tensor(name=role, dim=list(value.shape), stride=list(value.stride()))
            for role, value in zip(problem.roles[:2], operands, strict=True)
        )
        window = {name: list(getattr(problem, name)) for name in ("padding", "stride", "dilation")}
        if problem.operation == "fprop":
            made = self.graph.conv_fprop(image=first, weight=second, **window)
        elif problem.operation == "dgrad":
            made = self.graph.conv_dgrad(loss=first, filter=second, **window)
        else:
            made = self.graph.conv_wgrad(image=second, loss=first, **window)
        made.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
        self.tensors = (first, second, made)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])

    def deselect(self, tensor_float: bool) -> None:
        """Leave out plans that are not deterministic, or less precise than ATen's."""
        notes = importlib.import_module("cudnn").numerical_note
        unwanted = [notes.NONDETERMINISTIC]
        if self.problem.dtype == torch.float32:
            unwanted += [notes.DOWN_CONVERT_INPUTS] if tensor_float else [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]
        self.graph.deselect_numeric_notes(unwanted)

    def names(self) -> list[str]:
        """The plans' names, the one expected to be fastest first."""
        return [self.graph.get_plan_name_at_index(i) for i in range(self.graph.get_execution_plan_count())]

    def build(self, index: int) -> int | None:
        """Build a plan; gives the bytes of its workspace, or None where cuDNN does not support it."""
        try:
            self.graph.build_plan_at_index(index)
            return int(self.graph.get_workspace_size_plan_at_index(index))
        except _refusals() as error:
            _log.debug("cuDNN's plan %d of %s: %s", index, self.problem, error)
            return None


def front(plans: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The plans (name, workspace in bytes), in order, whose workspace is clearly smaller than that of all before.

    At most ``MOST_PLANS``: the first ones, and the one with the smallest workspace.
    """
    kept: list[tuple[str, int]] = []
    for name, workspace in plans:
        if not kept or kept[-1][1] - workspace >= max(_SHARE_SAVED * kept[-1][1], _BYTES_SAVED):
            kept.append((name, workspace))
        if kept[-1][1] < _BYTES_SAVED:
            break  # none can save so many bytes; each further one would be built to find its workspace
    return kept if len(kept) <= MOST_PLANS else [*kept[: MOST_PLANS - 1], kept[-1]]


def plans_of(problem: Problem, tensor_float: bool, **where: Any) -> list[tuple[str, int]]:
    """The plans worth a choice (name, workspace in bytes), the one expected to be fastest first; maybe none.

    Args:
        problem: what to compute.
        tensor_float: whether float32 may be computed in TensorFloat-32.
        where: ``handle=`` or ``device_property=``, as for ``Drawn``.
    """
    try:
        drawn = Drawn(problem, **where)
    except _refusals() as error:
        _log.debug("no cuDNN plans for %s: %s", problem, error)
        return []
    drawn.deselect(tensor_float)
    # "eng": cuDNN's own engines. Newer packages also list engines of theirs, which compile when they first run
    sized = ((name, drawn.build(i)) for i, name in enumerate(drawn.names()) if name.startswith("eng"))
    return front((name, workspace) for name, workspace in sized if workspace is not None)


@dataclass(frozen=True, slots=True)
class PlanNames:
    """Of the plans worth a choice, the one expected to be fastest first."""

    names: tuple[str, ...]


_named: dict[torch.device, dict[str, PlanNames]] = {}  # by the problems' texts


def plans_on(problem: Problem, tensor_float: bool, device: torch.device) -> tuple[str, ...]:
    """The names of ``plans_of`` on a CUDA device; to find them, up to dozens of plans are built."""
    known, text = _named.setdefault(device, {}), f"{problem.text} tf32={tensor_float}"
    if text not in known:
        with _handle(device) as handle:
            known[text] = PlanNames(tuple(name for name, _ in plans_of(problem, tensor_float, handle=handle)))
    return known[text].names


def named(device: torch.device) -> Mapping[str, PlanNames]:
    """The plans that ``plans_on`` has found on a device so far, or was told."""
    return _named.get(device, {})


def tell(device: torch.device, plans: Mapping[str, PlanNames]) -> None:
    """Tell ``plans_on`` what another process ``named`` on such a device, with the same cuDNN."""
    _named.setdefault(device, {}).update(plans)


def version() -> str:
    """Of the package and of cuDNN, which decide the plans."""
    package = importlib.import_module("cudnn")
    return f"{getattr(package, '__version__', '')}, cuDNN {package.backend_version()}"


# ---- running one


_failed: set[tuple[Problem, str, torch.device]] = set()


# of every size of images so far; what a plan holds beside its host memory cuDNN does not tell
@functools.lru_cache(1 << 10)
def _built(problem: Problem, plan: str, device: torch.device) -> tuple[Drawn, int, int]:
    drawn = Drawn(problem, handle=_new_handle(device))
    names = drawn.names()
    workspace_bytes = drawn.build(names.index(plan)) if plan in names else None
    if workspace_bytes is None:
        raise RuntimeError("there is no such plan")
    return drawn, names.index(plan), workspace_bytes


def compute(problem: Problem, plan: str, first: Tensor, second: Tensor) -> Tensor | None:
    """The problem's result by the plan of that name; None where the plan cannot run."""
    device = first.device
    operands = [value.contiguous(memory_format=problem.format) for value in (first, second)]
    if (problem, plan, device) in _failed or any(v.data_ptr() % _ALIGNMENT_BYTES or not v.numel() for v in operands):
        return None
    result = problem.empty(problem.roles[2], device)
    try:
        with _handle(device) as handle:
            drawn, index, workspace_bytes = _built(problem, plan, device)
            workspace = torch.empty((workspace_bytes,), dtype=torch.uint8, device=device)
            buffers = dict(zip(drawn.tensors, (*operands, result), strict=True))
            drawn.graph.execute_plan_at_index(buffers, workspace, index, handle)
    except torch.OutOfMemoryError:
        raise
    except _refusals() as error:
        if device_errors.is_sticky(error, lambda: torch.cuda.synchronize(device)):
            raise
        _failed.add((problem, plan, device))
        _log.warning("cuDNN's plan %s fails (%s): torch's own choice runs in its place", plan, error)
        return None
    return result


@functools.cache
def agrees(operation: str, dimensions: int, dtype: torch.dtype, channels_last: bool, device: torch.device) -> bool:
    """Whether plans give ATen's results on a small problem on this device: a wrong call would give large errors."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return _agrees(operation, dimensions, dtype, channels_last, device)


def _agrees(operation: str, dimensions: int, dtype: torch.dtype, channels_last: bool, device: torch.device) -> bool:
    spatial = range(dimensions - 2)
    stride, padding, dilation = ([a + d % 2 for d in spatial] for a in (1, 0, 1))
    generator = torch.Generator().manual_seed(0)
    form = memory_format(dimensions, channels_last)
    x, weight = (
        torch.randn((n, 16, *sizes), generator=generator, device="cpu").to(device, dtype).contiguous(memory_format=form)
        for n, sizes in ((4, [9] * len(spatial)), (32, [3] * len(spatial)))
    )
    arguments = (stride, padding, dilation, False, [0] * len(spatial), 1)
    y = aten.convolution.default(x, weight, None, *arguments)
    grad = torch.randn(y.shape, generator=generator, device="cpu").to(y).contiguous(memory_format=form)
    of_input, of_weight, _ = aten.convolution_backward.default(grad, x, weight, None, *arguments, [True, True, False])
    sizes = x.shape, weight.shape, y.shape
    problem = Problem.of(operation, sizes, (stride, padding, dilation), dtype, channels_last)
    values = {"image": x, "filter": weight, "response": grad}
    expected = {"fprop": y, "dgrad": of_input, "wgrad": of_weight}[operation].double()
    for plan in plans_on(problem, tensor_float_allowed(), device):
        given = compute(problem, plan, *(values[role] for role in problem.roles[:2]))
        if given is None or (given.double() - expected).norm() > 0.02 * expected.norm():
            _log.warning("cuDNN's plan %s does not give what torch gives: none of %s is used", plan, operation)
            return False
    return True
