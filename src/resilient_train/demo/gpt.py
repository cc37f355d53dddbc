"""A small GPT of about a million parameters; its dropout makes training depend on every random number."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        after: Tensor = x + self.dropout(self.feed(self.norm_feed(x)))
        return after


class GPT(nn.Module):
    """Maps (batch, length) tokens to (batch, length, vocabulary) scores of the next token."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 128,
        depth: int = 5,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
