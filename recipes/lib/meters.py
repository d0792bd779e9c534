"""The training log: loss and accuracy since the last line and since the epoch's beginning, speed, and memory."""

from __future__ import annotations

import datetime
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def correct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How many images have their class first, and among the first five; of a mixed image, the larger share counts."""
    classes = target.argmax(1) if target.dim() == 2 else target
    best = output.detach().topk(min(5, output.shape[1]), 1).indices == classes[:, None]
    return torch.stack([best[:, 0].sum(), best.any(1).sum()])


def max_memory_mib(device: torch.device) -> float:
    """The most that was allocated on a GPU; on a CPU, the most of the process that was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Sums:
    """Sums of loss, top-1 and top-5 on the device, so that a step does not wait for it.

    Attributes:
        all: of everything that was added.
        recent: of what was added since the last ``means``.
    """

    def __init__(self, device: torch.device) -> None:
        self.all = torch.zeros(4, device=device, dtype=torch.float64)
        self.recent = torch.zeros_like(self.all)

    def add(self, loss: torch.Tensor, output: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch, with its mean loss."""
        n = len(output)
        self.recent += torch.stack([loss.detach() * n, *correct(output, target), loss.new_full((), n)])

    def means(self) -> dict[str, tuple[float, float]]:
        """Recent and overall loss, and shares in %."""
        self.all += self.recent
        recent, overall = (s[:3] / s[3] * s.new_tensor((1, 100, 100)) for s in (self.recent, self.all))
        self.recent.zero_()
        return dict(zip(("loss", "acc1", "acc5"), zip(recent.tolist(), overall.tolist(), strict=True), strict=True))


class Progress:
    """Prints the lines of a pass over a data loader.

    Attributes:
        header: begins each line.
        step_seconds: of a step, with waiting for data.
        data_seconds: of the waiting.
    """

    def __init__(self, header: str, total: int, first: int, every: int, images: int, device: torch.device) -> None:
        self.header, self.total, self.first, self.every = header, total, first, every
        self.images, self.device = images, device
        self.done = first
        self.step_seconds = self.data_seconds = 0.0
        self.began = time.perf_counter()

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; measures the waiting for them."""
        waiting = time.perf_counter()
        for batch in batches:
            self.data_seconds += time.perf_counter() - waiting
            yield batch
            waiting = time.perf_counter()

    def step(self) -> bool:
        """Count a step; gives whether a line is due."""
        self.done += 1
        self.step_seconds = time.perf_counter() - self.began
        return (self.done - self.first) % self.every == 1 % self.every or self.done == self.total

    def line(self, lr: float, means: dict[str, tuple[float, float]]) -> str:
        """``Epoch: [0]  [ 10/100]  eta: ...  lr: ...  img/s: ...  loss: recent (mean)  ...  max mem: MiB``."""
        seconds = self.step_seconds / (self.done - self.first)
        eta = datetime.timedelta(seconds=int(seconds * (self.total - self.done)))
        parts = [
            self.header,
            f"[{self.done:>{len(str(self.total))}}/{self.total}]",
            f"eta: {eta}",
            f"lr: {lr:.6g}",
            f"img/s: {self.images / seconds:.1f}",
            *(f"{name}: {recent:.4f} ({overall:.4f})" for name, (recent, overall) in means.items()),
            f"time: {seconds:.4f}",
            f"data: {self.data_seconds / (self.done - self.first):.4f}",
            f"max mem: {max_memory_mib(self.device):.0f}",
        ]
        return "  ".join(parts)


def board(folder: str) -> Any:
    """A writer of TensorBoard's files.

    Raises:
        SystemExit: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(f"--tensorboard {folder}: {error}: pip install tensorboard") from error
    return SummaryWriter(folder)
