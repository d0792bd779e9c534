"""Presets of ``imagenet.py``: torchvision's recipes with the accuracies published for them, and MONeT's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# MONeT (arXiv 2010.14501): network -> the plain step's GB, and rows of (GB, overhead in %); GB are 2**30 bytes
PAPER: dict[str, tuple[float, list[tuple[float, float]]]] = {
    "resnet50": (15.06, [(10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95)]),
    "googlenet": (14.93, [(9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77)]),
    "mobilenet_v2": (14.46, [(10.02, 2.40), (9.01, 3.10), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72)]),
    "unet": (14.32, [(7.00, 1.39), (6.01, 4.95), (5.01, 11.51)]),
    "vgg16": (14.12, [(6.82, 1.99), (5.90, 5.44), (5.51, 9.11)]),
}


@dataclass(frozen=True, slots=True)
class Preset:
    """Values for the options of ``imagenet.py``.

    Attributes:
        source: where they are from.
        options: by the names of the parsed arguments.
        published: network -> top-1 and top-5 on ImageNet's validation set, in %, of the weights trained so.
        plain_gb: MONeT's, of the step without a budget; 0 elsewhere.
        budgets: MONeT's: GB, and the overhead in % that the paper reports for it.
    """

    source: str
    options: dict[str, Any]
    published: dict[str, tuple[float, float]] = field(default_factory=dict)
    plain_gb: float = 0.0
    budgets: tuple[tuple[float, float], ...] = ()


def _monet(network: str, batch_size: int, **options: Any) -> Preset:
    plain_gb, budgets = PAPER[network]
    return Preset(
        "MONeT, arXiv 2010.14501: batch size and budgets; the rest is torchvision's recipe for the network",
        {"model": network, "batch_size": batch_size, "total_batch_size": batch_size, **options},
        plain_gb=plain_gb,
        budgets=tuple(budgets),
    )


PRESETS = {
    "torchvision-90": Preset(
        "torchvision's reference for the weights IMAGENET1K_V1 of its ResNets; 8 GPUs",
        {
            "model": "resnet50",
            "epochs": 90,
            "batch_size": 32,
            "total_batch_size": 256,
            "lr": 0.1,
            "lr_scheduler": "steplr",
            "lr_step_size": 30,
            "lr_gamma": 0.1,
            "weight_decay": 1e-4,
        },
        {
            "resnet18": (69.758, 89.078),
            "resnet34": (73.314, 91.420),
            "resnet50": (76.130, 92.862),
            "resnet101": (77.374, 93.546),
            "resnet152": (78.312, 94.046),
        },
    ),
    "torchvision-600": Preset(
        "torchvision's reference for the weights IMAGENET1K_V2 of its ResNets; 8 GPUs",
        {
            "model": "resnet50",
            "epochs": 600,
            "batch_size": 128,
            "total_batch_size": 1024,
            "lr": 0.5,
            "lr_scheduler": "cosineannealinglr",
            "lr_warmup_epochs": 5,
            "lr_warmup_method": "linear",
            "weight_decay": 2e-5,
            "norm_weight_decay": 0.0,
            "label_smoothing": 0.1,
            "mixup_alpha": 0.2,
            "cutmix_alpha": 1.0,
            "auto_augment": "ta_wide",
            "random_erase": 0.1,
            "train_crop_size": (176, 176),
            "val_resize_size": 232,
            "ra_sampler": True,
            "ra_reps": 4,
            "model_ema": True,
        },
        {
            "resnet50": (80.858, 95.434),
            "resnet101": (81.886, 95.780),
            "resnet152": (82.284, 96.002),
            "resnext50_32x4d": (81.198, 95.340),
        },
    ),
    "monet-resnet50": _monet("resnet50", 184),
    "monet-googlenet": _monet("googlenet", 320),
    "monet-mobilenet_v2": _monet(
        "mobilenet_v2", 272, epochs=300, lr=0.045, weight_decay=4e-5, lr_step_size=1, lr_gamma=0.98
    ),
    "monet-vgg16": _monet("vgg16", 176, lr=0.01),
    "monet-unet": _monet(
        "unet", 11, lr=0.01, train_crop_size=(416, 608), val_crop_size=(416, 608), val_resize_size=608
    ),
}


def described(script: str) -> str:
    """The presets as text, with the commands that train MONeT's networks within its budgets."""
    lines = []
    for name, preset in PRESETS.items():
        lines.append(f"{name}: {preset.source}")
        lines += [f"    {network}: top-1 {a:.3f}, top-5 {b:.3f}" for network, (a, b) in preset.published.items()]
        if preset.budgets:
            lines.append(f"    plain {preset.plain_gb:.2f} GB")
        lines += [
            f"    monetrun --budget {gb:.2f}GiB {script} --preset {name}    (the paper: {overhead:+.2f}%)"
            for gb, overhead in preset.budgets
        ]
    return "\n".join(lines)
