"""``monetrun.apply`` where plain steps were made before, and left gradients and an optimizer's state."""

import json
import os
import subprocess
import sys

import pytest

from support.on_stand_in import needs_stand_in, printed_by
from support.paths import ROOT, python_path

# how the script calls ``zero_grad``; steps of 4 MiB of weights
SCRIPT = """
import json, warnings
import torch
from torch import nn
import monetrun
from monetrun.runtime import session as process

warnings.simplefilter("ignore")
device = "cuda" if torch.cuda.is_available() else "cpu"


def found(order, before):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.randn(1024, 512, device=device)).square().mean()
        if order in ("before the backward", "in place"):
            optimizer.zero_grad(set_to_none=order != "in place")
        loss.backward()
        optimizer.step()
        if order == "at the end":
            optimizer.zero_grad()

    for _ in range(before):
        step()
    monetrun.apply(model, "0.95x", solver_seconds=1.0, implementations="exact", strict=True)
    for _ in range(4):
        step()
    plan = process._session.engine.plan
    ledger = {name: n for name, n in plan.ledger.items() if name in ("parameters", "gradients", "optimizer state")}
    reserved = 0 if plan.pool is None else plan.pool.plain_bytes
    figures = monetrun.close()
    assert figures["measured_peak_bytes"] <= figures["budget_bytes"]
    return [ledger, plan.plain_peak_bytes, reserved]


print(json.dumps([found(ORDER, BEFORE)]))
"""
ORDERS = ["before the backward", "at the end", "in place"]


def on_cpu(script):
    variables = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_gradients_and_state_of_plain_steps_count_once():
    """On a CPU, for each place of ``zero_grad``: in one process, so that torch is imported once."""
    rows = ", ".join(f"found({order!r}, {before})" for order in ORDERS for before in (0, 2))
    found = on_cpu(SCRIPT.replace("found(ORDER, BEFORE)", rows))
    for without, behind in zip(found[::2], found[1::2], strict=True):
        assert without[0] == behind[0]
        assert behind[1] == pytest.approx(without[1], rel=1e-3)


@needs_stand_in
def test_gradients_and_state_of_plain_steps_count_once_in_reserved_bytes():
    """They are among the blocks that are there when the recorded step begins, and it frees them."""
    rows = [printed_by(SCRIPT.replace("ORDER", repr(ORDERS[0])).replace("BEFORE", before)) for before in ("0", "2")]
    (without, plain_bytes, reserved), (behind, plain_behind, reserved_behind) = (row[0] for row in rows)
    assert (without, reserved) == (behind, reserved_behind)
    assert plain_behind == pytest.approx(plain_bytes, rel=0.01)  # torch 2.11: a gradient too much without them
