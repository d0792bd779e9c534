"""Train a network of torchvision with Lightning, on tiles of photographs that ship inside Python packages.

    torchrun --nproc-per-node 8 recipes/lightning_resnet.py
    monetrun --budget 0.5x recipes/lightning_resnet.py

``--data-path`` may be any folder with an ImageFolder in ``train`` and one in ``val``. Needs ``pip install lightning``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lib import pictures
from lib.imagenet_data import MEAN, STD
from lib.imagenet_options import positive


class Images(lightning.LightningDataModule):
    """An ImageFolder in ``train`` and one in ``val``."""

    def __init__(self, root: str, size: int, batch_size: int, workers: int) -> None:
        super().__init__()
        self.root, self.size, self.batch_size, self.workers = Path(root), size, batch_size, workers

    def prepare_data(self) -> None:
        """Make the folder of photographs, if there is none."""
        pictures.make(self.root)

    def loader(self, part: str, *crop: v2.Transform) -> DataLoader:
        """Batches of a part of the data."""
        normalized = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor()]
        folder = torchvision.datasets.ImageFolder(str(self.root / part), v2.Compose([*crop, *normalized]))
        train = part == "train"
        return DataLoader(folder, self.batch_size, shuffle=train, drop_last=train, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader:
        """Random crops, mirrored at random."""
        return self.loader("train", v2.RandomResizedCrop(self.size, antialias=True), v2.RandomHorizontalFlip())

    def val_dataloader(self) -> DataLoader:
        """The centre of each image."""
        return self.loader("val", v2.Resize(self.size, antialias=True), v2.CenterCrop(self.size))


class Classifier(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self, model: str, classes: int, lr: float, epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.get_model(model, num_classes=classes)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """Loss and accuracy of a batch."""
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """SGD, by a cosine over the epochs."""
        optimizer = torch.optim.SGD(self.parameters(), self.hparams["lr"], momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--data-path", default="pictures", metavar="DIR")
    add("--model", default="resnet18", help="any classification network of torchvision")
    add("--size", type=positive, default=96, metavar="N", help="side of the crops")
    add("--batch-size", type=positive, default=32, metavar="N")
    add("--epochs", type=positive, default=20, metavar="N")
    add("--accumulate", type=positive, default=1, metavar="N", help="batches of a step")
    add("--lr", type=float, default=0.05)
    add("--precision", default="32-true", help="Lightning's: 32-true, bf16-mixed, 16-mixed")
    add("--ema", type=float, metavar="DECAY", help="keep an exponential moving average of the weights")
    add("--limit-batches", type=positive, metavar="N", help="of an epoch")
    add("--workers", type=int, default=4, metavar="N")
    add("--output-dir", default="lightning", metavar="DIR", help="for metrics.csv and last.ckpt")
    args = options.parse_args()

    lightning.seed_everything(0, workers=True)
    data = Images(args.data_path, args.size, args.batch_size, args.workers)
    data.prepare_data()  # the number of classes is needed before the trainer is
    classes = sum(1 for _ in (Path(args.data_path) / "train").iterdir())
    logger = CSVLogger(args.output_dir, name="", version="")
    callbacks = [ModelCheckpoint(args.output_dir, save_last=True, save_top_k=0), LearningRateMonitor("epoch")]
    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        precision=args.precision,
        limit_train_batches=args.limit_batches,
        limit_val_batches=args.limit_batches,
        callbacks=[*callbacks, *([EMAWeightAveraging(decay=args.ema)] if args.ema else [])],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(args.model, classes, args.lr, args.epochs), data)
    if not trainer.global_step:
        raise SystemExit(
            f"no step was trained: the images in {args.data_path}/train do not fill a batch of {args.batch_size} on "
            "each device: give a smaller --batch-size"
        )


if __name__ == "__main__":
    main()
