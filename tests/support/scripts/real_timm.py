"""timm's ResNet and ViT with Mixup, ModelEmaV2, AdamW from its factory and a cosine schedule. `real_timm.py OUT`.

Saves losses and weights, with those of the average, to OUT.0.
"""

import sys

import numpy
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2


def train(model):
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=4)
    average = ModelEmaV2(model, decay=0.9)
    criterion = SoftTargetCrossEntropy()
    losses = []
    for step in range(4):
        model.train()
        images, target = mixup(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))
        optimizer.zero_grad()
        loss = criterion(model(images), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        schedule.step(step + 1)
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [net(images).sum().item() for net in (model, average.module)]
    return losses, model.state_dict(), average.module.state_dict()


def main():
    losses, state = [], {}
    for name, sizes in (
        ("test_resnet", {}),
        ("test_vit", {"img_size": 64, "drop_path_rate": 0.1}),
    ):
        torch.manual_seed(0)
        numpy.random.seed(0)
        found, *states = train(timm.create_model(name, num_classes=10, **sizes))
        losses += found
        for kind, weights in zip(("trained", "averaged"), states, strict=True):
            state |= {f"{name}.{kind}.{key}": value for key, value in weights.items()}
    torch.save({"losses": losses, "state": state}, f"{sys.argv[1]}.0")


if __name__ == "__main__":
    main()
