"""Anchors: the weights as of the last round of a level that counts from them, in float32 (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from averagers.errors import StateDictError
from averagers.reduction.groups import Route
from averagers.reduction.interface import Tensor
from averagers.reduction.method import Method

if TYPE_CHECKING:
    from averagers.reduction.reducer import Reducer, Selection


@final
@dataclass
class Anchor:
    """The weights as of the last round of a level, alike on all ranks of its groups.

    Attributes:
        moved_at: The step of the last round that moved it; None while there is none.
        digest: Of the tensors that it is of, without their names.
        values: Flat and in memory order, one of each tensor; None of those that go as they are.
        residuals: What this rank's codec left out so far, of each bucket, by place.
        plan: Which buckets these are.
    """

    moved_at: int | None = None
    digest: bytes = b""
    values: list[Tensor | None] = field(default_factory=list)
    residuals: list[dict[str, Tensor]] = field(default_factory=list)
    plan: str = ""


@final
class Anchors:
    """The anchor of each level of an averager, or None where its weights go as they are.

    Args:
        methods: Of each level.
    """

    def __init__(self, methods: Sequence[Method]) -> None:
        self._methods = tuple(methods)
        self._levels = [Anchor() if method.has_anchor else None for method in methods]

    def of(self, level: int, selection: Selection) -> Anchor | None:
        """Return what a round's displacements are counted from; None where the weights go as they are."""
        anchor = self._levels[level]
        if anchor is None or anchor.moved_at is None or anchor.digest != selection.listing.digest_without_names:
            return None
        held = [None if values is None else values.numel() for values in anchor.values]
        return anchor if held == selection.anchored_lengths else None

    def take(self, level: int, selection: Selection, reducer: Reducer, *, step: int, is_moved: bool) -> None:
        """After a round, count from the weights as they are: at this level, unless the round moved it, and within."""
        for index, anchor in enumerate(self._levels[: level + 1]):
            if anchor is not None:
                if anchor.digest != selection.listing.digest_without_names:
                    anchor.residuals, anchor.plan = [], ""
                anchor.moved_at, anchor.digest = step, selection.listing.digest_without_names
                if index < level or not is_moved:
                    reducer.copy_in_float32(selection, anchor.values)

    def prepare(self, selection: Selection, reducer: Reducer, routes: Sequence[Route]) -> list[Anchor | None]:
        """Return the anchor of each level, with memory for what it will hold where there is none yet."""
        for anchor, method, route in zip(self._levels, self._methods, routes, strict=True):
            if anchor is None:
                continue
            if anchor.digest != selection.listing.digest_without_names:
                anchor.moved_at, anchor.digest, anchor.plan = None, selection.listing.digest_without_names, ""
                reducer.copy_in_float32(selection, anchor.values)
            if method.codec is not None:
                reducer.prepare_residuals(anchor, selection, route, method.codec)
        return self._levels

    def copy(self) -> Anchors:
        """Return anchors that move on their own."""
        return self.loaded(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return an entry for each anchor that there is; copies, because the next round moves an anchor in place."""
        return {
            f"anchor_{level}": {
                "moved_at": anchor.moved_at,
                "digest": anchor.digest.hex(),
                "num_tensors": len(anchor.values),
                "values": {str(index): one.clone() for index, one in enumerate(anchor.values) if one is not None},
                "residuals": [_clones(residuals) for residuals in anchor.residuals],
                "plan": anchor.plan,
            }
            for level, anchor in enumerate(self._levels)
            if anchor is not None and anchor.moved_at is not None
        }

    def loaded(self, state_dict: Mapping[str, Any]) -> Anchors:
        """Return the anchors of the same levels that ``state_dict`` has copies of.

        Raises:
            StateDictError: an entry is damaged.
        """
        twin = Anchors(self._methods)
        for level, anchor in enumerate(twin._levels):
            saved = state_dict.get(f"anchor_{level}")
            if anchor is None or saved is None:
                continue
            try:
                anchor.moved_at, anchor.digest = saved["moved_at"], bytes.fromhex(saved["digest"])
                values = {int(index): one.clone() for index, one in saved["values"].items()}
                anchor.values = [values.get(index) for index in range(saved["num_tensors"])]
                anchor.residuals = [_clones(residuals) for residuals in saved["residuals"]]
                anchor.plan = saved["plan"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise StateDictError(f"anchor_{level} in state_dict is damaged: {error!r}") from None
        return twin


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
