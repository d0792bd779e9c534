"""Segment images with a U-Net: a plain PyTorch script, with the image and batch size of MONeT's paper.

    python recipes/unet.py --data-path carvana
    torchrun --nproc-per-node 2 recipes/unet.py --data-path carvana --amp
    monetrun --budget 7GiB recipes/unet.py --data-path carvana

``--data-path`` has a folder ``imgs``, and a folder ``masks`` with a mask for each image: NAME.jpg and NAME_mask.gif or
NAME_mask.png, as in the Carvana data set. Without it, the script draws ellipses on photographs that ship inside Python
packages, and learns to find them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2

from lib.imagenet_options import Size, positive, size
from lib.paper_networks import UNet
from lib.pictures import pictures
from lib.place import Place, placed

SUFFIXES = ("_mask.gif", "_mask.png")


class Masked(Dataset):
    """Images and their masks, from two folders."""

    def __init__(self, root: Path, size: Size) -> None:
        masks = [p for p in (root / "masks").iterdir() if p.name.endswith(SUFFIXES)]
        self.masks = {p.stem.removesuffix("_mask"): p for p in masks}
        self.images = sorted(p for p in (root / "imgs").iterdir() if p.stem in self.masks)
        if not self.images:
            raise SystemExit(
                f"{root} has no image imgs/NAME.jpg with a mask masks/NAME{' or masks/NAME'.join(SUFFIXES)}"
            )
        self.size = size
        self.transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.images[index]
        wide_first = self.size[::-1]
        with Image.open(path) as image, Image.open(self.masks[path.stem]) as mask:
            image = image.convert("RGB").resize(wide_first, Image.Resampling.BILINEAR)
            mask = mask.convert("L").resize(wide_first, Image.Resampling.NEAREST)
        return self.transform(image), (self.transform(mask) > 0).float()


class Ellipses(Dataset):
    """Five ellipses on a part of a photograph, the same at each index."""

    def __init__(self, count: int, size: Size) -> None:
        self.count, self.size = count, size
        self.photographs = pictures()
        if not self.photographs:
            raise SystemExit("no photographs are installed: pip install scikit-learn")
        self.transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)

        def draw(*ends: int) -> list[int]:
            return [int(torch.randint(max(1, end), (), generator=generator)) for end in ends]

        height, width = self.size
        with Image.open(self.photographs[index % len(self.photographs)]) as photograph:
            image = photograph.convert("RGB").resize((2 * width, 2 * height))
        left, top = draw(width, height)
        image, mask = image.crop((left, top, left + width, top + height)), Image.new("L", (width, height))
        for _ in range(5):
            x, y, w, h, *colour = draw(width, height, width // 3, height // 3, 256, 256, 256)
            ImageDraw.Draw(image).ellipse((x, y, x + w + 2, y + h + 2), tuple(colour))
            ImageDraw.Draw(mask).ellipse((x, y, x + w + 2, y + h + 2), 255)
        return self.transform(image), self.transform(mask)


def dice(probability: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Overlap of prediction and mask, 1 where they are the same; the mean over the images."""
    common = (probability * mask).sum((1, 2, 3))
    return ((2 * common + 1) / (probability.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def criterion(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the pixels, and what is missing of the overlap."""
    return F.binary_cross_entropy_with_logits(logits, mask) + 1 - dice(logits.sigmoid(), mask)


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The mean overlap of thresholded predictions, over the images."""
    model.eval()
    overlap, images = 0.0, 0
    for x, y in loader:
        overlap += len(x) * dice((model(x.to(device)) > 0).float(), y.to(device)).item()
        images += len(x)
    return overlap / images


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--data-path", default="", metavar="DIR", help="with folders imgs and masks; default: drawn ellipses")
    add("--size", type=size, default="416x608", metavar="HEIGHTxWIDTH", help="multiples of 16 (default: 416x608)")
    add("--batch-size", type=positive, default=11, metavar="N", help="images on a device (default: 11)")
    add("--channels", type=positive, default=64, metavar="N", help="of the first level (default: 64)")
    add("--images", type=positive, default=1100, metavar="N", help="to draw, where there is no data (default: 1100)")
    add("--epochs", type=positive, default=5, metavar="N")
    add("--lr", type=float, default=1e-3)
    add("--clip-grad-norm", type=float, default=1.0, metavar="NORM")
    add("--amp", action="store_true", help="bfloat16")
    add("--workers", type=int, default=4, metavar="N")
    add("--seed", type=int, default=0)
    add("--print-freq", type=positive, default=10, metavar="STEPS")
    add("--output-dir", default="", metavar="DIR", help="for unet.pth")
    return options.parse_args()


def fit(args: argparse.Namespace, place: Place) -> None:
    """Train as the options say.

    Raises:
        SystemExit: there are too few images for a step, or for a test.
    """
    device = place.device
    data: Dataset = Masked(Path(args.data_path), args.size) if args.data_path else Ellipses(args.images, args.size)
    torch.manual_seed(args.seed)
    train, test = torch.utils.data.random_split(data, [0.9, 0.1])
    sampler = DistributedSampler(train, place.world_size, place.rank, drop_last=True)
    same: dict[str, Any] = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, **same)
    test_loader = DataLoader(test, args.batch_size, **same)
    if not len(test):  # type: ignore[arg-type]
        raise SystemExit(f"of {len(train)} images none is left for the test: give 10 or more")
    if not len(loader):
        devices = f"{place.world_size} device{'s' * (place.world_size > 1)}"
        raise SystemExit(
            f"{len(train)} images for training do not fill a batch of {args.batch_size} on {devices}: "
            "give more images, or a smaller --batch-size"
        )

    model = UNet(channels=args.channels).to(device)
    net: nn.Module = DistributedDataParallel(model) if place.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        net.train()
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        for step, (images, masks) in enumerate(loader, 1):
            images, masks = images.to(device, non_blocking=True), masks.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                logits = net(images)
            loss = criterion(logits.float(), masks)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
            schedule.step()
            if place.first and step % args.print_freq == 0:
                print(f"epoch {epoch + 1} step {step}/{len(loader)} loss {loss.item():.9f}", flush=True)
        if place.first:
            seconds = time.perf_counter() - began
            print(f"epoch {epoch + 1} dice {evaluate(model, test_loader, device):.6f} ({seconds:.1f} s)", flush=True)
            if args.output_dir:
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
                torch.save(model.state_dict(), Path(args.output_dir, "unet.pth"))


def main() -> None:
    args = parse()
    with placed("auto") as place:
        fit(args, place)


if __name__ == "__main__":
    main()
