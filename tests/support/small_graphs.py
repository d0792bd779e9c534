"""Joint graphs small enough to count by hand, written as text, and networks of repeated blocks."""

from __future__ import annotations

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor, check


def make(tensors: str, *operators: str) -> tuple[Graph, Costs]:
    """``make("8 16k 4x", "f: 2 > 0", "b: 0 1 > 3 i0 r")``: bytes and k(ept), x(external); then one operator each.

    ``f`` or ``b``, what it reads, ``>``, what it writes; flags: ``r`` random, ``o`` optional and not in the plain step,
    ``p`` optional, ``wN`` workspace, ``iN`` a second implementation in place of tensor N, ``aN`` a second one that
    reads only tensor N.
    """
    made = []
    for i, word in enumerate(tensors.split()):
        made.append(Tensor(i, int(word.rstrip("kx")), external="x" in word, kept="k" in word, name=f"t{i}"))
    ops, spaces = [], []
    for i, text in enumerate(operators):
        phase, rest = text.split(":")
        reads, tail = rest.split(">")
        words = tail.split()
        inputs = tuple(map(int, reads.split()))
        outputs = tuple(int(w) for w in words if w.isdigit())
        flags = [w for w in words if not w.isdigit()]
        implementations = [Implementation("default", inputs)]
        implementations += [Implementation("in_place", inputs, int(w[1:])) for w in flags if w[0] == "i"]
        implementations += [Implementation("other", (int(w[1:]),)) for w in flags if w[0] == "a"]
        space = sum(int(w[1:]) for w in flags if w[0] == "w")
        ops.append(
            Operator(
                i,
                f"op{i}",
                "test.op",
                FORWARD if phase == "f" else BACKWARD,
                outputs,
                tuple(implementations),
                replayable=phase == "f" and "r" not in flags,
                optional="o" in flags or "p" in flags,
                plain="o" not in flags,
            )
        )
        spaces.append((space,) * len(implementations))
    graph = Graph("test", tuple(made), tuple(ops))
    costs = Costs("test", tuple((1.0 + i,) * len(s) for i, s in enumerate(spaces)), tuple(spaces))
    check(graph, costs)
    return graph, costs


def chain(length: int, nbytes: int = 1) -> tuple[Graph, Costs]:
    """``length`` forward operators in a row and the backward of each, which reads its output; one second each."""
    forward = [f"f: {i - 1 if i else ''} > {i}" for i in range(length)]
    backward = [f"b: {length + i - 1 if i else ''} {length - 1 - i} > {length + i}" for i in range(length)]
    graph, costs = make(f"{nbytes} " * (2 * length), *forward, *backward)
    return graph, Costs("unit", ((1.0,),) * (2 * length), costs.workspace_bytes)


def conv_norm_relu(blocks: int, sizes: tuple[int, ...] = (16,)) -> tuple[Graph, Costs]:
    """A convolution, a normalization and a ReLU, ``blocks`` times, and their backward, with other implementations.

    A ReLU runs again from the normalization's input and statistics (``fused``); its backward reads its output, or a
    mask of an eighth of the bytes per 4-byte element that an optional operator writes (``intermediate``).
    """
    tensors: list[Tensor] = []
    operators: list[Operator] = []
    seconds: list[tuple[float, ...]] = []

    def tensor(nbytes: int, kept: bool = False) -> int:
        tensors.append(Tensor(len(tensors), nbytes, kept=kept, name=f"t{len(tensors)}"))
        return len(tensors) - 1

    def run(
        phase: str, outputs: tuple[int, ...], ways: list[tuple[str, tuple[int, ...], float]], **flags: bool
    ) -> None:
        implementations = tuple(Implementation(name, reads) for name, reads, _ in ways)
        i = len(operators)
        operators.append(Operator(i, f"op{i}", "test.op", phase, outputs, implementations, **flags))
        seconds.append(tuple(s for _, _, s in ways))

    saved = []
    x: tuple[int, ...] = ()
    for block in range(blocks):
        size = sizes[block % len(sizes)] * 32
        conv, norm, stats, relu, mask = tensor(size), tensor(size), tensor(1), tensor(size), tensor(size // 32)
        run(FORWARD, (conv,), [("default", x, 6.0)])
        run(FORWARD, (norm, stats), [("default", (conv,), 1.5)])
        run(FORWARD, (relu,), [("default", (norm,), 1.0), ("fused", (conv, stats), 1.0)])
        run(FORWARD, (mask,), [("default", (relu,), 0.5)], optional=True, plain=False)
        saved.append((size, x, conv, stats, relu, mask))
        x = (relu,)
    gradient = tensor(saved[-1][0])
    run(BACKWARD, (gradient,), [("default", x, 1.0)])
    for size, x, conv, stats, relu, mask in reversed(saved):
        after_relu, after_norm, weight, after = tensor(size), tensor(size), tensor(4, kept=True), tensor(size)
        ways = [("default", (gradient, relu), 1.5), ("intermediate", (gradient, mask), 1.0)]
        run(BACKWARD, (after_relu,), ways)
        run(BACKWARD, (after_norm,), [("default", (after_relu, conv, stats), 2.0)])
        run(BACKWARD, (weight,), [("default", (after_norm, *x), 6.0)])
        run(BACKWARD, (after,), [("default", (after_norm,), 6.0)])
        gradient = after
    graph = Graph("conv-norm-relu", tuple(tensors), tuple(operators))
    costs = Costs("unit", tuple(seconds), tuple((0,) * len(row) for row in seconds))
    check(graph, costs)
    return graph, costs
