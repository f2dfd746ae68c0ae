"""Small transformers in the shapes that people use: GPT (norm first or last), BERT, Llama and ViT.

They differ in what a transformer can differ in: causal or not, position of the norm, LayerNorm or RMSNorm, GELU or
SwiGLU, learned or rotary positions, tied embeddings. Attention is fused (scaled_dot_product_attention, which has no
double backward on a GPU) or written out, with the same weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """What a transformer is made of."""

    causal: bool = True
    norm_first: bool = True
    llama: bool = False  # RMSNorm, SwiGLU and rotary positions
    tied: bool = False  # the embedding is the output layer too
    classes: int | None = None  # classify from the first position; None: logits of all tokens at all positions
    vocabulary: int = 40
    length: int = 16
    width: int = 64
    heads: int = 4
    layers: int = 2
    fused: bool = True


SHAPES = {
    "GPT": Shape(tied=True),
    "GPT, norm last": Shape(norm_first=False),
    "BERT": Shape(causal=False, norm_first=False, classes=3),
    "Llama": Shape(llama=True),
}


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.project, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.project(x).reshape(n, t, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)  # (N, heads, T, ·)
        if self.shape.llama:
            q, k = rotated(q), rotated(k)
        if self.shape.fused:
            causal = self.shape.causal and allowed is None
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal)
        else:
            weights = self.weights(q, k, allowed)
            mixed = weights @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, -1))

    def weights(self, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
        """The attention of each position to all others, (N, heads, T, T)."""
        score = q @ k.mT / math.sqrt(q.shape[-1])
        if self.shape.causal and allowed is None:
            allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return (score if allowed is None else score.masked_fill(~allowed, -math.inf)).softmax(-1)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (N, heads, T, d)."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class SwiGLU(nn.Module):
    """The gated layer of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a pointwise network, each with a residual connection and a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.norm_first = shape.width, shape.norm_first
        norm = nn.RMSNorm if shape.llama else nn.LayerNorm
        self.attention, self.norms = Attention(shape), nn.ModuleList([norm(width), norm(width)])
        self.pointwise = (
            SwiGLU(width)
            if shape.llama
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norms[0](x), allowed)
            return x + self.pointwise(self.norms[1](x))
        x = self.norms[0](x + self.attention(x, allowed))
        return self.norms[1](x + self.pointwise(x))


class Transformer(nn.Module):
    """Token ids (N, T) and an attention mask (N, T) → logits (N, T, vocabulary), or (N, classes)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.length, shape.width) * (0.0 if shape.llama else 0.5))
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes or shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        allowed = None
        if attention_mask is not None:
            allowed = attention_mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
            if self.shape.causal:
                allowed = allowed & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        for block in self.blocks:
            x = block(x, allowed)
        x = self.norm(x)
        return self.head(x if self.shape.classes is None else x[:, 0])


class VisionTransformer(nn.Module):
    """Images (N, 1, 8, 8) → logits (N, 3); `patches` returns 16 patches of 2 × 2 pixels, (N, 16, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(1, shape.width, 2, 2), nn.Flatten(2), Transposed())
        self.first = nn.Parameter(torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(torch.randn(17, shape.width))
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.head = nn.Linear(shape.width, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(images), -1, -1), self.patches(images)], 1) + self.positions
        for block in self.blocks:
            x = block(x, None)
        return self.head(x[:, 0])


class Transposed(nn.Module):
    """(N, E, P) → (N, P, E)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def written_out(model: Model) -> Model:
    """The same model in float64 without fused attention, which can be differentiated twice."""
    shape = next(m.shape for m in model.modules() if isinstance(m, Attention))
    make: Any = type(model)
    copy = make(replace(shape, fused=False))
    copy.load_state_dict(model.state_dict())
    return copy.double().eval()


def gated(model: Transformer, ids: Tensor, target: tuple[int, ...], baseline: Tensor | None = None):
    """F(s) of one text, written without hooks: a function of gates (T,)."""
    e = model.tokens(ids).detach()
    b = model.tokens.weight.detach().mean(0) if baseline is None else baseline

    def forward(s: Tensor) -> Tensor:
        x = (b + s[:, None] * (e - b))[None] + model.positions[: len(ids)]
        for block in model.blocks:
            x = block(x, None)
        x = model.norm(x)
        return model.head(x if model.shape.classes is None else x[:, 0])[(0, *target)]

    return forward
