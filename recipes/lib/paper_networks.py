"""Networks of published papers that torchvision does not have: a U-Net, and the transformers GPT and BERT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Double(nn.Sequential):
    """Twice: convolution, batch normalization, ReLU."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(inside, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Ronneberger et al. (arXiv 1505.04597), padded, normalized, upsampled bilinearly; five levels from 64 channels.

    ``channels`` is another number than 64: the other levels follow it.

    The usual PyTorch version, as in MONeT's paper: with transposed convolutions and 1024 channels at the bottom, which
    bilinear upsampling does not need, its plain step takes more than the paper's 14.32 GB.
    """

    def __init__(self, classes: int = 1, channels: int = 64) -> None:
        super().__init__()
        widths = [channels * n for n in (1, 2, 4, 8, 8)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        joined = [(16, 4), (8, 2), (4, 1), (2, 1)]  # skipped and upsampled channels together, times ``channels``
        self.join = nn.ModuleList(Double(channels * inside, channels * out) for inside, out in joined)
        self.last = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each pixel."""
        skips = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for join in self.join:
            x = join(torch.cat([skips.pop(), self.up(x)], 1))
        return self.last(x)


class Attention(nn.Module):
    """Self-attention, fused or written out as in the first implementations."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.heads, self.dropout, self.causal, self.fused = heads, dropout, causal, fused

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention over the positions of ``x``; ``mask`` is added to the scores."""
        batch, length, width = x.shape
        q, k, v = (
            f(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
            )
        else:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            scores = scores if mask is None else scores + mask
            y = F.dropout(F.softmax(scores, -1), self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Norm(nn.LayerNorm):
    """Layer normalization, fused or written out."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__(width)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each position's features."""
        if self.fused:
            return super().forward(x)
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.bias


class Layer(nn.Module):
    """A transformer's layer; each norm comes before the layers of its residual branch (GPT) or after the sum (BERT)."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, causal, fused)
        self.norm1, self.norm2 = Norm(width, fused), Norm(width, fused)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.first = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention, then the two linear layers, each added to its input."""
        if self.first:
            x = x + self.drop(self.attention(self.norm1(x), mask))
            return x + self.drop(self.outer(F.gelu(self.inner(self.norm2(x)))))
        x = self.norm1(x + self.drop(self.attention(x, mask)))
        return self.norm2(x + self.drop(self.outer(F.gelu(self.inner(x)))))


class Transformer(nn.Module):
    """Tied embeddings, dropout, and a head over the vocabulary: a GPT (causal), or a BERT with its mask."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, causal: bool, fused: bool = True
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop, self.norm = nn.Dropout(0.1), Norm(width, fused)
        self.layers = nn.ModuleList(Layer(width, heads, 0.1, causal, fused) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.causal = causal

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the vocabulary at each position."""
        x = self.drop(self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        x = x if self.causal else self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x) if self.causal else x)
