"""A convolutional network with Lightning: EMA, SWA, accumulated gradients, validation, a checkpoint.

Run as `real_lightning.py OUT`.

Saves losses and weights to OUT.0, and Lightning's checkpoint to OUT.ckpt.
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(5):
            layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10))
        self.losses = []

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    out = sys.argv[1]
    losses, state = [], {}
    for name, callback in (
        ("swa", StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)),
        ("ema", EMAWeightAveraging(decay=0.9)),
    ):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 3, 24, 24), torch.randint(0, 10, (64,)))
        module = Classifier()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            accumulate_grad_batches=2,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=32))
        trainer.save_checkpoint(out + ".ckpt")
        losses += module.losses
        state |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    torch.save({"losses": losses, "state": state}, f"{out}.0")


if __name__ == "__main__":
    main()
