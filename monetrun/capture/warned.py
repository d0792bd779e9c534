"""Warnings that a forward gives: given when TorchDynamo traces it, which knows no call of ``warnings.warn``.

Without this a model that warns of a deprecated argument would not be captured. Python shows a warning once for each
place by default; a traced forward gives it once for each trace.
"""

from __future__ import annotations

import contextlib
import functools
import warnings


@functools.cache
def let_models_warn() -> None:
    """Have Dynamo trace over warnings from now on, in this process."""
    from torch._dynamo import assume_constant_result, substitute_in_graph
    from torch._guards import TracingContext

    @assume_constant_result
    def warn_now(message: str, category: type[Warning] | None, level: int) -> None:
        frames = TracingContext.extract_stack()  # the last one is the call of this function
        place = frames[max(0, len(frames) - 1 - level)] if frames else None
        file, line = ("<forward>", 0) if place is None else (place.filename, place.lineno or 0)
        warnings.warn_explicit(message, category or UserWarning, file, line)

    def warn(message: str, category: type[Warning] | None = None, stacklevel: int = 1, source: object = None) -> None:
        warn_now(message, category, stacklevel)

    with contextlib.suppress(ValueError):  # the script has a substitute of its own
        substitute_in_graph(warnings.warn, skip_signature_check=True)(warn)
