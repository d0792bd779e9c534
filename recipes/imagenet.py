"""Train a network on ImageNet: a plain PyTorch script, with the options of torchvision's reference.

    python recipes/imagenet.py --data-path imagenet --model resnet50
    torchrun --nproc-per-node 8 recipes/imagenet.py --data-path imagenet --preset torchvision-600 --amp
    monetrun --budget 10GiB recipes/imagenet.py --data-path imagenet --preset monet-resnet50

``--list-presets`` prints the presets and the accuracies published for them. Without ImageNet: ``--data synthetic`` is
noise, and ``--data pictures`` a small set of tiles of photographs that ship inside Python packages (lib/pictures.py),
made in the folder ``pictures``.

The images of a step are the same for any number of devices and any division into forward passes, and a run that is
resumed, in the middle of an epoch too, goes on as if it had not ended: all that is drawn at random follows from the
seed and the step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms import v2

from lib import imagenet_options
from lib.imagenet_data import Data, load, seed_of, size_at
from lib.meters import Progress, Sums, board
from lib.paper_networks import UNet
from lib.place import Place, placed

NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
AMP_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# ---- what is trained


def network(name: str, classes: int) -> nn.Module:
    """A new network.

    Raises:
        SystemExit: there is none of this name.
    """
    if name == "unet":  # a classifier: the mean of the last features over the image, then a linear layer
        unet = UNet()
        unet.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
        return unet
    models = torchvision.models.list_models(module=torchvision.models)
    if name not in models:
        raise SystemExit(f"--model {name}: torchvision has {', '.join(models)}; and there is unet")
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    return torchvision.models.get_model(name, **options)


def optimizer_for(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``--opt`` names.

    Raises:
        SystemExit: this torch does not have it.
    """
    parameters: Any = model.parameters()
    if args.norm_weight_decay is not None:
        norms = [p for m in model.modules() if isinstance(m, NORMALIZATIONS) for p in m.parameters(recurse=False)]
        known = set(norms)
        others = [p for p in model.parameters() if p not in known]
        groups = ((norms, args.norm_weight_decay), (others, args.weight_decay))
        parameters = [{"params": params, "weight_decay": decay} for params, decay in groups if params]
    same = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.opt.startswith("sgd"):
        nesterov = args.opt == "sgd_nesterov"
        return torch.optim.SGD(parameters, momentum=args.momentum, nesterov=nesterov, **same)
    if args.opt == "rmsprop":  # torchvision's values, after the papers of Inception and MobileNet
        return torch.optim.RMSprop(parameters, momentum=args.momentum, eps=0.0316, alpha=0.9, **same)
    if args.opt == "adamw":
        return torch.optim.AdamW(parameters, **same)
    lamb = getattr(torch.optim, "LAMB", getattr(torch.optim, "Lamb", None))
    if lamb is None:
        raise SystemExit(f"--opt lamb: torch {torch.__version__} has no LAMB; it has sgd, rmsprop and adamw")
    return lamb(parameters, **same)


def lr_factor(args: argparse.Namespace, epoch: int) -> float:
    """What ``--lr`` is multiplied by in an epoch: warm-up, then the schedule."""
    warm_up = args.lr_warmup_epochs
    if epoch < warm_up:
        decay = args.lr_warmup_decay
        return decay if args.lr_warmup_method == "constant" else decay + (1 - decay) * epoch / warm_up
    epoch -= warm_up
    if args.lr_scheduler == "cosineannealinglr":
        least = args.lr_min / args.lr
        return least + (1 - least) * (1 + math.cos(math.pi * epoch / (args.epochs - warm_up))) / 2
    return args.lr_gamma ** (epoch // args.lr_step_size if args.lr_scheduler == "steplr" else epoch)


def average_of(args: argparse.Namespace, model: nn.Module, images_of_a_step: int) -> AveragedModel:
    """The exponential moving average; its decay is for updates as frequent as torchvision's, whatever the batch."""
    faster = images_of_a_step * args.model_ema_steps / args.epochs
    decay = 1 - min(1.0, (1 - args.model_ema_decay) * faster)
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


@dataclass
class State:
    """What a checkpoint keeps, and where training is.

    Attributes:
        model: without DDP.
        optimizer: of its parameters.
        schedule: of the learning rate; it steps once an epoch.
        scaler: of the loss; only with fp16 it does something.
        average: of the weights, if there is one.
        epoch: that runs, or runs next.
        step: of the epoch, that is next.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler
    average: AveragedModel | None
    epoch: int = 0
    step: int = 0

    def save(self, folder: str, args: argparse.Namespace) -> None:
        """Write ``folder``/checkpoint.pth: the whole of it, or what was there stays."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        content = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in fields.items()}
        path = Path(folder, "checkpoint.pth")
        path.parent.mkdir(parents=True, exist_ok=True)
        being_written = path.with_suffix(".tmp")
        with being_written.open("wb") as file:
            torch.save({**content, "args": {k: str(v) for k, v in vars(args).items()}}, file)
            file.flush()
            os.fsync(file.fileno())
        being_written.replace(path)

    def restore(self, path: Path) -> None:
        """Take all from a checkpoint.

        Raises:
            SystemExit: one of both has an average, the other not.
        """
        content = torch.load(path, map_location="cpu", weights_only=True)
        if (self.average is None) != (content["average"] is None):
            raise SystemExit(f"{path} was written {'without' if self.average else 'with'} --model-ema")
        for field in dataclasses.fields(self):
            now = getattr(self, field.name)
            if hasattr(now, "load_state_dict"):
                now.load_state_dict(content[field.name])
            elif now is not None:
                setattr(self, field.name, content[field.name])


# ---- a run


class Run:
    """A training.

    Attributes:
        args: the options.
        place: this process.
        data: what it reads.
        state: what it changes.
        net: the model, under DDP where there are several processes.
    """

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        self.args, self.place = args, place
        device = place.device
        self.data: Data = load(args, place.rank, place.world_size, pin_memory=device.type == "cuda")
        torch.manual_seed(args.seed)
        model = network(args.model, self.data.classes).to(device)
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if args.sync_bn and place.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = optimizer_for(args, model)
        self.state = State(
            model,
            optimizer,
            LambdaLR(optimizer, lambda epoch: lr_factor(args, epoch)),
            torch.amp.GradScaler(device.type, enabled=args.amp == "fp16"),
            average_of(args, model, self.data.steps.total) if args.model_ema else None,
        )
        self.net = model
        if place.world_size > 1:
            self.net = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
        mixes = ((v2.MixUp, args.mixup_alpha), (v2.CutMix, args.cutmix_alpha))
        self.mixes = [mix(alpha=alpha, num_classes=self.data.classes) for mix, alpha in mixes if alpha > 0]
        self.steps_done = 0
        self.board = board(args.tensorboard) if args.tensorboard and place.first else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward pass's precision."""
        kind = AMP_TYPES.get(self.args.amp)
        return torch.autocast(self.place.device.type, kind) if kind else contextlib.nullcontext()

    def on_device(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch on the device, in the wanted memory format."""
        form = torch.channels_last if self.args.channels_last else torch.contiguous_format
        images = images.to(self.place.device, memory_format=form, non_blocking=True)
        return images, labels.to(self.place.device, non_blocking=True)

    def step(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], sums: Sums) -> torch.Tensor:
        """One optimizer step, of as many batches as make up its images; gives this process's mean loss."""
        state, passes = self.state, self.data.steps.accumulated
        losses = []
        for k in range(passes):
            images, labels = self.on_device(*next(batches))
            torch.manual_seed(seed_of(self.args.seed, state.epoch, state.step, k, self.place.rank))
            if self.mixes:
                images, labels = self.mixes[int(torch.randint(len(self.mixes), ()))](images, labels)
            ddp = isinstance(self.net, DistributedDataParallel) and k < passes - 1
            with self.net.no_sync() if ddp else contextlib.nullcontext():  # type: ignore[operator]
                with self.autocast():
                    output = self.net(images)
                    loss = self.criterion(output, labels)
                state.scaler.scale(loss / passes).backward()
            sums.add(loss, output, labels)
            losses.append(loss.detach())
            del output, loss  # or the next forward runs beside this one's output
        if self.args.clip_grad_norm is not None:
            state.scaler.unscale_(state.optimizer)
            nn.utils.clip_grad_norm_(state.model.parameters(), self.args.clip_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def train_epoch(self) -> bool:
        """Train to the end of the epoch; gives False if ``--max-steps`` ended it."""
        args, place, state, steps = self.args, self.place, self.state, self.data.steps
        self.net.train()
        order = self.data.order
        order.epoch, order.first_step, order.size = state.epoch, state.step, size_at(args, state.epoch)
        sums = Sums(place.device)
        header = f"Epoch: [{state.epoch}]"
        progress = Progress(header, steps.per_epoch, state.step, args.print_freq, steps.total, place.device)
        batches = progress.timed(self.data.training)
        lr = state.optimizer.param_groups[0]["lr"]
        while state.step < steps.per_epoch:
            loss = self.step(batches, sums)
            if state.average is not None and state.step % args.model_ema_steps == 0:  # after an epoch's first step, too
                state.average.update_parameters(state.model)
                if state.epoch < args.lr_warmup_epochs:
                    state.average.n_averaged.fill_(0)  # the next update copies the weights
            state.step += 1
            self.steps_done += 1
            self.keep_loss(loss)
            if progress.step():
                means = sums.means()
                place.say(progress.line(lr, means))
                self.plot({"train/lr": lr, **{f"train/{k}": v for k, (v, _) in means.items()}})
            if args.save_freq and state.step % args.save_freq == 0 and state.step < steps.per_epoch:
                self.save()
            if self.steps_done == args.max_steps:
                self.save()
                return False
        return True

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, header: str) -> float:
        """Print and give the top-1 accuracy on the validation set, in %."""
        model.eval()
        sums = Sums(self.place.device)
        for batch in self.data.validation:
            images, labels = self.on_device(*batch)
            with self.autocast():
                output = model(images)
                loss = nn.functional.cross_entropy(output, labels)
            sums.add(loss, output, labels)
        self.place.summed(sums.recent)
        (loss_mean, _), (top1, _), (top5, _) = sums.means().values()
        self.place.say(f"{header} Acc@1 {top1:.3f} Acc@5 {top5:.3f} loss {loss_mean:.4f}")
        name = header.removesuffix(":").lower().replace(" ", "_")
        self.plot({f"{name}/acc1": top1, f"{name}/acc5": top5, f"{name}/loss": loss_mean})
        return top1

    def evaluate_all(self) -> None:
        """The model, and the average of its weights."""
        self.evaluate(self.state.model, "Test:")
        if self.state.average is not None:
            self.evaluate(self.state.average, "Test: EMA")

    def train(self) -> None:
        """Train from where the state is."""
        while self.state.epoch < self.args.epochs:
            if not self.train_epoch():
                return
            self.evaluate_all()
            self.state.schedule.step()
            self.state.epoch, self.state.step = self.state.epoch + 1, 0
            self.save()

    def save(self) -> None:
        """A checkpoint, if there is a folder for it."""
        if self.args.output_dir and self.place.first:
            self.state.save(self.args.output_dir, self.args)

    def keep_loss(self, loss: torch.Tensor) -> None:
        """Append to the file of ``--losses``: the step since the beginning of training, and the loss to the bit."""
        if self.args.losses and self.place.first:
            number = self.state.epoch * self.data.steps.per_epoch + self.state.step
            with open(self.args.losses, "a") as file:
                file.write(f"{number} {loss.item()!r}\n")

    def plot(self, scalars: dict[str, float]) -> None:
        """Write to TensorBoard, if it is wanted."""
        if self.board is not None:
            for name, value in scalars.items():
                self.board.add_scalar(name, value, self.state.epoch * self.data.steps.per_epoch + self.state.step)


def main(words: list[str] | None = None) -> None:
    """Train, or evaluate."""
    args = imagenet_options.parse(words)
    torch.backends.cudnn.benchmark = not args.use_deterministic_algorithms
    torch.use_deterministic_algorithms(args.use_deterministic_algorithms)
    with placed(args.device) as place:
        run = Run(args, place)
        steps = run.data.steps
        divided = f"{steps.accumulated} x {steps.world_size} x {steps.batch_size}"
        place.say(f"{args.model}: {steps.per_epoch} steps an epoch, of {divided} images (passes x devices x batch)")
        checkpoint = Path(args.output_dir, "checkpoint.pth") if args.resume == "auto" else Path(args.resume or ".")
        if args.resume and (args.resume != "auto" or checkpoint.is_file()):
            run.state.restore(checkpoint)
            place.say(f"resumed from {checkpoint} at epoch {run.state.epoch}, step {run.state.step}")
        elif args.test_only:
            raise SystemExit(f"--test-only: there is no checkpoint {checkpoint}")
        if args.test_only:
            run.evaluate_all()
        else:
            run.train()


if __name__ == "__main__":
    main()
