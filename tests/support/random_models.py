"""Random models and training scripts: a seed gives the source of a model, and how it is trained.

``source`` writes a module's Python, statement by statement: each takes tensors of one shape that earlier statements
made, and makes one more. ``Script`` is what trains it. By hand, from the folder ``tests``::

    python -m support.random_models 0 100    # seeds 0 to 99, each in a line; those that fail with the model's source
    python -m support.random_models 3 7 11   # these; two numbers are a range
    python -m support.random_models --small 0 100    # smaller models, as in the tests
    python -m support.random_models --short 0 100    # small ones, of which two steps of one shape are trained
    python -m support.random_models --changed 0 100    # the script changes the model's outputs in place
    python -m support.random_models --show 7
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import linecache
import random
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.errors import BudgetExceeded, InfeasibleBudget, NoPlanInTime
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

BUDGET, SHORT_BUDGET = "0.7x", "0.9x"
WIDTH, LENGTH, VOCABULARY, SIDE = 16, 64, 50, 12


@dataclass(frozen=True, slots=True)
class Script:
    """How a model is trained.

    Attributes:
        steps: how many optimizer steps.
        batches: sizes of the batches, in turn.
        micro_batches: forwards and backwards in a step.
        used_outputs: of how many outputs the loss is made, in each step in turn; the first step, which is planned for,
            has the most.
        summed: one backward for the losses of all micro-batches, else one each.
        repeats: what the model is told of how often to call its parts, in each step in turn.
        optimizer: of ``torch.optim``.
        set_to_none: as ``zero_grad`` takes it.
        clipped: gradients are clipped.
        evaluates: after each second step there is a forward in evaluation.
        autocast: the forward runs in bfloat16.
        changes_outputs: those that the loss is made of are changed in place before.
    """

    steps: int
    batches: tuple[int, ...]
    micro_batches: int
    summed: bool
    used_outputs: tuple[int, ...]
    repeats: tuple[int, ...]
    optimizer: str
    set_to_none: bool
    clipped: bool
    evaluates: bool
    autocast: bool
    changes_outputs: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training left: ``state`` has weights and buffers, ``gradients`` those of the last step, both as digests."""

    losses: tuple[float, ...]
    state: dict[str, str]
    gradients: dict[str, str]
    generator: str


def script(seed: int, *, small: bool = False) -> Script:
    """The script of a seed; ``small``: of three steps, with two shapes at most, which cost less to compile."""
    draw = random.Random(f"script {seed}")
    found = Script(
        steps=4,
        batches=draw.choice([(8,), (8,), (8,), (8, 8, 8, 6), (6, 8), (4, 8, 10)]),
        micro_batches=draw.choice([1, 1, 1, 2]),
        summed=draw.random() < 0.5,
        used_outputs=draw.choice([(3,), (3,), (1,), (2,), (3, 1), (3, 1, 2), (2, 1)]),
        repeats=draw.choice([(1,), (1,), (2,), (1, 2), (2, 1, 3)]),
        optimizer=draw.choice(["SGD", "Adam", "AdamW"]),
        set_to_none=draw.random() < 0.7,
        clipped=draw.random() < 0.2,
        evaluates=draw.random() < 0.3,
        autocast=draw.random() < 0.15,
    )
    if not small:
        return found
    return replace(found, steps=3, batches=found.batches[-2:], repeats=found.repeats[:2], micro_batches=1)


def short(how: Script) -> Script:
    """The first two steps, which are recorded and planned, all with the first one's shapes."""
    alike = {name: getattr(how, name)[:1] for name in ("batches", "used_outputs", "repeats")}
    return replace(how, steps=2, evaluates=False, **alike)


# ---- the model

ACTIVATIONS = ("torch.relu", "F.gelu", "torch.tanh", "F.silu", "torch.sigmoid", "F.softplus", "F.leaky_relu", "F.elu")

# {x}, {y}: tensors of the common shape; {new}: the result; {m}: modules that the statement makes, by number.
ANY = (
    "{new} = {act}({x})",
    "{new} = {x} + {y}",
    "{new} = {x} * torch.sigmoid({y})",
    "{new} = {x} - 0.5 * {y}",
    "{new} = {x}.clone()\n{new}.add_({y})",
    "{new} = {x} * 0.5\n{new}.relu_()",
    "{new} = {x} + 0.1\n{new}.mul_({y})\n{new} = torch.tanh({new})",
    "{new} = {x}.clone()\n{new}[:, ::2] *= 0.5",
    "{new} = {x}.clone(memory_format=torch.contiguous_format)\nview = {new}.view(-1)\nview[::3] = 0.0",
    "{new} = {x} + 0.0\n{new}[:, :2] = {y}[:, 2:4]",
    "{new} = F.dropout({x}, 0.3, self.training)",
    "{new} = F.dropout({x} * 2, 0.2, self.training, inplace=True)",
    "{new} = {x} + 0.1 * torch.randn_like({x})",
    "{new} = {x} * (torch.rand({x}.shape[0], 1, 1, 1)[(...,) + (0,) * (4 - {x}.dim())] > 0.3)",
    "with torch.no_grad():\n    frozen = {act}({x}).mean(1, keepdim=True)\n{new} = {y} * frozen",
    "{new} = {x} + {act}({y}.detach())",
    "{new} = torch.where({x} > 0, {x}, {y} * 0.2)",
    "{new} = torch.roll({x}, 1, 1).contiguous()",
    "{new} = {x}.flip(1)",
    "{new} = torch.stack([{x}, {y}]).mean(0)",
    "{new} = torch.maximum({x}, {y})",
    "{new} = {x}.masked_fill({y} > 0.5, 0.1)",
    "{new} = torch.cumsum({x}, 1) / 4",
    "{new} = {x}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{new} = {x}\nfor _ in range(self.repeats):\n    {new} = {act}({new} * 1.1)",
    "{new} = checkpoint(lambda t: torch.tanh(F.silu(t) * 2) * t, {x}, use_reentrant=False)",
    "left, right = {x}.chunk(2, 1)\n{new} = torch.cat([right * left, {act}(left)], 1)",
)
SEQUENCE = (
    "{new} = {m0}({x})|Linear",
    "{new} = {act}({m0}({x}))|Linear",
    "{new} = {m0}({x})\n{new}.tanh_()|Linear",
    "{new} = {m0}({x})|LayerNorm",
    "{new} = {m0}({x}.transpose(1, 2)).transpose(1, 2)|BatchNorm1d",
    "{new} = {m1}({act}({m0}({x})))|Linear4,Back4",
    "{new} = {x} + {m1}(F.gelu({m0}({y})))|Linear4,Back4",
    "{new} = {m0}({x})|ReLU",
    "{new} = {m0}({x} + 0.5)|ReLUInPlace",
    "{new} = {m0}({x})|Dropout",
    "{new} = F.linear({x}, {m0}.weight.t())|Linear",
    "{new} = {m0}(torch.cat([{x}, {y}], -1))|Linear2",
    "a, b = {m0}({x}).chunk(2, -1)\n{new} = a * torch.sigmoid(b)|Wide2",
    "q, k, v = {m0}({x}).chunk(3, -1)\n{new} = F.scaled_dot_product_attention(q, k, v)|Wide3",
    "q, k, v = {m0}({x}).view({x}.shape[0], -1, 2, 24).transpose(1, 2).chunk(3, -1)\n"
    "{new} = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)|Wide3",
    "weights = F.dropout(torch.softmax({x} @ {y}.transpose(1, 2) / 4, -1), 0.1, self.training)\n{new} = weights @ {x}",
    "{new} = checkpoint({m0}, {x}, use_reentrant=False)|MLP",
    "{new} = {m0}({x})|MLP",
    "{new} = {x}\nfor _ in range(self.repeats):\n    {new} = {m0}({new})|MLP",
    "{new} = {x} + {m0}(tokens)|Embedding",
    "{new} = F.normalize({x}, dim=-1) + {m0}({y})|Linear",
    "{new} = {x}[:, torch.arange({x}.shape[1] - 1, -1, -1)]",
    "{new}, _ = {m0}({x})|GRU",
)
IMAGE = (
    "{new} = {m0}({x})|Conv3",
    "{new} = {act}({m1}({m0}({x})))|Conv3,BatchNorm2d",
    "{new} = {m1}({m0}({x})).relu_()|Conv3,BatchNorm2d",
    "{new} = {m0}({x})|BatchNorm2d",
    "{new} = {m0}({x})|GroupNorm",
    "{new} = {m0}({x})|Depthwise",
    "{new} = {m0}(torch.cat([{x}, {y}], 1))|Conv1of2",
    "{new} = {x} * torch.sigmoid({m0}({x}.mean((2, 3), keepdim=True)))|Conv1",
    "{new} = F.interpolate(F.max_pool2d({x}, 2), scale_factor=2)",
    "{new} = F.interpolate({m0}(F.avg_pool2d({x}, 2)), scale_factor=2, mode='bilinear')|Conv3",
    "{new} = {m1}({m0}({x}))|Stride2,Transposed",
    "{new} = {m0}({x})|ReLU",
    "{new} = {m0}({x} + 0.5)|ReLUInPlace",
    "{new} = {m0}({x})|Dropout2d",
    "{new} = F.max_pool2d({x}, 3, 1, 1)",
    "{new} = checkpoint({m0}, {x}, use_reentrant=False)|Convs",
    "{new} = {x} + {m0}({y})|Convs",
    "{new} = {x}\nfor _ in range(self.repeats):\n    {new} = {m0}({new})|Convs",
    "{new} = F.pixel_shuffle({m0}({x}), 2)|Shuffle",
)
BREAKS = (
    "torch._dynamo.graph_break()",
    "if {x}.sum().item() > 0:\n    {x} = {x} * 1.01",
    "torch.nonzero({x} > 2)",
)
MODULES = {
    "Linear": "nn.Linear(W, W)",
    "Linear2": "nn.Linear(2 * W, W)",
    "Linear4": "nn.Linear(W, 4 * W)",
    "Back4": "nn.Linear(4 * W, W)",
    "Wide2": "nn.Linear(W, 2 * W)",
    "Wide3": "nn.Linear(W, 3 * W)",
    "LayerNorm": "nn.LayerNorm(W)",
    "BatchNorm1d": "nn.BatchNorm1d(W)",
    "BatchNorm2d": "nn.BatchNorm2d(W)",
    "GroupNorm": "nn.GroupNorm(4, W)",
    "ReLU": "nn.ReLU()",
    "ReLUInPlace": "nn.ReLU(inplace=True)",
    "Dropout": "nn.Dropout(0.2)",
    "Dropout2d": "nn.Dropout2d(0.2)",
    "Embedding": "nn.Embedding(VOCABULARY, W)",
    "GRU": "nn.GRU(W, W, batch_first=True)",
    "MLP": "nn.Sequential(nn.Linear(W, 2 * W), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * W, W))",
    "Conv1": "nn.Conv2d(W, W, 1)",
    "Conv1of2": "nn.Conv2d(2 * W, W, 1, bias=False)",
    "Conv3": "nn.Conv2d(W, W, 3, padding=1)",
    "Depthwise": "nn.Conv2d(W, W, 3, padding=1, groups=W)",
    "Stride2": "nn.Conv2d(W, W, 3, 2, 1)",
    "Transposed": "nn.ConvTranspose2d(W, W, 2, 2)",
    "Shuffle": "nn.Conv2d(W, 4 * W, 3, 2, 1)",
    "Convs": "nn.Sequential(nn.Conv2d(W, W, 3, padding=1, bias=False), nn.BatchNorm2d(W), nn.ReLU(inplace=True))",
}


class _Writer:
    """Writes the modules of one seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"model {seed}")
        self.image = self.draw.random() < 0.4
        self.classes: list[str] = []
        self.blocks: list[str] = []

    def module(self, name: str, statements: int, *, whole: bool) -> None:
        """Write a class: the model itself (``whole``), or a block in it."""
        draw = self.draw
        made: dict[str, list[str]] = {}  # attributes, by kind
        lines: list[str] = []
        values = ["x"]

        def attribute(kind: str) -> str:
            if made.get(kind) and draw.random() < 0.2:
                return draw.choice(made[kind])  # shared: called a second time
            made.setdefault(kind, []).append(f"self.{kind.lower()}{len(made.get(kind, ()))}")
            return made[kind][-1]

        def recent() -> str:
            return draw.choice(values[-3:]) if draw.random() < 0.8 else draw.choice(values)

        for number in range(statements):
            if whole and self.blocks and draw.random() < 0.3:
                text = "{new} = {m0}({x}, tokens)|" + draw.choice(self.blocks)
            else:
                text = draw.choice(ANY if draw.random() < 0.45 else IMAGE if self.image else SEQUENCE)
            text, _, kinds = text.partition("|")
            modules = {f"m{i}": attribute(kind) for i, kind in enumerate(kinds.split(",") if kinds else ())}
            new = f"v{number}"
            filled = text.format(new=new, x=values[-1] if draw.random() < 0.6 else recent(), y=recent(),
                                 act=draw.choice(ACTIVATIONS), **modules)  # fmt: skip
            lines += filled.splitlines()
            values.append(new)
            if whole and draw.random() < 0.03:
                lines += draw.choice(BREAKS).format(x=new).splitlines()
        frozen = [a for kind in ("Linear", "Conv3") for a in made.get(kind, ())]
        body = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        body += [
            "        self.repeats = 1",
            *(["        self.unused = nn.Linear(3, 3)"] if draw.random() < 0.1 else []),
        ]
        for kind, attributes in made.items():
            body += [f"        {a} = {MODULES.get(kind, kind + '()')}" for a in attributes]
        if frozen and draw.random() < 0.15:
            body += [f"        {draw.choice(frozen)}.requires_grad_(False)"]
        statistics = draw.random() < 0.15
        if statistics:
            body += ["        self.register_buffer('average', torch.zeros(W))"]
            over = "(0, 2, 3)" if self.image else "(0, 1)"
            lines += [f"self.average.mul_(0.9).add_({values[-1]}.detach().float().mean({over}), alpha=0.1)"]
        body += ["", "    def forward(self, x, tokens):"]
        if whole and not self.image:
            body[-1] = "    def forward(self, tokens):"
            body[3:3] = ["        self.token = nn.Embedding(VOCABULARY, W)"]
            lines[:0] = ["x = self.token(tokens)"]
        elif whole:
            body[3:3] = ["        self.stem = nn.Conv2d(3, W, 3, padding=1)"]
            lines[:0] = ["x = self.stem(x)"]
        body += [f"        {line}" for line in lines]
        if whole:
            body += self._outputs(values)
        else:
            body += [f"        return {values[-1]}"]
        self.classes.append("\n".join(body) + "\n")

    def _outputs(self, values: list[str]) -> list[str]:
        draw = self.draw
        first = draw.choice([f"{values[-1]}.float().square().mean()", values[-1], f"{values[-1]}.mean((1, 2))"])
        forms = ("{v}", "{v}.float().sum(-1)", "{v}.transpose(1, 2)", "{v}[:, 1:3]", "{v}.abs().mean()")
        others = [draw.choice(forms).format(v=v) for v in draw.choices(values[1:], k=2)]
        return [f"        return {', '.join([first, *others])}"]


HEADER = f"""import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

W, VOCABULARY = {WIDTH}, {VOCABULARY}


"""


def source(seed: int, *, small: bool = False) -> str:
    """The Python of a module ``Model``, and of its parts; ``small``: with a third of the statements."""
    writer = _Writer(seed)
    for number in range(writer.draw.choice([0, 0, 1] if small else [0, 1, 2])):
        name = f"Block{number}"
        writer.module(name, writer.draw.randint(2, 3 if small else 5), whole=False)
        writer.blocks.append(name)
    writer.module("Model", writer.draw.randint(3, 5) if small else writer.draw.randint(4, 14), whole=True)
    return HEADER + "\n\n".join(writer.classes)


def model_class(text: str, name: str = "random_model") -> type[nn.Module]:
    """The class ``Model`` of a source, in a module that TorchDynamo can import; tracebacks show its lines."""
    module = types.ModuleType(f"{name}_{hashlib.sha1(text.encode()).hexdigest()[:8]}")
    file = f"<{module.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[module.__name__] = module
    exec(compile(text, file, "exec"), vars(module))
    return module.Model  # type: ignore[no-any-return]


# ---- training it


def train(make: Callable[[], nn.Module], how: Script) -> Outcome:
    """Train a new model from a fixed seed."""
    torch.manual_seed(1)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, how.optimizer)(trained, lr=1e-3)
    losses = []
    image = "stem" in dict(model.named_children())
    for step in range(how.steps):
        for part in model.modules():
            part.repeats = how.repeats[step % len(how.repeats)]
        optimizer.zero_grad(set_to_none=how.set_to_none)
        total: Any = 0.0
        for _ in range(how.micro_batches):
            batch = _batch(image, how.batches[step % len(how.batches)])
            with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
                outputs = model(*batch)
            used = outputs[: how.used_outputs[step % len(how.used_outputs)]]
            if how.changes_outputs:
                for o in used:
                    o.mul_(0.9).add_(0.1)
                del o
            loss = sum(
                (o.float().square().mean() for o in used if o.requires_grad), torch.zeros((), requires_grad=True)
            )
            del outputs, used, batch
            if how.summed:
                total = total + loss
            else:
                loss.backward()
            losses.append(loss.item())
            del loss
        if how.summed:
            total.backward()
        del total
        if how.clipped:
            nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if how.evaluates and step % 2:
            model.eval()
            with torch.no_grad():
                losses += [o.float().sum().item() for o in model(*_batch(image, 4))]
            model.train()
    return Outcome(
        tuple(losses),
        {name: _digest(value) for name, value in model.state_dict().items()},
        {name: "absent" if p.grad is None else _digest(p.grad) for name, p in model.named_parameters()},
        _digest(torch.get_rng_state()),
    )


def _batch(image: bool, size: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(VOCABULARY, (size, LENGTH))
    return (torch.randn(size, 3, SIDE, SIDE), tokens) if image else (tokens,)


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha1(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def train_within(
    budget: str, make: Callable[[], nn.Module], how: Script, algorithm: str = "hierarchical"
) -> tuple[Outcome, Session]:
    """Train under monetrun, all implementations exact; the session is closed."""
    torch._dynamo.reset()
    gc.collect()
    settings = Settings(
        mode=RUN,
        budget=budget,
        solver_seconds=0.3,
        implementations="exact",
        cache_folder=_costs_folder(),
        algorithm=algorithm,
    )
    session = Session(settings)
    session.watch_process()
    try:
        return train(make, how), session
    finally:
        session.close()
        torch._dynamo.reset()


def differences(plain: Outcome, found: Outcome) -> list[str]:
    """What is not as in the plain run."""
    lines = [] if found.losses == plain.losses else [f"losses {found.losses} instead of {plain.losses}"]
    for what in ("state", "gradients"):
        own, other = getattr(found, what), getattr(plain, what)
        if names := [n for n in {**other, **own} if own.get(n) != other.get(n)]:
            lines.append(f"{what} of {', '.join(names)}")
    return lines if found.generator == plain.generator else [*lines, "generator"]


@functools.cache
def _costs_folder() -> str:
    """Where all models of the process find measured costs: most of their operators are alike."""
    folder = tempfile.TemporaryDirectory(prefix="monetrun-random-models-")
    atexit.register(folder.cleanup)
    return folder.name


def freeze() -> None:
    """Keep the collector from what is there now, torch's modules above all: looking at them is a third of the time."""
    gc.collect()
    gc.freeze()


def check(seed: int, *, small: bool = False, changed: bool = False, is_short: bool = False) -> str:
    """Train a seed's model plainly and within a budget; how it went in a line.

    Args:
        seed: of the model, and of the script.
        small: see ``source`` and ``script``.
        changed: the script changes the model's outputs in place; nothing is compared where eager refuses that.
        is_short: see ``short``; planned by the solver that takes the least time.

    Raises:
        AssertionError: not as plainly, or beyond the budget.
    """
    freeze()
    text, how = source(seed, small=small), replace(script(seed, small=small), changes_outputs=changed)
    how, budget, algorithm = (short(how), SHORT_BUDGET, "greedy") if is_short else (how, BUDGET, "hierarchical")
    model = model_class(text)
    try:
        plain = train(model, how)
    except RuntimeError as refused:
        if not changed or not any(why in str(refused) for why in ("modified by an inplace operation", "a view")):
            raise
        return f"eager refuses it: {str(refused).splitlines()[0]}"
    for _ in range(3):
        smallest = 0
        try:
            found, session = train_within(budget, model, how, algorithm)
            break
        except (NoPlanInTime, BudgetExceeded):  # the clock decides; or a part without a plan holds more than was known
            smallest, plain_bytes = 1, 1
        except InfeasibleBudget as error:
            smallest, plain_bytes = error.smallest_bytes, error.plain_bytes
        share = smallest / plain_bytes if plain_bytes else 1.0  # a share grows with later shapes, as bytes do not
        budget = f"{min(1.0, (share + 1) / 2 + 0.01):.3f}x"
    else:
        raise AssertionError(f"infeasible at {budget}: smallest {smallest}, plain {plain_bytes}")
    engine = session.engine
    unlike = differences(plain, found)
    assert not unlike, "; ".join(unlike)
    if engine is None or engine.plan is None:
        return f"unplanned: {'; '.join(session.reporter.warned)}"
    plan = engine.plan
    estimated = engine.running.enforcement.share_was_estimated  # of a step that no schedule was made of as a whole
    within = engine.peak_bytes <= plan.budget_bytes
    assert within or estimated, f"peak {engine.peak_bytes} beyond {plan.budget_bytes} bytes"
    said = f"; {'; '.join(session.reporter.warned)}" if session.reporter.warned else ""
    said += "" if within else "; beyond the share, which is an estimate"
    return f"{budget}: {engine.peak_bytes} of {plan.budget_bytes} bytes, plain {plan.plain_peak_bytes}{said}"


def main(words: list[str]) -> int:
    """Run seeds by hand; the number of those that fail."""
    is_short, changed = "--short" in words, "--changed" in words
    small = is_short or "--small" in words
    words = [word for word in words if word not in ("--small", "--changed", "--short")]
    if words[:1] == ["--show"]:
        print(source(int(words[1]), small=small), script(int(words[1]), small=small), sep="\n")
        return 0
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    failed = 0
    seeds = range(int(words[0]), int(words[1])) if len(words) == 2 else map(int, words)
    for seed in seeds:
        try:
            print(seed, check(seed, small=small, changed=changed, is_short=is_short), flush=True)
        except Exception as error:  # noqa: BLE001 (the next seed is tried)
            failed += 1
            print(
                source(seed, small=small),
                script(seed, small=small),
                "".join(traceback.format_exception(error)),
                sep="\n",
            )
            print(seed, "FAILED", type(error).__name__, str(error).splitlines()[:1], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 99))
