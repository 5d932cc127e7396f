"""An anchor: the weights as of the last round of a level that counts from them (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from averagers.reduction.interface import Tensor


@final
@dataclass
class Anchor:
    """The weights as of the last round of a level, alike on all ranks of its groups.

    Attributes:
        offload: The type of device where it is kept; None for where the tensors are.
        moved_at: The step of the last round that moved it; None while there is none.
        digest: Of the tensors that it is of, without their names.
        values: Flat and in memory order, one of each tensor; None of those that go as they are.
        residuals: What this rank's codec left out so far, of each bucket, by place.
        plan: Which buckets these are.
    """

    offload: str | None = None
    moved_at: int | None = None
    digest: bytes = b""
    values: list[Tensor | None] = field(default_factory=list)
    residuals: list[dict[str, Tensor]] = field(default_factory=list)
    plan: str = ""

    def home(self, device: Any) -> Any:
        """Return where it keeps what belongs to a tensor on ``device``."""
        return device if self.offload is None else self.offload


def flat_copy(tensor: Tensor) -> Tensor:
    """Return a copy of what must be flat and floating."""
    if tensor.dim() != 1 or not tensor.is_floating_point():
        raise ValueError(f"a tensor must be flat and floating, got one of shape {tuple(tensor.shape)}, {tensor.dtype}")
    return tensor.clone()
