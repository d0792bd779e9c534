"""TorchDynamo's settings for models that are captured whole and train as they would in Python."""

from __future__ import annotations

from monetrun.runtime.planned_calls import PlannedCall

# Each input shape is compiled once; after torch's default of 8 shapes the ninth would run without a plan.
_RECOMPILE_LIMIT = 1 << 14


def prepare_dynamo() -> None:
    """Raise Dynamo's limits on how many shapes of one function it compiles; have it keep models as they are."""
    import torch._dynamo

    config = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(_RECOMPILE_LIMIT, getattr(config, name)))
    # Dynamo would split models at the borders of DistributedDataParallel's buckets, and the terms of a gradient from
    # both sides of a border would be added in another order; gradients are given as they are computed without that
    config.optimize_ddp = False
    config.skip_nnmodule_hook_guards = False  # hooks that are added later run
    config.allow_unspec_int_on_nn_module = True  # a module's counter of steps is no other model in each step
    config.use_numpy_random_stream = True  # NumPy's numbers come from NumPy, not from torch's generator
    torch._dynamo.eval_frame.skip_code(PlannedCall.__call__.__code__)  # Dynamo may be at work where it is called
