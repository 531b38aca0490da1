"""The model of this repository: two blocks of attention with RMS norms of queries and keys."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, KEY_HEADS, TOKENS = 48, 6, 2, 100


class Attention(nn.Module):
    """Causal attention, three query heads to a key head."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, heads * head, bias=False) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        self.query_norm, self.key_norm = nn.RMSNorm(head, eps=1e-6), nn.RMSNorm(head, eps=1e-6)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `(batch, sequence, WIDTH)`."""
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.query, self.key, self.value))
        q = self.query_norm(q)
        k = self.key_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Logits `(batch, sequence, TOKENS)` of the tokens that follow each of `input_ids` `(batch, sequence)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.logits = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(nn.functional.layer_norm(x, (WIDTH,)))
        return self.logits(x)


def load_model() -> Model:
    """The weights that would be published; random ones here, with norm gains that training has moved away from one."""
    torch.manual_seed(0)
    model = Model().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 2)
    return model
