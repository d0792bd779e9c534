"""The options of ``imagenet.py``: named as torchvision's reference names them, where it has them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lib.presets import PRESETS, described

Size = tuple[int, int]


def size(text: str) -> Size:
    """A side of a square, or HEIGHTxWIDTH."""
    sides = text.split("x")
    if len(sides) > 2 or not all(s.isdecimal() and int(s) > 0 for s in sides):
        raise argparse.ArgumentTypeError(f"expected 224 or 416x608, got {text!r}")
    return int(sides[0]), int(sides[-1])


def sizes(text: str) -> tuple[tuple[int, Size], ...]:
    """``EPOCH:SIZE`` in rising order of the epochs, separated by commas."""
    found = []
    for part in text.split(","):
        epoch, colon, side = part.partition(":")
        if not colon or not epoch.isdecimal() or (found and int(epoch) <= found[-1][0]):
            raise argparse.ArgumentTypeError(f"expected 0:128,30:160,60:192 with rising epochs, got {text!r}")
        found.append((int(epoch), size(side)))
    return tuple(found)


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description="Train a network on ImageNet.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--preset", choices=sorted(PRESETS), help="values for the options that are not given")
    found.add_argument("--list-presets", action="store_true", help="print the presets, and end")
    _data(found.add_argument_group("data"))
    _training(found.add_argument_group("training"))
    _regularization(found.add_argument_group("regularization"))
    _run(found.add_argument_group("run"))
    return found


def _data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", choices=("imagefolder", "pictures", "synthetic"), default="imagefolder",
        help="imagefolder: folders train and val in --data-path; pictures: such folders are made there from "
        "pictures inside installed Python packages; synthetic: noise")  # fmt: skip
    add("--data-path", default="", metavar="DIR",
        help="with folders train and val, a folder a class; default: imagenet, with --data pictures: "
        "pictures")  # fmt: skip
    add("--synthetic-images", type=positive, default=1281167, metavar="N", help="with --data synthetic")
    add("-j", "--workers", type=int, default=16, metavar="N", help="processes that load data, for each rank")
    add("--train-crop-size", type=size, default="224", metavar="SIZE", help="224, or 416x608 for height and width")
    add("--progressive-sizes", type=sizes, default=(), metavar="EPOCH:SIZE,...",
        help="training crops from each of these epochs on, instead of --train-crop-size")  # fmt: skip
    add("--val-resize-size", type=positive, default=256, metavar="N", help="shorter side before the centre crop")
    add("--val-crop-size", type=size, default="224", metavar="SIZE")
    add("--interpolation", choices=("bilinear", "bicubic", "nearest"), default="bilinear")
    add("--ra-sampler", action="store_true", help="repeated augmentation: --ra-reps views of an image in a batch")
    add("--ra-reps", type=positive, default=3, metavar="N")


def _training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", default="resnet18", help="any classification network of torchvision, or unet")
    add("--epochs", type=positive, default=90, metavar="N")
    add("-b", "--batch-size", type=positive, default=32, metavar="N", help="images of a forward pass on a device")
    add("--total-batch-size", type=positive, metavar="N",
        help="images of an optimizer step on all devices; gradients are accumulated as --batch-size and the number "
        "of devices need it; default: no accumulation")  # fmt: skip
    add("--opt", choices=("sgd", "sgd_nesterov", "rmsprop", "adamw", "lamb"), default="sgd",
        help="lamb: where this torch has it")  # fmt: skip
    add("--lr", type=float, default=0.1)
    add("--momentum", type=float, default=0.9, metavar="M")
    add("--wd", "--weight-decay", type=float, default=1e-4, metavar="W", dest="weight_decay")
    add("--norm-weight-decay", type=float, metavar="W", help="of normalization layers; default: --weight-decay")
    add("--lr-scheduler", choices=("steplr", "cosineannealinglr", "exponentiallr"), default="steplr")
    add("--lr-warmup-epochs", type=int, default=0, metavar="N")
    add("--lr-warmup-method", choices=("linear", "constant"), default="constant")
    add("--lr-warmup-decay", type=float, default=0.01, metavar="SHARE", help="of --lr, where the warm-up begins")
    add("--lr-step-size", type=positive, default=30, metavar="EPOCHS")
    add("--lr-gamma", type=float, default=0.1)
    add("--lr-min", type=float, default=0.0)
    add("--clip-grad-norm", type=float, metavar="NORM")
    add("--amp", nargs="?", const="fp16", choices=("fp16", "bf16"), help="automatic mixed precision; alone: fp16")
    add("--channels-last", action="store_true")
    add("--sync-bn", action="store_true", help="normalize over the batches of all devices")


def _regularization(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--label-smoothing", type=float, default=0.0, metavar="S")
    add("--mixup-alpha", type=float, default=0.0, metavar="A")
    add("--cutmix-alpha", type=float, default=0.0, metavar="A")
    add("--auto-augment", choices=("ra", "ta_wide", "augmix", "imagenet"))
    add("--random-erase", type=float, default=0.0, metavar="P")
    add("--model-ema", action="store_true", help="evaluate an exponential moving average of the weights too")
    add("--model-ema-steps", type=positive, default=32, metavar="N", help="steps between updates of the average")
    add("--model-ema-decay", type=float, default=0.99998, metavar="D")


def _run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", default="auto", help="cuda, cpu; auto: cuda where there is one")
    add("--seed", type=int, default=0)
    add("--print-freq", type=positive, default=10, metavar="STEPS")
    add("--output-dir", default="", metavar="DIR", help="for checkpoint.pth, the last one")
    add("--save-freq", type=int, default=0, metavar="STEPS", help="write it after so many steps too, not only epochs")
    add("--resume", default="", metavar="FILE", help="a checkpoint; auto: the one in --output-dir, if there is one")
    add("--test-only", action="store_true", help="evaluate the checkpoint, train nothing")
    add("--max-steps", type=positive, metavar="N", help="end after so many optimizer steps, with a checkpoint")
    add("--losses", default="", metavar="FILE", help="append each step's number and loss")
    add("--tensorboard", default="", metavar="DIR", help="write scalars there")
    add("--use-deterministic-algorithms", action="store_true")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; a preset's values stand where the command line gives none."""
    options = parser()
    preset = options.parse_known_args(words)[0].preset
    if preset:
        options.set_defaults(**PRESETS[preset].options)
    args = options.parse_args(words)
    args.data_path = args.data_path or ("pictures" if args.data == "pictures" else "imagenet")
    if args.list_presets:
        print(described("recipes/imagenet.py"))
        sys.exit(0)
    if args.test_only and not args.resume:
        options.error("--test-only needs --resume")
    if args.resume == "auto" and not args.output_dir:
        options.error("--resume auto needs --output-dir")
    if args.lr_warmup_epochs >= args.epochs and args.lr_warmup_epochs:
        options.error(f"--lr-warmup-epochs {args.lr_warmup_epochs} leaves none of --epochs {args.epochs}")
    return args
