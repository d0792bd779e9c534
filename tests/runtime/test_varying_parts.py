"""Which parts of a model are planned is kept; parts whose shapes or number vary train as torch trains them."""

import pytest
import torch
from torch import nn

from monetrun.core import codec
from monetrun.core.errors import CaptureFailed
from monetrun.planning.coverage import coverage, planned_share
from monetrun.runtime import settling
from monetrun.runtime.planned_calls import PlannedCall
from support.models_in_parts import WIDTH, Block, ShapesFromData, minimized, session, trained
from support.sessions import opened_session


def test_the_record_keeps_the_choice_and_the_next_process_does_not_try_again(tmp_path, capsys, monkeypatch):
    plain = trained(ShapesFromData)
    with session() as opened:
        assert trained(ShapesFromData) == plain
        record, plan, peak_bytes = opened.engine.running.record, opened.engine.plan, opened.engine.peak_bytes
        assert opened.reporter.warned == set()
    assert plan.planned_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert abs(peak_bytes / plan.planned_peak_bytes - 1) <= 0.005
    assert 0.3 < planned_share(record) < 1.0
    (broken,) = record.breaks
    assert (broken.name, broken.in_python) == ("ShapesFromData", True)
    assert "x.detach()[x > 0]" in broken.where
    share = f"{planned_share(record):.0%} of the step's peak is planned"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if broken.where in line]
    assert share in said
    assert broken.where in coverage(record)
    assert share in coverage(record)

    tried = []
    monkeypatch.setattr(PlannedCall, "_cannot_be_captured", lambda self, found, error: tried.append(error))
    for name, value in (("plan", plan), ("record", record)):
        (tmp_path / name).write_text(codec.dumps(value))
    with session(plan_file=str(tmp_path / "plan"), record_file=str(tmp_path / "record")) as opened:
        assert trained(ShapesFromData) == plain
        assert opened.planned[0].captured == 2  # the first block's input needs no gradient
    assert tried == []
    assert capsys.readouterr().err == ""  # the launcher prints it with the plan


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 5))

    def forward(self, x):
        return (x @ self.weight) * float(x.sum())


def test_a_model_without_parts_runs_as_it_is_with_the_line_and_what_becomes_of_the_budget(capsys):
    plain = trained(Bare)
    with session():
        assert trained(Bare) == plain
    said = capsys.readouterr().err
    assert said.count("Bare runs without a plan, nothing of its forward was captured") == 1
    assert "float(x.sum())" in said
    assert "its budget is not enforced" in said
    with session(strict=True), pytest.raises(CaptureFailed, match="nothing of its forward"):
        trained(Bare)


@pytest.mark.nightly
def test_a_part_whose_shapes_never_settle_runs_in_python(monkeypatch):
    monkeypatch.setattr(settling, "UNSETTLED_CALLS", 2)

    class Growing(ShapesFromData):
        def through(self, x):
            x = self.blocks[0](x)
            return x.detach() + self.blocks[1](x[x[:, 0] > 0]).mean()

    plain = trained(Growing, steps=6)
    with session(budget="1GiB") as opened:
        assert trained(Growing, steps=6) == plain
        settled, growing = (part for part in opened.planned[0].parts if part.name == "Block")
    assert settled.broken is None
    assert growing.broken.reason == "a new shape in each call"


@pytest.mark.nightly
def test_a_part_stays_planned_where_new_shapes_come_with_the_models_inputs(monkeypatch):
    monkeypatch.setattr(settling, "UNSETTLED_CALLS", 3)

    def steps():
        torch.manual_seed(0)
        model = ShapesFromData()
        batches = (torch.randn(length, WIDTH) for length in (8, 8, 7, 6, 5, 8, 4, 7, 9))
        return minimized(model, 0.1, lambda x: model(x).square().mean(), batches)

    plain = steps()
    with session(budget="1GiB") as opened:
        assert steps() == plain
        assert not any(part.broken for part in opened.planned[0].parts)


class Deeper(nn.Module):
    """More layers in each step than in the one before, as layers are dropped at random."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        if x.sum().item() < 1e9:
            for block in self.blocks[: self.calls]:
                x = block(x)
        return self.head(x)


def test_a_share_is_not_enforced_where_python_calls_a_part_more_often_than_in_the_recorded_step(capsys):
    plain = trained(Deeper, steps=6)
    with session(budget="0.9x") as opened:  # what earlier tests have left may be a part of so small a step
        assert trained(Deeper, steps=6) == plain
        assert opened.engine.running.enforcement.share_was_estimated
    assert capsys.readouterr().err.count("planned for, but not enforced") == 1


def fail(gradient):
    raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True], ids=["loss", "backward"])
def test_what_is_skipped_is_no_forward_of_the_next_step(fails, capsys):
    """A batch that gives no number, say."""

    def steps():
        torch.manual_seed(0)
        model = ShapesFromData()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(7):
            loss = model(torch.randn(256, WIDTH)).square().mean()
            if step == 4:
                if fails:
                    loss.register_hook(fail)
                    with pytest.raises(ArithmeticError):
                        loss.backward()
                del loss
                optimizer.zero_grad()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        return losses

    plain = steps()
    with session(budget="0.9x") as opened:
        assert steps() == plain
        assert not opened.engine.running.enforcement.share_was_estimated
    assert "not enforced" not in capsys.readouterr().err


class TinyDetector(nn.Module):
    """torchvision's Faster R-CNN: proposals, and so shapes, follow from the data."""

    def __init__(self):
        super().__init__()
        detection = pytest.importorskip("torchvision").models.detection
        self.net = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=96, max_size=96
        )

    def forward(self, x):
        images = list(x[:, : 3 * 32].reshape(-1, 3, 32, 32)[:2].sigmoid())
        boxes = torch.tensor([[2.0, 2.0, 20.0, 20.0], [5.0, 8.0, 28.0, 30.0]])
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
        return sum(self.net(images, targets).values())


@pytest.mark.nightly
def test_a_two_stage_detector_is_planned_in_its_backbone_and_heads():
    def steps(count=3):
        torch.manual_seed(0)
        model = TinyDetector()
        generators = (torch.Generator().manual_seed(step) for step in range(count))
        batches = (torch.randn(64, 3 * 32, generator=generator) for generator in generators)
        return minimized(model, 1e-3, model, batches)

    plain = steps()
    with session(budget="1GiB") as opened:
        assert steps() == plain
        engine = opened.engine
    record = engine.running.record
    assert {"BackboneWithFPN", "RPNHead", "TwoMLPHead"} <= {graph.name for graph in record.graphs}
    assert {"RegionProposalNetwork", "RoIHeads"} <= {broken.name for broken in record.breaks}
    assert engine.peak_bytes <= engine.plan.budget_bytes


def test_inputs_of_ever_new_shapes_take_no_more_memory_and_settle_no_less(monkeypatch):
    monkeypatch.setattr(settling, "_MOST_SHAPES", 8)
    found = settling.Settling()
    settled = []
    for size in range(8 + settling.UNSETTLED_CALLS + 1):
        found.begins([torch.empty(size)], generation=0)
        settled.append(not found.captured("head"))
    assert len(found._seen) == 8
    assert settled.index(False) == 8 + settling.UNSETTLED_CALLS


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Alike parts, each on as many rows as is drawn; all together have the same number in each step."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(6))

    def forward(self, x, rows):
        return torch.cat([e(part) for e, part in zip(self.experts, x.split(rows.tolist()), strict=True)])


@pytest.mark.nightly
def test_the_plain_peak_of_alike_parts_at_other_sizes_is_about_the_recorded_one():
    torch.manual_seed(0)
    plain = []
    with opened_session(budget="0.7x", solver_seconds=1.0) as opened:
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            rows = torch.multinomial(torch.ones(6), 3000, replacement=True).bincount(minlength=6)
            loss = model(torch.randn(3000, 64), rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
            if opened.engine is not None and opened.engine.plan is not None:
                plain.append(opened.engine.running.plan.plain_peak_bytes)
    assert plain[-1] < 1.2 * plain[0]
