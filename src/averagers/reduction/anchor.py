"""Anchors: the weights as of the last round of a level with a codec, in float32 (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from averagers.errors import StateDictError
from averagers.reduction.codecs import Codec
from averagers.reduction.interface import Tensor

if TYPE_CHECKING:
    from averagers.reduction.reducer import Reducer, Selection


@final
@dataclass
class Anchor:
    """The weights as of the last round of a level, alike on all ranks of its groups.

    Attributes:
        codec: How displacements from it travel.
        moved_at: The step of the last round that moved it; None while there is none.
        digest: Of the tensors that it is of.
        buckets: Their values, as the buckets of a round hold them; None for a bucket that goes as it is.
    """

    codec: Codec
    moved_at: int | None = None
    digest: bytes = b""
    buckets: list[Tensor | None] = field(default_factory=list)


@final
class Anchors:
    """The anchor of each level of an averager, or None where its weights go as they are.

    Args:
        codecs: Of each level.

    Attributes:
        codecs: Of each level.
    """

    def __init__(self, codecs: Sequence[Codec | None]) -> None:
        self.codecs = tuple(codecs)
        self._levels = [None if codec is None else Anchor(codec) for codec in codecs]

    def of(self, level: int, selection: Selection, reducer: Reducer) -> Anchor | None:
        """Return what a round's displacements are counted from; None where the weights go as they are."""
        anchor = self._levels[level]
        if anchor is None or anchor.moved_at is None or anchor.digest != selection.listing.digest:
            return None
        held = [None if bucket is None else bucket.numel() for bucket in anchor.buckets]
        return anchor if held == reducer.anchored_lengths(selection, anchor.codec.cut) else None

    def take(self, level: int, selection: Selection, reducer: Reducer, *, step: int, is_moved: bool) -> None:
        """After a round, count from the weights as they are: at this level, unless the round moved it, and within."""
        for index, anchor in enumerate(self._levels[: level + 1]):
            if anchor is not None:
                anchor.moved_at, anchor.digest = step, selection.listing.digest
                if index < level or not is_moved:
                    reducer.copy_in_float32(selection, anchor.buckets, anchor.codec.cut)

    def copy(self) -> Anchors:
        """Return anchors that move on their own."""
        return self.loaded(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return an entry for each anchor that there is; copies, because the next round moves an anchor in place."""
        return {
            f"anchor_{level}": {
                "moved_at": anchor.moved_at,
                "digest": anchor.digest.hex(),
                "num_buckets": len(anchor.buckets),
                "buckets": {
                    str(index): bucket.clone() for index, bucket in enumerate(anchor.buckets) if bucket is not None
                },
            }
            for level, anchor in enumerate(self._levels)
            if anchor is not None and anchor.moved_at is not None
        }

    def loaded(self, state_dict: Mapping[str, Any]) -> Anchors:
        """Return the anchors of the same levels that ``state_dict`` has copies of.

        Raises:
            StateDictError: an entry is damaged.
        """
        twin = Anchors(self.codecs)
        for level, anchor in enumerate(twin._levels):
            saved = state_dict.get(f"anchor_{level}")
            if anchor is None or saved is None:
                continue
            try:
                anchor.moved_at, anchor.digest = saved["moved_at"], bytes.fromhex(saved["digest"])
                held = {int(index): bucket.clone() for index, bucket in saved["buckets"].items()}
                anchor.buckets = [held.get(index) for index in range(saved["num_buckets"])]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise StateDictError(f"anchor_{level} in state_dict is damaged: {error!r}") from None
        return twin
