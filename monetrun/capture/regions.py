"""The script's checkpoint regions (``torch.utils.checkpoint``): noted in Dynamo's graph, found in the joint one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monetrun.core.errors import CaptureFailed
from monetrun.core.graph import Region
from monetrun.ops import random

# In a node's ``meta["custom"]``, which AOTAutograd copies to what it traces for the node, its derivative included: a
# ``_Noted`` for each region that the node is in, the outermost first.
_NOTED = "monetrun_regions"

_UPDATES = "a checkpointed region that runs again updates its buffers again (a batch norm's)"


@dataclass(frozen=True, slots=True)
class _Noted:
    """A region by its name among those around it, as it is in eager."""

    name: str
    reentrant: bool
    early_stop: bool
    state_bytes: int
    repeats_random_numbers: bool


def note_regions(module: fx.GraphModule, around: tuple[_Noted, ...] = ()) -> None:
    """Note in the nodes of one of Dynamo's graphs in which checkpoint regions they are.

    In eager, a reentrant region of which no argument needs a gradient gives none to its parameters either. The graph,
    in which the parameters are arguments too, would. And a region that runs again updates its buffers again (a batch
    norm's running statistics); in the graph it would once.

    Args:
        module: the graph, or a region in it.
        around: the regions that it is in.

    Raises:
        CaptureFailed: a region does more or less in eager than in the graph.
    """
    for node in module.graph.nodes:
        if around:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _NOTED: around}
        if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        region: Any = module.get_submodule(node.args[0].target)
        values = [a.meta.get("example_value") for a in node.args if isinstance(a, fx.Node)]
        given = [v for v in values if isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter)]
        noted = _noted(node, given)
        if noted.reentrant and not any(v.requires_grad for v in given):
            raise CaptureFailed("a reentrant checkpoint, of which no argument needs a gradient, gives none")
        if _writes_arguments(region):
            raise CaptureFailed(_UPDATES)
        if noted.reentrant:
            _add_gradients_within(region)
        note_regions(region, (*around, noted))


def _noted(node: fx.Node, given: list[torch.Tensor]) -> _Noted:
    """The region that ``node`` runs on arguments like ``given``.

    Raises:
        CaptureFailed: what it does depends on a number that is left open.
    """
    options = node.kwargs
    if any(isinstance(option, fx.Node) for option in options.values()):
        raise CaptureFailed("an option of a checkpoint is a symbolic number, which varies")
    keeps_state = bool(options.get("preserve_rng_state", True))
    # the CPU's, whatever device the region is on; where that is another, these bytes are not of its memory
    on_cpu = all(v.device.type == "cpu" for v in given)
    return _Noted(
        node.name,
        reentrant=bool(options.get("use_reentrant")),
        early_stop=bool(options.get("early_stop", True)),
        state_bytes=torch.get_rng_state().nbytes if keeps_state and on_cpu else 0,
        repeats_random_numbers=keeps_state,
    )


def _writes_arguments(region: Any) -> bool:
    """Whether a region (a graph module) writes one of its arguments in place, as a batch norm counts its batches."""
    for node in region.graph.find_nodes(op="placeholder"):
        for user in node.users:
            writes = user.op == "call_method" and user.target.endswith("_") and not user.target.endswith("__")
            if writes and user.args[0] is node:
                return True
    return False


def refuse_updates(module: fx.GraphModule) -> None:
    """Look for inputs of a joint module that a region changes: what ``_writes_arguments`` did not see.

    Raises:
        CaptureFailed: there is one.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0].op != "placeholder" or not isinstance(node.args[1], fx.Node):
            continue
        value: Any = node.args[1]
        made_by = value.args[0] if value.target is operator.getitem else value
        if (made_by.meta.get("custom") or {}).get(_NOTED):
            raise CaptureFailed(_UPDATES)


def _add_gradients_within(region: Any) -> None:
    """Have a reentrant region add up an argument's gradients before they are added to those from outside, as in eager.

    There its backward is one of its own, from which an argument's gradient comes as a sum. Here the region reads a view
    of the argument, whose derivative does the same.
    """
    placeholders = region.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.requires_grad or len(node.users) < 2:
            continue
        with region.graph.inserting_after(placeholders[-1]):
            view = region.graph.call_method("view_as", (node, node))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
    region.recompile()


class Regions:
    """The regions of a joint graph.

    Attributes:
        found: the regions by number.
    """

    def __init__(self) -> None:
        self.found: list[Region] = []
        self._numbers: dict[tuple[_Noted, ...], int] = {}

    def number(self, node: fx.Node) -> int | None:
        """The number of the innermost region that ``node`` is in, or None.

        Raises:
            CaptureFailed: it draws random numbers, which eager's second run does not repeat.
        """
        around: tuple[_Noted, ...] = (node.meta.get("custom") or {}).get(_NOTED, ())
        if random.draws(node) and not all(noted.repeats_random_numbers for noted in around):
            raise CaptureFailed("a checkpoint with preserve_rng_state=False draws other numbers when it runs again")
        number = None
        for end, noted in enumerate(around, 1):
            path = around[:end]
            if path not in self._numbers:
                self._numbers[path] = len(self.found)
                self.found.append(Region(number, noted.reentrant, noted.early_stop, noted.state_bytes))
            number = self._numbers[path]
        return number
