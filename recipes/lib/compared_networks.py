"""The networks that recipes/compare.py trains, each at two sizes, and where each one is checkpointed by hand.

``small`` keeps a network's depth, with fewer and smaller inputs, and is narrower where weights would outweigh
activations: a step takes about a tenth of a second on two cores. ``paper`` has the batches of MONeT's paper for its
five networks, and GPU-sized ones for the others.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.convnext import CNBlock, CNBlockConfig
from torchvision.models.densenet import _DenseLayer
from torchvision.models.efficientnet import MBConv
from torchvision.models.googlenet import Inception
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import Bottleneck
from torchvision.models.swin_transformer import SwinTransformerBlock
from torchvision.models.vision_transformer import EncoderBlock

from lib import networks
from lib.paper_networks import Double, Layer, Transformer, UNet

tv = torchvision.models
SMALL, PAPER = "small", "paper"
SIZES = (SMALL, PAPER)
CLASSES = 10
Loss = Callable[[], torch.Tensor]
Built = tuple[nn.Module, Loss]


@dataclass(frozen=True, slots=True)
class Network:
    """A network to compare.

    Attributes:
        title: for tables and the figure.
        build: model and loss, given the size and the device.
        blocks: the modules that ``torch.utils.checkpoint`` is usually put around.
        chain: modules each of which reads only the result of the one before it, so that consecutive ones can be one
            segment; empty where the network is no chain.
        needs: a package that must be installed; empty: none.
    """

    title: str
    build: Callable[[str, torch.device], Built]
    blocks: Callable[[nn.Module], Iterable[nn.Module]]
    chain: Callable[[nn.Module], Iterable[nn.Module]]
    needs: str = ""

    @property
    def missing(self) -> str:
        """Why it cannot be built here; empty if it can."""
        return f"needs {self.needs}" if self.needs and importlib.util.find_spec(self.needs) is None else ""


NETWORKS: dict[str, Network] = {}


# ---- images


def images(batch: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and a class for each."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, size, size, generator=drawn)
    return x.to(device), torch.randint(0, CLASSES, (batch,), generator=drawn).to(device)


def _classifier(
    small: Callable[[], nn.Module], paper: Callable[[], nn.Module], sizes: dict[str, tuple[int, int]]
) -> Callable[[str, torch.device], Built]:
    """Of a classifier with ``sizes`` (batch; height and width of an image)."""

    def build(size: str, device: torch.device) -> Built:
        model = (small if size == SMALL else paper)().to(device)
        x, y = images(*sizes[size], device)
        return model, lambda: F.cross_entropy(model(x), y)

    return build


def _of(*kinds: type[nn.Module]) -> Callable[[nn.Module], list[nn.Module]]:
    """All modules of these classes, in order."""
    return lambda model: [m for m in model.modules() if isinstance(m, kinds)]


def _flat(stages: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in the stages that are plain ``Sequential``s, and the others as they are."""
    return list(chain.from_iterable(list(s) if type(s) is nn.Sequential else [s] for s in stages))


def _features(model: nn.Module) -> Iterable[nn.Module]:
    return model.features.children()


def _nothing(model: nn.Module) -> list[nn.Module]:
    return []


def _add(
    name: str,
    title: str,
    sizes: dict[str, tuple[int, int]],
    make: Callable[[], nn.Module],
    blocks: Callable[[nn.Module], Iterable[nn.Module]],
    in_chain: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
    small: Callable[[], nn.Module] | None = None,
) -> None:
    NETWORKS[name] = Network(title, _classifier(small or make, make, sizes), blocks, in_chain or blocks)


class SegmentedVgg(nn.Module):
    """VGG-16 with its layers between two poolings as blocks; ``hidden`` channels in the classifier."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        network = tv.vgg16(init_weights=False)
        self.blocks = nn.ModuleList()
        layers: list[nn.Module] = []
        for layer in network.features:
            layers.append(layer)
            if isinstance(layer, nn.MaxPool2d):
                self.blocks.append(nn.Sequential(*layers))
                layers = []
        self.avgpool = network.avgpool
        widths = (25088, hidden, hidden)
        inner = (nn.Sequential(nn.Linear(a, hidden), nn.ReLU(True), nn.Dropout()) for a in widths[:2])
        self.classifier = nn.Sequential(*inner, nn.Linear(hidden, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to logits."""
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.avgpool(x).flatten(1))


def _googlenet() -> nn.Module:
    return tv.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False)


def _inceptions(model: nn.Module) -> list[nn.Module]:
    """From the first inception module to the last, with the poolings between them."""
    names = ("3a", "3b", None, "4a", "4b", "4c", "4d", "4e", None, "5a", "5b")
    pools = iter((model.maxpool3, model.maxpool4))
    return [next(pools) if n is None else getattr(model, f"inception{n}") for n in names]


_add(
    "resnet50",
    "ResNet-50",
    {SMALL: (16, 64), PAPER: (184, 224)},
    lambda: tv.resnet50(num_classes=CLASSES),
    _of(Bottleneck),
)
_add("googlenet", "GoogLeNet", {SMALL: (16, 64), PAPER: (320, 224)}, _googlenet, _of(Inception), _inceptions)
_add(
    "mobilenet_v2",
    "MobileNetV2",
    {SMALL: (8, 96), PAPER: (272, 224)},
    lambda: tv.mobilenet_v2(num_classes=CLASSES),
    _of(InvertedResidual),
    _features,
)
_add(
    "vgg16",
    "VGG-16",
    {SMALL: (8, 96), PAPER: (176, 224)},
    lambda: SegmentedVgg(4096),
    lambda model: model.blocks,
    small=lambda: SegmentedVgg(64),
)
_add(
    "densenet121",
    "DenseNet-121",
    {SMALL: (8, 80), PAPER: (160, 224)},
    lambda: tv.densenet121(num_classes=CLASSES),
    _of(_DenseLayer),
    lambda model: list(model.features.children())[4:-1],
)
_add(
    "efficientnet_b0",
    "EfficientNet-B0",
    {SMALL: (8, 96), PAPER: (192, 224)},
    lambda: tv.efficientnet_b0(num_classes=CLASSES),
    _of(MBConv),
    lambda model: _flat(_features(model))[3:-3],  # without the layers of the first and the last stage
)
_add(
    "vit",
    "ViT-B/16",
    {SMALL: (8, 64), PAPER: (128, 224)},
    lambda: tv.vit_b_16(num_classes=CLASSES, dropout=0.1),
    _of(EncoderBlock),
    small=lambda: tv.VisionTransformer(64, 8, 12, 4, 192, 768, 0.1, num_classes=CLASSES),
)
_add(
    "swin_t",
    "Swin-T",
    {SMALL: (8, 64), PAPER: (128, 224)},
    lambda: tv.swin_t(num_classes=CLASSES),
    _of(SwinTransformerBlock),
    lambda model: _flat(list(_features(model))[1:]),
    small=lambda: tv.SwinTransformer(
        [2, 2], 48, [2, 2, 6, 2], [2, 4, 8, 16], [4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES
    ),
)


def _convnext(widths: tuple[int, ...]) -> nn.Module:
    stages = [CNBlockConfig(a, b, n) for a, b, n in zip(widths, (*widths[1:], None), (3, 3, 9, 3), strict=True)]
    return tv.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=CLASSES)


_add(
    "convnext_t",
    "ConvNeXt-T",
    {SMALL: (8, 64), PAPER: (128, 224)},
    lambda: _convnext((96, 192, 384, 768)),
    _of(CNBlock),
    lambda model: list(chain.from_iterable(list(_features(model))[1:])),
    small=lambda: _convnext((32, 64, 128, 256)),
)


def _unet(size: str, device: torch.device) -> Built:
    model = (UNet(channels=8) if size == SMALL else UNet()).to(device)
    batch, shape = (4, (96, 128)) if size == SMALL else (11, (416, 608))
    x = torch.randn(batch, 3, *shape, generator=torch.Generator().manual_seed(1)).to(device)
    y = (x[:, :1] > 0).float()
    return model, lambda: F.binary_cross_entropy_with_logits(model(x), y)


NETWORKS["unet"] = Network("U-Net", _unet, _of(Double), _nothing)  # skips around everything


# ---- texts


def _tokens(vocabulary: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def _gpt(size: str, device: torch.device) -> Built:
    vocabulary, length, width, layers, heads, batch = (
        (256, 128, 128, 8, 4, 8) if size == SMALL else (16384, 1024, 768, 12, 12, 16)
    )
    model = Transformer(vocabulary, length, width, layers, heads, causal=True).to(device)
    tokens = _tokens(vocabulary, batch, length + 1, device)
    given, following = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model, lambda: F.cross_entropy(model(given).flatten(0, 1), following.flatten())


def _bert(size: str, device: torch.device) -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    vocabulary, width, layers, batch, length = (1024, 128, 8, 8, 128) if size == SMALL else (30522, 768, 12, 64, 512)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
        num_labels=CLASSES,
    )
    model = BertForSequenceClassification(config).to(device)
    tokens = _tokens(vocabulary, batch, length, device)
    labels = torch.arange(batch, device=device) % CLASSES
    return model, lambda: model(input_ids=tokens, labels=labels).loss


def _bert_layers(model: nn.Module) -> list[nn.Module]:
    return list(model.bert.encoder.layer)


NETWORKS["gpt"] = Network("GPT", _gpt, _of(Layer), _of(Layer))
NETWORKS["bert"] = Network("BERT (transformers)", _bert, _bert_layers, _bert_layers, "transformers")
DEFAULT = tuple(NETWORKS)
_add(
    "tiny",
    "A tiny ResNet",
    {SMALL: (4, 32), PAPER: (4, 32)},
    lambda: networks.SmallResNet(channels=8, blocks=4),
    _of(networks.Block),
)  # to see whether everything works


# ---- torch.utils.checkpoint


def checkpoint_blocks(model: nn.Module, network: Network) -> int:
    """Put ``torch.utils.checkpoint`` around each block of the model; gives their number."""
    blocks = list(network.blocks(model))
    for block in blocks:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    return len(blocks)


def checkpoint_segments(model: nn.Module, network: Network) -> int:
    """Put it around sqrt(n) segments of about as many consecutive modules each; gives their number.

    The first module of a segment runs all of it, and the others give back what they get.
    """
    modules = list(network.chain(model))
    count = round(math.sqrt(len(modules)))
    borders = [round(i * len(modules) / count) for i in range(count + 1)] if modules else [0]
    for begin, end in pairwise(borders):
        forwards = [m.forward for m in modules[begin:end]]
        modules[begin].forward = _checkpointed(_one_after_the_other(forwards))  # type: ignore[method-assign]
        for module in modules[begin + 1 : end]:
            module.forward = lambda x, *args, **kwargs: x  # type: ignore[method-assign]
    return len(borders) - 1


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(a) if isinstance(a, list) else a for a in args)  # DenseNet appends to its list later
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _one_after_the_other(forwards: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            x = forward(x, *args, **kwargs)
        return x

    return run
