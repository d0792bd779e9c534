"""Random numbers: drawn in eager's order, and drawn again when an operator is recomputed.

The state of its device's generator determines what an operator draws: a few bytes, however much it draws. So a random
operator may be recomputed (neither dropout's noise nor a mask of it need be kept): ``generator_state`` saves the state
right before the first run, and the second run draws from that state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from monetrun.ops import collective_operators
from monetrun.ops.registry import Call, argument

aten = torch.ops.aten

# bytes of a generator's state: of the Mersenne twister, and of Philox's seed and offset
STATE_BYTES = {"cpu": 5056, "cuda": 16}

# Namespaces of operators that have torch's tag if they draw random numbers. Those of other libraries (flash-attn's)
# may draw some without it.
_TAGGED = frozenset({"aten", "prims", "monet", "torchvision", "fsdp", *collective_operators.NAMESPACES})

# in a random operator's meta: the node of its generator's state
_STATE = "monetrun_generator_state"

_library = torch.library.Library("monet", "FRAGMENT")
_RANDOM = (torch.Tag.nondeterministic_seeded,)
_library.define(
    "bernoulli(SymInt[] size, SymInt[] stride, float p, *, ScalarType dtype, Device device) -> Tensor", tags=_RANDOM
)
_library.define("generator_state(Device device) -> Tensor", tags=_RANDOM)


@torch.library.impl(_library, "bernoulli", "CompositeExplicitAutograd")
def _bernoulli(
    size: Sequence[int], stride: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device).bernoulli_(p)


@torch.library.register_fake("monet::bernoulli", lib=_library)
def _fake_bernoulli(
    size: Sequence[int], stride: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _into(like: torch.Tensor, p: float = 0.5, generator: Any = None) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    form = torch.empty_like(like)  # dense, as what eager draws into
    drawn = torch.ops.monet.bernoulli(form.shape, form.stride(), p, dtype=form.dtype, device=form.device)
    return drawn  # type: ignore[no-any-return]


# x.bernoulli_(p) is traced as bernoulli.p(x, p), which fills a *contiguous* tensor: for a transposed x (dropout after
# attention) the same random numbers would go to other elements than in eager's in-place call. It also reads only the
# shape and strides of x, which need not be kept for the second run.
DECOMPOSITIONS = {aten.bernoulli.p: _into}


# ---- drawing again


def generator(device: torch.device) -> torch.Generator:
    """The default generator of ``device``, from which random operators draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def uncounted_state(device: torch.device) -> torch.Tensor:
    """The state of ``device``'s generator in NumPy's memory, which a budget does not count."""
    with unset_fake_temporarily():
        return torch.from_numpy(generator(device).get_state().numpy().copy())


@torch.library.impl(_library, "generator_state", "CompositeExplicitAutograd")
def _generator_state(device: torch.device) -> torch.Tensor:
    return generator(device).get_state()


@torch.library.register_fake("monet::generator_state", lib=_library)
def _fake_generator_state(device: torch.device) -> torch.Tensor:
    return torch.empty(STATE_BYTES[device.type], dtype=torch.uint8, device="cpu")


def draw_again(
    state: torch.Tensor, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``target``, drawing from the generator of ``device`` in ``state``; the generator is left as it was.

    Until it draws, this allocates as many bytes again as ``state``.
    """
    if isinstance(state, FakeTensor):
        return target(*args, **kwargs)
    drawn_from = generator(device)
    before = uncounted_state(device) if device.type == "cpu" else drawn_from.get_state()  # of a GPU's: 16 bytes
    drawn_from.set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        drawn_from.set_state(before)


def again(state: fx.Node, call: Call) -> Call:
    """``call``, drawing the same numbers as when the generator was in ``state``."""
    (device,) = state.args
    return Call(draw_again, (state, device, call.target, *call.args), call.kwargs, call.only)


def is_random(node: fx.Node) -> bool:
    """Whether the operator may draw random numbers; torch's tag does not tell of other libraries' operators."""
    return draws(node) or node.target.namespace not in _TAGGED  # type: ignore[union-attr]


def draws(node: fx.Node) -> bool:
    """Whether it is known to draw random numbers (attention kernels do so only with a dropout probability)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # a higher-order operator may draw
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return "dropout_p" not in _arguments(target) or bool(argument(node, "dropout_p") != 0.0)


def _arguments(target: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in target._schema.arguments]


def note_states(module: fx.GraphModule) -> None:
    """Insert a ``generator_state`` before each random forward operator of a joint module that can draw again.

    These are operators that draw from their device's default generator, or that may do so, of other libraries. Where no
    second run reads a state, ``capture.execute`` leaves its call out.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.meta.get("partitioner_tag") != "is_forward":
            continue
        device = _draws_on(node)
        if device is None:
            continue
        with module.graph.inserting_before(node):
            state = module.graph.call_function(torch.ops.monet.generator_state.default, (device,))
        with _fake_mode(node):
            state.meta["val"] = _fake_generator_state(device)
        state.meta.update({k: node.meta[k] for k in ("nn_module_stack", "partitioner_tag") if k in node.meta})
        node.meta[_STATE] = state


def devices(module: fx.GraphModule) -> tuple[torch.device, ...]:
    """The devices from whose generators a joint module draws."""
    drawn = {d for node in module.graph.nodes if node.op == "call_function" and (d := _draws_on(node)) is not None}
    return tuple(sorted(drawn, key=str))


def _draws_on(node: fx.Node) -> torch.device | None:
    """The device from whose default generator the node may draw; None: from another one, or not at all."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace == "prims":
        return None
    if not is_random(node) or target._schema.is_mutable or target is torch.ops.monet.generator_state.default:
        return None
    if "generator" in _arguments(target) and argument(node, "generator") is not None:
        return None
    devices = {v.device for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)}
    devices = {d for d in devices if d.type != "cpu"} or devices  # attention gives a seed, too, maybe on the CPU
    return devices.pop() if len(devices) == 1 and next(iter(devices)).type in STATE_BYTES else None


def _fake_mode(node: fx.Node) -> Any:
    modes = [getattr(v, "fake_mode", None) for v in tree_leaves(node.meta.get("val"))]
    return next((m for m in modes if m is not None), None) or torch._subclasses.FakeTensorMode()


def state_of(node: fx.Node) -> fx.Node | None:
    """The node of the generator's state before a random operator's first run; None where it cannot draw again."""
    return node.meta.get(_STATE)  # type: ignore[no-any-return]
