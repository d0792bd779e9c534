"""The ImageNet recipe in one process, with a small network: options, data, and how a killed run goes on."""

import argparse
import json
import math

import pytest
import torch
import torchvision
from torch import nn

import imagenet
from lib import imagenet_options, pictures, presets
from lib.imagenet_data import Draw, Order, Steps, size_at
from support.paths import RECIPES


class Small(nn.Module):
    """With everything that has a state: weights, statistics, dropout."""

    def __init__(self, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few of the pictures' tiles."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "STRIDE", 80)
        patch.setattr(pictures, "GRID", (1, 2))
        pictures.make(root)
    return root


@pytest.fixture
def train(monkeypatch, folder, tmp_path):
    """Trains with the given options; gives the lines of --losses."""
    monkeypatch.setattr(imagenet, "network", lambda name, classes: Small(classes))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(name, *words):
        kept = tmp_path / f"{name}.losses"
        small = "--train-crop-size=16 --val-crop-size=16 --val-resize-size=18 --workers=0 --device=cpu --epochs=2"
        imagenet.main(["--data-path", str(folder), f"--losses={kept}", *small.split(), *words])
        return kept.read_text().splitlines()

    return run


EPOCHS = "--lr-scheduler=cosineannealinglr --lr-warmup-epochs=1 --lr-warmup-method=linear --progressive-sizes=0:12,1:16"
IMAGES = "--random-erase=0.5 --auto-augment=ta_wide --ra-sampler --ra-reps=2 --mixup-alpha=0.2 --cutmix-alpha=1"
STEPS = "-b=4 --total-batch-size=8 --model-ema --model-ema-steps=2 --norm-weight-decay=0 --clip-grad-norm=1"
ALL = f"{EPOCHS} {IMAGES} {STEPS} --label-smoothing=0.1 --print-freq=2".split()


def weights(folder):
    return torch.load(folder / "checkpoint.pth", weights_only=True)


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(train, tmp_path, capsys, monkeypatch):
    whole = train("whole", *ALL, f"--output-dir={tmp_path / 'whole'}")
    steps = len(whole) // 2
    assert steps >= 4
    assert len(set(whole)) == len(whole) == 2 * steps
    said = capsys.readouterr().out
    assert f"Epoch: [1]  [{steps}/{steps}]" in said
    assert said.count("Test: Acc@1") == said.count("Test: EMA Acc@1") == 2
    for part in ("eta: 0:", "lr: 0.1", "img/s: ", "loss: ", "acc1: ", "acc5: ", "time: ", "data: ", "max mem: "):
        assert part in said

    keep = (*ALL, f"--output-dir={tmp_path / 'killed'}", "--save-freq=2", "--resume=auto")
    done = []

    def killed(run, loss):
        done.append(run.state.step)
        if len(done) == steps + 3:  # in the second epoch, a step after a checkpoint
            raise KeyboardInterrupt
        return keep_loss(run, loss)

    keep_loss = imagenet.Run.keep_loss
    with monkeypatch.context() as patch:
        patch.setattr(imagenet.Run, "keep_loss", killed)
        with pytest.raises(KeyboardInterrupt):
            train("killed", *keep)
    assert train("killed", *keep) == whole
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert [k for k in one["model"] if not torch.equal(one["model"][k], other["model"][k])] == []
    assert [k for k in one["average"] if not torch.equal(one["average"][k], other["average"][k])] == []
    assert one["schedule"] == other["schedule"]
    with pytest.raises(SystemExit, match="was written with --model-ema"):
        train("other", f"--resume={tmp_path / 'whole' / 'checkpoint.pth'}", "-b=8")


def test_the_average_is_updated_after_the_first_step_of_an_epoch_as_torchvisions_is(train, tmp_path):
    lines = train("run", "-b=8", "--model-ema", "--model-ema-steps=1000", f"--output-dir={tmp_path}")
    assert len(lines) < 1000
    assert weights(tmp_path)["average"]["n_averaged"] == 2  # once in each epoch
    train("more", "-b=8", "--model-ema", "--model-ema-steps=2", f"--output-dir={tmp_path}")
    assert weights(tmp_path)["average"]["n_averaged"] == 2 * math.ceil(len(lines) / 2 / 2)


def test_without_a_checkpoint_there_is_nothing_to_test(train, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"--test-only: there is no checkpoint .*checkpoint\.pth"):
        train("run", "-b=8", "--test-only", "--resume=auto", f"--output-dir={tmp_path}")
    assert "Acc@1" not in capsys.readouterr().out


def test_a_checkpoint_that_is_not_finished_leaves_the_last_one(train, tmp_path, monkeypatch):
    train("run", "-b=8", f"--output-dir={tmp_path}", "--save-freq=1", "--max-steps=2")
    before = (tmp_path / "checkpoint.pth").read_bytes()

    def killed(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train("run", "-b=8", f"--output-dir={tmp_path}", "--save-freq=1", "--max-steps=4", "--resume=auto")
    assert (tmp_path / "checkpoint.pth").read_bytes() == before


def test_precisions_and_memory_formats_train(train):
    plain = train("plain", "-b=8", "--max-steps=2")
    assert train("again", "-b=8", "--max-steps=2", "--opt=sgd") == plain
    for word in ("--amp=bf16", "--amp", "--channels-last", "--opt=adamw"):
        lines = train(word, "-b=8", "--max-steps=2", word)
        assert all(math.isfinite(float(line.split()[1])) for line in lines)
        assert float(lines[0].split()[1]) == pytest.approx(float(plain[0].split()[1]), rel=0.02)
    if not hasattr(torch.optim, "LAMB"):
        with pytest.raises(SystemExit, match=r"has no LAMB; it has sgd, rmsprop and adamw"):
            train("lamb", "-b=8", "--opt=lamb")


def test_a_preset_gives_the_options_that_are_not_given():
    args = imagenet_options.parse(["--preset=torchvision-600", "--epochs=7"])
    assert (args.model, args.epochs, args.batch_size, args.total_batch_size) == ("resnet50", 7, 128, 1024)
    assert (args.train_crop_size, args.val_crop_size, args.val_resize_size) == ((176, 176), (224, 224), 232)
    assert imagenet_options.parse([]).train_crop_size == (224, 224)
    args = imagenet_options.parse(["--preset=monet-unet"])
    assert (args.model, args.batch_size, args.train_crop_size) == ("unet", 11, (416, 608))
    known = set(vars(imagenet_options.parse([])))
    assert [(name, k) for name, p in presets.PRESETS.items() for k in p.options if k not in known] == []


def test_pictures_have_a_folder_of_their_own():
    assert imagenet_options.parse([]).data_path == "imagenet"
    assert imagenet_options.parse(["--data=pictures"]).data_path == "pictures"
    assert imagenet_options.parse(["--data=pictures", "--data-path=here"]).data_path == "here"


def test_published_accuracies_are_those_of_torchvisions_weights():
    for preset, version in (("torchvision-90", "IMAGENET1K_V1"), ("torchvision-600", "IMAGENET1K_V2")):
        for name, published in presets.PRESETS[preset].published.items():
            metrics = torchvision.models.get_model_weights(name)[version].meta["_metrics"]["ImageNet-1K"]
            assert published == (metrics["acc@1"], metrics["acc@5"]), name


def test_presets_are_listed_with_commands_that_can_be_typed(capsys):
    with pytest.raises(SystemExit, match="0"):
        imagenet_options.parse(["--list-presets"])
    said = capsys.readouterr().out
    assert "resnet50: top-1 80.858, top-5 95.434" in said
    assert "monetrun --budget 4.99GiB recipes/imagenet.py --preset monet-resnet50    (the paper: +11.95%)" in said


@pytest.mark.parametrize(
    "word", ["--resume=auto", "--test-only", "--train-crop-size=0", "--progressive-sizes=5", "-b=0"]
)
def test_options_that_cannot_be_used_are_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        imagenet_options.parse([word])
    assert word.partition("=")[0].strip("-") in capsys.readouterr().err


def factors(**options):
    given = {"epochs": 12, "lr": 0.1, "lr_min": 0.0, "lr_warmup_epochs": 0, "lr_gamma": 0.5, "lr_step_size": 4}
    args = argparse.Namespace(**{**given, "lr_warmup_method": "linear", "lr_warmup_decay": 0.1, **options})
    return [imagenet.lr_factor(args, epoch) for epoch in range(12)]


def scheduled(make):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule, found = make(optimizer), []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"] / 0.1)
        optimizer.step()
        schedule.step()
    return found


def test_the_learning_rate_is_that_of_torchs_schedulers():
    lr = torch.optim.lr_scheduler

    def warmed(optimizer):
        parts = [lr.LinearLR(optimizer, 0.1, total_iters=3), lr.CosineAnnealingLR(optimizer, 9, 0.001)]
        return lr.SequentialLR(optimizer, parts, [3])

    found = factors(lr_scheduler="cosineannealinglr", lr_warmup_epochs=3, lr_min=0.001)
    assert found == pytest.approx(scheduled(warmed))
    assert factors(lr_scheduler="steplr") == pytest.approx(scheduled(lambda o: lr.StepLR(o, 4, 0.5)))
    assert factors(lr_scheduler="exponentiallr") == pytest.approx(scheduled(lambda o: lr.ExponentialLR(o, 0.5)))
    assert factors(lr_scheduler="steplr", lr_warmup_epochs=2, lr_warmup_method="constant")[:3] == [0.1, 0.1, 1.0]


def step_images(world_size, batch_size, accumulated, step, reps=1, first_step=0):
    """What all ranks see in one step."""
    steps = Steps(50, batch_size, accumulated, world_size)
    orders = [list(Order(steps, rank, 3, reps, 1, first_step, (8, 8))) for rank in range(world_size)]
    first = (step - first_step) * accumulated
    return sorted(draw for order in orders for batch in order[first : first + accumulated] for draw in batch)


def test_a_step_has_the_same_images_however_it_is_divided():
    whole = step_images(1, 12, 1, 2)
    assert len(set(whole)) == 12
    for world_size, batch_size, accumulated in ((1, 4, 3), (2, 6, 1), (2, 3, 2), (4, 1, 3)):
        assert step_images(world_size, batch_size, accumulated, 2) == whole
    assert step_images(2, 3, 2, 2, first_step=1) == whole
    assert step_images(1, 12, 1, 1) != whole


def test_an_epoch_has_each_image_once_or_each_of_a_part_as_often_as_is_asked():
    steps = Steps(50, 5, 1, 2)
    seen = [draw.index for rank in (0, 1) for batch in Order(steps, rank, 0) for draw in batch]
    assert sorted(seen) == list(range(50))
    orders = [[draw for batch in Order(steps, rank, 0, 2) for draw in batch] for rank in (0, 1)]
    assert [d.index for d in orders[0]] == [d.index for d in orders[1]]  # the two views, one on each rank
    assert len({d.index for d in orders[0]}) == 25
    assert len({d.seed for order in orders for d in order}) == 50


def test_steps_that_cannot_be_divided_are_refused():
    args = argparse.Namespace(batch_size=8, total_batch_size=None)
    assert Steps.of(args, 100, 2) == Steps(100, 8, 1, 2)
    args.total_batch_size = 48
    assert Steps.of(args, 100, 2) == Steps(100, 8, 3, 2)
    with pytest.raises(SystemExit, match="48 is not a multiple of --batch-size 8 on 4 devices: give a multiple of 32"):
        Steps.of(args, 100, 4)
    with pytest.raises(SystemExit, match="40 images do not fill a step of 48"):
        Steps.of(args, 40, 2)


def test_sizes_grow_with_the_epochs():
    args = imagenet_options.parse(["--progressive-sizes=2:128,5:160x192"])
    assert [size_at(args, epoch) for epoch in (0, 2, 4, 5, 9)] == [(224, 224), *[(128, 128)] * 2, *[(160, 192)] * 2]


def test_every_network_of_the_presets_can_be_made_and_others_are_refused():
    unet = imagenet.network("unet", 7)
    assert unet(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(SystemExit, match=r"--model resnet51: torchvision has .*resnet50.*and there is unet"):
        imagenet.network("resnet51", 7)


def test_synthetic_images_are_the_same_at_each_size_and_place():
    words = "--data=synthetic --synthetic-images=64 -b=4 --workers=0 --train-crop-size=8"
    args = imagenet_options.parse(words.split())
    data = imagenet.load(args, 0, 1, pin_memory=False)
    data.order.size = (8, 8)
    images, labels = next(iter(data.training))
    assert images.shape == (4, 3, 8, 8)
    assert torch.equal(images[0], data.training.dataset[Draw(int(labels[0]), 0, (8, 8))][0])
    assert len(data.validation.dataset) == 3


def test_the_pictures_classes_are_tiles_and_every_fifth_window_is_kept(folder):
    photographs = pictures.pictures()
    classes = sorted(p.name for p in (folder / "train").iterdir())
    assert classes == sorted(f"{p.stem}_0{k}" for p in photographs for k in (0, 1))
    counts = [len(list((folder / part / "china_00").iterdir())) for part in ("train", "val")]
    assert counts[1] == pytest.approx(sum(counts) / 5, abs=1)
    pictures.make(folder)  # it is there


def test_the_committed_curves_are_one_curve():
    found = json.loads((RECIPES / "results" / "same_curve.json").read_text())
    losses = found["losses"]
    assert found["equal_losses"] is True
    assert found["equal_weights"] is True
    assert len(losses) == found["steps"] == 300
    assert sum(losses[-50:]) < sum(losses[:50])
    assert found["planned_peak_bytes"] <= float(found["budget"].removesuffix("x")) * found["plain_peak_bytes"]
