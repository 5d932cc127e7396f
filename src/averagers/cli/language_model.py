"""The demo's task: a small byte-level transformer on the text of Python's own help topics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256


def help_text() -> bytes:
    """Return the text of ``pydoc_data.topics``, about 460 kB of English that every Python carries."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def split(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """Return the first nine tenths of ``text`` for training, and the rest for validation.

    Args:
        text: The whole text.
        context: Bytes that the model reads at once.

    Returns:
        The bytes to train on, and windows of ``context + 1`` bytes to validate on, one a row; the last
        byte of each is the first of the next.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    training, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    return training, validation.unfold(0, context + 1, context)


def batches(training: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random windows for ever: the bytes, and the byte that follows each."""
    generator = torch.Generator().manual_seed(seed)
    windows = training.unfold(0, context + 1, 1)
    while True:
        chosen = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the model's guesses, in nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@final
class ByteTransformer(nn.Module):
    """A decoder-only transformer over bytes: rotary positions, normalized queries and keys, tied embedding.

    Args:
        width: Features of a byte's representation.
        num_layers: How many blocks.
        num_heads: Heads of each attention.
        context: Most bytes that it reads at once.
    """

    def __init__(self, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(_Block(width, num_layers, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        angles = torch.outer(torch.arange(context), 1e3 ** -torch.linspace(0, 1, width // num_heads // 2))
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the byte that follows each byte: (batch, context) to (batch, context, 256)."""
        hidden = self.embedding(inputs)
        rotation = self.get_buffer("rotation")[:, : inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, rotation)
        return F.linear(self.norm(hidden), self.embedding.weight)


@final
class _Block(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.to_query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.from_heads = nn.Linear(width, width, bias=False)
        self.feedforward_norm = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        into_residual = 1 / math.sqrt(2 * num_layers * width)
        for layer in (self.from_heads, self.narrow):
            nn.init.normal_(layer.weight, std=into_residual)
        for layer in (self.to_query_key_value, self.widen):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        features = hidden.shape[2] // self.num_heads
        projected = self.to_query_key_value(self.attention_norm(hidden)).unflatten(2, (3, self.num_heads, features))
        projected = projected.permute(2, 0, 3, 1, 4)
        # Queries and keys at once: on a CPU the number of small operations is what costs.
        query, key = _rotate(F.layer_norm(projected[:2], (features,)), rotation)
        # Normalized vectors have length sqrt(features): 2.25 times the usual scale, which suits random ones.
        scale = 2.25 / math.sqrt(features)
        heads = F.scaled_dot_product_attention(query, key, projected[2], is_causal=True, scale=scale)
        hidden = hidden + self.from_heads(heads.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.narrow(F.relu(self.widen(self.feedforward_norm(hidden))))
        return output


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
