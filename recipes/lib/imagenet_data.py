"""The data of ``imagenet.py``: datasets, augmentation, and which images a rank reads in which step.

What is drawn at random for an image follows from the seed, the step and its place in the step, not from the process
that loads it nor from what was drawn before. So a run that is resumed in the middle of an epoch sees what it would have
seen, with any number of workers.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from lib import pictures
from lib.imagenet_options import Size

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUGMENTATIONS = {
    "ra": v2.RandAugment,
    "ta_wide": v2.TrivialAugmentWide,
    "augmix": v2.AugMix,
    "imagenet": v2.AutoAugment,
}


class Draw(NamedTuple):
    """One image of a batch, as a sampler asks for it."""

    index: int
    seed: int
    size: Size


def seed_of(*numbers: int) -> int:
    """A seed for one purpose, from all numbers that tell it from the others."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


# ---- images


def augmented(args: argparse.Namespace, size: Size) -> v2.Compose:
    """The transforms of a training image."""
    interpolation = InterpolationMode(args.interpolation)
    steps: list[Any] = [
        v2.RandomResizedCrop(size, interpolation=interpolation, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if args.auto_augment:
        steps.append(AUGMENTATIONS[args.auto_augment](interpolation=interpolation))
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if args.random_erase:
        steps.append(v2.RandomErasing(args.random_erase))
    return v2.Compose([*steps, v2.ToPureTensor()])


def centred(args: argparse.Namespace) -> v2.Compose:
    """The transforms of a validation image."""
    return v2.Compose(
        [
            v2.Resize(args.val_resize_size, interpolation=InterpolationMode(args.interpolation), antialias=True),
            v2.CenterCrop(args.val_crop_size),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            v2.ToPureTensor(),
        ]
    )


class Augmented(Dataset):
    """An ImageFolder's images, each augmented as its ``Draw`` says."""

    def __init__(self, folder: torchvision.datasets.ImageFolder, transforms: Callable[[Size], v2.Compose]) -> None:
        self.folder, self.transforms = folder, transforms
        self.made: dict[Size, v2.Compose] = {}

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, int]:
        if draw.size not in self.made:
            self.made[draw.size] = self.transforms(draw.size)
        image, label = self.folder[draw.index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.seed)
            return self.made[draw.size](image), label


class Noise(Dataset):
    """Synthetic images: noise, the same at each index."""

    def __init__(self, count: int, classes: int, size: Size) -> None:
        self.count, self.classes, self.size = count, classes, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw: Draw | int) -> tuple[torch.Tensor, int]:
        index, size = (draw.index, draw.size) if isinstance(draw, Draw) else (draw, self.size)
        generator = torch.Generator().manual_seed(seed_of(index))
        return torch.randn(3, *size, generator=generator), index % self.classes


# ---- which images


@dataclass(frozen=True)
class Steps:
    """How optimizer steps are divided among ranks and into forward passes.

    Attributes:
        images: in the training set.
        batch_size: images of a forward pass on a rank.
        accumulated: forward passes of a rank in a step.
        world_size: ranks.
    """

    images: int
    batch_size: int
    accumulated: int
    world_size: int

    @property
    def total(self) -> int:
        """Images of a step."""
        return self.batch_size * self.accumulated * self.world_size

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; images that do not fill one are left out."""
        return self.images // self.total

    @classmethod
    def of(cls, args: argparse.Namespace, images: int, world_size: int) -> Steps:
        """The division that the options ask for.

        Raises:
            SystemExit: it is not possible.
        """
        together = args.batch_size * world_size
        total = args.total_batch_size or together
        if total % together:
            raise SystemExit(
                f"--total-batch-size {total} is not a multiple of --batch-size {args.batch_size} on {world_size} "
                f"device{'s' * (world_size > 1)}: give a multiple of {together}"
            )
        if images < total:
            raise SystemExit(f"{images} images do not fill a step of {total}: give a smaller --total-batch-size")
        return cls(images, args.batch_size, total // together, world_size)


@dataclass
class Order:
    """A batch sampler: the batches of one rank in one epoch, from ``first_step`` on.

    A step has the same images for any number of ranks, and for any division into forward passes.

    Attributes:
        steps: how steps are divided.
        rank: whose batches.
        seed: of the run.
        reps: views of an image that follow each other, on different ranks (repeated augmentation).
        epoch: which one.
        first_step: of the epoch.
        size: of the crops.
    """

    steps: Steps
    rank: int
    seed: int
    reps: int = 1
    epoch: int = 0
    first_step: int = 0
    size: Size = (224, 224)

    def __len__(self) -> int:
        return (self.steps.per_epoch - self.first_step) * self.steps.accumulated

    def __iter__(self) -> Iterator[list[Draw]]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
        shuffled = torch.randperm(self.steps.images, generator=generator)
        order = shuffled[: -(-self.steps.images // self.reps)].repeat_interleave(self.reps).tolist()
        together = self.steps.batch_size * self.steps.world_size
        for first in range(self.first_step * self.steps.total, self.steps.per_epoch * self.steps.total, together):
            places = range(first + self.rank, first + together, self.steps.world_size)
            yield [Draw(order[p], seed_of(self.seed, self.epoch, p), self.size) for p in places]


@dataclass(frozen=True)
class Data:
    """What a rank trains with and is evaluated with.

    Attributes:
        classes: their number.
        steps: how optimizer steps are divided.
        order: the sampler of ``training``.
        training: gives batches of images and labels.
        validation: gives this rank's share of the validation set.
    """

    classes: int
    steps: Steps
    order: Order
    training: DataLoader
    validation: DataLoader


def load(args: argparse.Namespace, rank: int, world_size: int, pin_memory: bool) -> Data:
    """The data that the options ask for."""
    train: Dataset
    val: Dataset
    if args.data == "synthetic":
        classes, images = 1000, args.synthetic_images
        train, val = (Noise(n, classes, args.val_crop_size) for n in (images, -(-images // 25)))
    else:
        root = Path(args.data_path)
        if args.data == "pictures":
            pictures.make(root)
        folders = {part: root / part for part in ("train", "val")}
        for wanted in folders.values():
            if not wanted.is_dir():
                raise SystemExit(f"{wanted} is no folder: --data-path wants folders train and val, a folder a class")
        folder = torchvision.datasets.ImageFolder(str(folders["train"]))
        train = Augmented(folder, functools.partial(augmented, args))
        val = torchvision.datasets.ImageFolder(str(folders["val"]), centred(args))
        classes, images = len(folder.classes), len(folder)
    steps = Steps.of(args, images, world_size)
    order = Order(steps, rank, args.seed, args.ra_reps if args.ra_sampler else 1)
    mine = range(rank, len(val), world_size)  # type: ignore[arg-type]  # each has a length
    same: dict[str, Any] = {"num_workers": args.workers, "pin_memory": pin_memory}
    return Data(
        classes,
        steps,
        order,
        DataLoader(train, batch_sampler=order, **same),  # type: ignore[arg-type]  # its items are found by Draw
        DataLoader(val, batch_size=args.batch_size, sampler=mine, **same),
    )


def size_at(args: argparse.Namespace, epoch: int) -> Size:
    """The training crop in an epoch."""
    begun = itertools.takewhile(lambda one: one[0] <= epoch, args.progressive_sizes)
    return next((size for _, size in reversed(list(begun))), args.train_crop_size)
