"""What TorchDynamo does not look at again, or would draw or compute once for all, is as in eager in each step."""

import contextlib
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.variables import nn_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from monetrun.capture import eager_answers
from monetrun.runtime.unguarded import Unguarded
from support.sessions import opened_session

WIDTH, STEPS, CHANGES_AT = 32, 6, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def activated(self, x):
        return torch.tanh(x)

    def forward(self, x):
        return x + self.down(self.activated(self.up(x)))


class Scaled(nn.Module):
    """Blocks whose result is multiplied by what ``factor`` gives for the module and its input."""

    def __init__(self, factor):
        super().__init__()
        self.blocks, self.factor = nn.Sequential(Block(), Block()), factor
        self.random = random.Random(1)

    def forward(self, x):
        return self.blocks(x) * self.factor(self, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.qkv.weight)  # so that kernels differ in the bits of the loss

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(0, (2, 64)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def blocks():
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))


def trained(build, change=None):
    """Losses, the script's own numbers between the steps, and those that torch draws after the training."""
    torch.manual_seed(0)
    random.seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(STEPS):
        if step == CHANGES_AT and change is not None:
            change()
        optimizer.zero_grad()
        loss = model(torch.randn(128, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), random.random()))
    return found, torch.rand(3).tolist()


def check(build, change=None, undo=None, budget="0.95x"):
    expected = trained(build, change)
    if undo is not None:
        undo()
    with opened_session(budget=budget, solver_seconds=0.5, implementations="exact", quiet=True) as opened:
        found = trained(build, change)
        assert opened.engine.plan is not None
    assert found == expected
    return opened


REPLACED = {
    "forward": (Block, "forward", lambda self, x: x + 3 * self.down(F.silu(self.up(x)))),
    "helper": (Block, "activated", lambda self, x: F.silu(x)),
    "of torch": (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight * 2, self.bias)),
    "call": (Block, "__call__", lambda self, x: 2 * nn.Module.__call__(self, x)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_method_that_is_replaced_on_a_class_in_the_middle_of_training_is_called(name):
    cls, method, other = REPLACED[name]
    with pytest.MonkeyPatch.context() as patch:
        check(blocks, lambda: patch.setattr(cls, method, other, raising=False), patch.undo)


KNOWN_TO_DYNAMO = {"__call__": "unpatched_nn_module_call", "_call_impl": "unpatched_nn_module_call_impl"}


def scaled_where_linear(call):
    """``call``, of modules, with its result scaled."""
    return lambda self, *args: call(self, *args) * (1.5 if isinstance(self, nn.Linear) else 1)


@pytest.mark.parametrize("from_the_beginning", [False, True], ids=["in the middle", "before Dynamo was imported"])
@pytest.mark.parametrize("name", KNOWN_TO_DYNAMO)
def test_what_is_put_in_the_place_of_every_modules_call_is_called(name, from_the_beginning):
    """Dynamo takes what it finds there when it is imported for torch's own, and calls the forward instead."""
    wrapper = scaled_where_linear(getattr(nn.Module, name))
    with pytest.MonkeyPatch.context() as patch:
        if not from_the_beginning:
            check(blocks, lambda: patch.setattr(nn.Module, name, wrapper), patch.undo)
            return
        patch.setattr(nn.Module, name, wrapper)
        patch.setattr(nn_module, KNOWN_TO_DYNAMO[name], wrapper)
        check(blocks)


class Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh().flatten(1))


def test_a_method_of_tensors_that_is_replaced_in_the_middle_of_training_is_called():
    def twice(self, *args, own=torch.Tensor.flatten):
        return own(self, *args) * 2

    with pytest.MonkeyPatch.context() as patch:
        check(Flattens, lambda: patch.setattr(torch.Tensor, "flatten", twice), patch.undo)


def test_a_method_of_tensors_that_comes_and_goes_has_nothing_compiled_again():
    unguarded = Unguarded(Flattens())
    seen = []
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "flatten", lambda self, *args: self)
            unguarded.changed()
            seen.append(unguarded.now)
        unguarded.changed()
        seen.append(unguarded.now)
    assert len({*seen[1::2]}) == 1
    assert not {*seen[::2]} & {*seen[1::2]}


def step_of(model):
    """The loss of a step of whatever parameters the model has now."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.zero_grad()
    loss = model(torch.randn(128, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 4)

    def pooled(self, x):
        return x.relu()

    def forward(self, x):
        return self.out(self.pooled(x))


@pytest.mark.parametrize("as_class", [False, True], ids=["a module", "its class"])
def test_a_method_of_a_class_that_came_into_the_model_later_may_be_replaced(as_class):
    class Wider(Block):
        def activated(self, x):
            return torch.sigmoid(x)

    def trained_with_changes():
        torch.manual_seed(0)
        model, found = blocks(), []
        for step in range(STEPS):
            if step == 2 and as_class:
                model[0].__class__ = Wider
            elif step == 2:
                model[2] = Head()
            if step == 3:
                patch.setattr(Head, "pooled", lambda self, x: 3 * x)
                patch.setattr(Wider, "activated", lambda self, x: F.silu(x))
            found.append(step_of(model))
        return found

    with pytest.MonkeyPatch.context() as patch:
        expected = trained_with_changes()
        patch.undo()
        with opened_session(budget="0.95x", solver_seconds=0.5, implementations="exact", quiet=True) as opened:
            assert trained_with_changes() == expected
            assert opened.engine.plan is not None


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.inner(x))


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * (1.0 if x.sum().item() > -1e9 else 2.0)
        return x


def test_a_method_of_a_class_that_came_into_parts_that_share_what_is_compiled_may_be_replaced():
    """The third of the blocks captures nothing itself."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def activated(self, x):
            return x.relu()

        def forward(self, x):
            return self.activated(self.inner(x))

    def train(activated=Other.activated):
        Other.activated = activated
        torch.manual_seed(0)
        model, losses = InParts(), []
        for step in range(STEPS):
            if step == 2:
                for block in model.blocks:
                    block.inner = Other()
            if step == 4:
                Other.activated = lambda self, x: 3 * x
            losses.append(step_of(model))
        return losses

    expected = train()
    with opened_session(budget="1.2x", solver_seconds=0.3, implementations="exact", quiet=True) as opened:
        assert train() == expected
        assert opened.engine.plan is not None


def test_the_kernels_of_attention_that_are_allowed_may_change_in_the_middle_of_training():
    before = torch.backends.cuda.flash_sdp_enabled()
    try:
        switch = functools.partial(torch.backends.cuda.enable_flash_sdp, not before)
        check(Attention, switch, functools.partial(torch.backends.cuda.enable_flash_sdp, before), "1.2x")
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def test_attention_under_another_kernel_from_the_beginning_trains_as_in_eager():
    with sdpa_kernel(SDPBackend.MATH):
        check(Attention, budget="1.2x")


def shuffled(model, x):
    numbers = [1.0, 2.0, 3.0]
    random.shuffle(numbers)
    return numbers[0]


def seeded(model, x):
    random.seed(3)
    return random.random()


SCALE = [1.7]


def scaled_relu(x, inplace=False, own=F.relu):
    return own(x) * SCALE[0]


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def test_a_function_of_torch_that_is_wrapped_in_the_middle_of_training_is_called_once():
    """AOTAutograd's mode had torch's own call the wrapper again."""
    with pytest.MonkeyPatch.context() as patch:
        check(Rectified, lambda: patch.setattr(F, "relu", scaled_relu), patch.undo)


@contextlib.contextmanager
def replaced_before_dynamo_is_imported(owner, name, function):
    """Dynamo's table of torch's functions is made from the names as they are then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        trace_rules.get_torch_obj_rule_map.cache_clear()
        try:
            yield
        finally:
            patch.undo()
            trace_rules.get_torch_obj_rule_map.cache_clear()


@pytest.mark.parametrize("again", [False, True], ids=["once", "made again"])
def test_a_function_of_torch_that_was_wrapped_before_dynamo_was_imported_is_traced_with_guards(again):
    """Dynamo took it for torch's own, and what it read for constants; its table is made again in between."""

    def change():
        SCALE.append(SCALE.pop() + 1)
        if again:
            trace_rules.get_torch_obj_rule_map.cache_clear()  # as with each process group

    with replaced_before_dynamo_is_imported(F, "relu", scaled_relu):
        eager_answers._install.cache_clear()
        try:
            check(Rectified, change, lambda: SCALE.append(SCALE.pop() - 1))
        finally:
            SCALE[:] = [1.7]


def test_a_builtin_of_torch_that_was_wrapped_before_dynamo_was_imported_is_captured():
    matmul = torch.matmul

    @functools.wraps(matmul)
    def counted(*args, **kwargs):
        return matmul(*args, **kwargs)

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x):
            return self.last(torch.matmul(self.first(x), torch.eye(2 * WIDTH)).relu())

    with replaced_before_dynamo_is_imported(torch, "matmul", counted):
        assert not check(Product).engine.breaks


DRAWN = {
    "sample": lambda model, x: random.sample([1.0, 2.0, 3.0], 2)[0],
    "shuffle": shuffled,
    "seed": seeded,
    "sample of its own": lambda model, x: model.random.sample([1.0, 2.0, 3.0], 2)[0],
    "number of its own": lambda model, x: model.random.random(),
    "number": lambda model, x: random.random(),
    "made there": lambda model, x: random.Random(4).sample([1.0, 2.0, 3.0], 1)[0],
}


@pytest.mark.parametrize("name", DRAWN)
def test_pythons_random_numbers_are_drawn_in_each_forward_and_go_on_from_there(name):
    check(lambda: Scaled(DRAWN[name]))


@functools.lru_cache
def projection(width):
    return torch.randn(width)


@functools.lru_cache
def pair(width):
    return torch.randn(width), 2.0


@functools.lru_cache
def number(width):
    return 1 + random.random()


class OfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    @functools.cache  # noqa: B019 - scripts do so
    def scales(self, width):
        return torch.randn(width)

    def forward(self, x):
        return self.blocks(x) * self.scales(WIDTH)


CACHED = {
    "tensor": lambda model, x: projection(WIDTH),
    "by a size": lambda model, x: projection(x.size(1)),
    "pair": lambda model, x: pair(WIDTH)[0] * pair(WIDTH)[1],
    "number": lambda model, x: torch.full((WIDTH,), number(WIDTH)),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_function_with_a_cache_is_computed_once(name):
    def build():
        for function in (projection, pair, number):
            function.cache_clear()
        return Scaled(CACHED[name])

    assert check(build).engine.breaks == {}


def test_a_method_with_a_cache_is_computed_once_for_each_module():
    assert check(OfItsOwn).engine.breaks == {}


def test_a_cached_tensor_that_the_script_changes_later_has_its_new_value():
    def build():
        projection.cache_clear()
        return Scaled(CACHED["tensor"])

    check(build, lambda: projection(WIDTH).mul_(0.5))


def test_a_bias_may_be_changed_between_forward_and_backward():
    def trained_with_clamps():
        torch.manual_seed(0)
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(128, WIDTH)).square().mean()
            with torch.no_grad():
                model[2].bias.clamp_(-0.01, 0.01)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = trained_with_clamps()
    with opened_session(budget="0.95x", solver_seconds=0.5, quiet=True) as opened:
        assert trained_with_clamps() == expected
        assert opened.engine.plan is not None
