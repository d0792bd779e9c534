"""TorchDynamo's settings for models that are captured whole and train as they would in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import CodeType

from monetrun.capture.warned import let_models_warn

# Each input shape is compiled once; after torch's default of 8 shapes the ninth would run without a plan.
_RECOMPILE_LIMIT = 1 << 14
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def prepare_dynamo(within: Iterable[CodeType], undo: contextlib.ExitStack) -> None:
    """Have Dynamo keep models as they are; it may be at work where the codes ``within`` are called.

    Closing ``undo`` restores the settings.
    """
    import torch._dynamo

    config = torch._dynamo.config
    for name in (
        "optimize_ddp",
        "skip_nnmodule_hook_guards",
        "allow_unspec_int_on_nn_module",
        "use_numpy_random_stream",
    ):
        undo.callback(setattr, config, name, getattr(config, name))
    # Dynamo would split models at the borders of DistributedDataParallel's buckets, and the terms of a gradient from
    # both sides of a border would be added in another order; gradients are given as they are computed without that
    config.optimize_ddp = False
    config.skip_nnmodule_hook_guards = False  # hooks that are added later run
    config.allow_unspec_int_on_nn_module = True  # a module's counter of steps is no other model in each step
    config.use_numpy_random_stream = True  # NumPy's numbers come from NumPy, not from torch's generator
    for code in within:
        torch._dynamo.eval_frame.skip_code(code)
    let_models_warn()


class ManyShapes:
    """Within it Dynamo compiles any number of shapes of one function. What the script compiles itself has its limit."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        import torch._dynamo

        config = torch._dynamo.config
        self._before = [getattr(config, name) for name in _LIMITS]
        for name, before in zip(_LIMITS, self._before, strict=True):
            if before < _RECOMPILE_LIMIT:
                setattr(config, name, _RECOMPILE_LIMIT)

    def __exit__(self, *_: object) -> None:
        import torch._dynamo

        for name, before in zip(_LIMITS, self._before, strict=True):
            if before < _RECOMPILE_LIMIT:
                setattr(torch._dynamo.config, name, before)
