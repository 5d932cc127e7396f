"""The anchors of an averager's levels, and what moves them (pure)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, final

from averagers.arguments import check_whole_number
from averagers.errors import InvalidValueError, StateDictError
from averagers.mixing.fragments import WHOLE, Fragments
from averagers.mixing.mixers import Assign, Elastic, Mixer, Mixing
from averagers.mixing.overlap import Delayed, Overlap
from averagers.reduction.anchor import Anchor, flat_copy
from averagers.reduction.groups import Route
from averagers.reduction.interface import Tensor
from averagers.reduction.method import Method
from averagers.reduction.reducer import Reducer
from averagers.reduction.selection import Selection


@final
@dataclass(frozen=True)
class Parts:
    """What one level does, as the user chose it.

    Attributes:
        method: How the mean is computed.
        mixer: What it does to the weights; None to take their place.
        overlap: When it lands; None for at once.
        fragments: Which parts of the model are averaged each on its own.
        offload: The type of device where anchors are kept, and what belongs to them; None for where the tensors are.

    Raises:
        InvalidValueError: they cannot work together.
    """

    method: Method
    mixer: Mixer | None = None
    overlap: Overlap | None = None
    fragments: Fragments = WHOLE
    offload: str | None = None

    def __post_init__(self) -> None:
        if self.offload not in (None, "cpu"):
            raise InvalidValueError(f"offload must be 'cpu' or None, got {self.offload!r}")
        if self.delayed is not None and isinstance(self.mixer, Elastic):
            raise InvalidValueError(
                f"overlap={self.overlap!r} cannot work with mixer={self.mixer!r}: the center would be pulled by "
                "replicas that have moved on; take no mixer, or no overlap"
            )

    @property
    def delayed(self) -> Delayed | None:
        """How rounds land later; None where they land at once, in the place of the weights."""
        overlap = self.overlap
        is_later = isinstance(overlap, Delayed) and (overlap.steps > 0 or overlap.keep > 0 or overlap.carry)
        return overlap if is_later else None  # type: ignore[return-value]

    @property
    def has_anchor(self) -> bool:
        """Whether values are counted from those of the last round."""
        return self.mixer is not None or self.method.has_anchor

    @property
    def has_residuals(self) -> bool:
        """Whether the codec keeps what it leaves out."""
        return self.method.codec is not None and self.method.codec.error_feedback is not None

    @property
    def with_float64(self) -> bool:
        """Whether float64 has an anchor too; a codec alone lets it go as it is."""
        return self.mixer is not None or (self.method.rule is not None and self.method.rule.needs_anchor)

    def check_group_size(self, size: int) -> None:
        """Raise unless it works in groups of ``size`` ranks."""
        self.method.check_group_size(size)
        if self.mixer is not None:
            self.mixer.check_group_size(size)

    def check_selection(self, selection: Selection) -> None:
        """Raise unless the tensors can be averaged so.

        Raises:
            InvalidValueError: a parameter came in no group with a learning rate, where that is needed; or buffers go
                along, and could not land later.
        """
        if any(kind.is_aside for kind in selection.layout.kinds):
            self.check_asides()
        if self.mixer is None or not self.mixer.needs_lr:
            return
        for lr in self.lrs(selection):
            if lr is None:
                raise InvalidValueError(
                    f"params must be optimizer.param_groups with mixer={self.mixer!r}, which reads the learning rate: "
                    "or use averagers.attach(optimizer, averager)"
                )
            if not 0 <= lr < inf:
                raise InvalidValueError(
                    f"lr of the parameter groups in params must be at least 0 and finite with mixer={self.mixer!r}, "
                    f"which divides by it, got {lr}"
                )

    def check_asides(self) -> None:
        """Raise unless buffers and optimizer state can go along with the parameters."""
        if self.delayed is not None:
            raise InvalidValueError(
                f"overlap={self.overlap!r} cannot take buffers or optimizer state along: they would be "
                "those of a later step; use attach without module= and optimizer_state="
            )
        if self.fragments.count > 1:
            raise InvalidValueError(
                f"fragments={self.fragments.count} cannot take buffers or optimizer state along: they go all "
                "at once; use attach without module= and optimizer_state="
            )

    def lrs(self, selection: Selection) -> list[float | None]:
        """Return the learning rate of each tensor that has an anchor."""
        lengths = selection.anchored_lengths(with_float64=self.with_float64)
        return [lr for lr, length in zip(selection.lrs, lengths, strict=True) if length is not None]


@final
class Anchors:
    """The anchors of an averager, or None where weights go as they are: of each level, fragment by fragment.

    Args:
        parts: Of the level of each.
    """

    def __init__(self, parts: Sequence[Parts]) -> None:
        self._parts = tuple(parts)
        self._levels = [Anchor(one.offload) if one.has_anchor else None for one in parts]
        self._mixings: list[Mixing | None] = [None] * len(parts)
        # Loaded before there is an anchor's memory to mix.
        self._mixer_states: list[Mapping[str, Any] | None] = [None] * len(parts)
        # The tensors that the anchors are of.
        self._known: list[weakref.ref[Any]] = []

    def check_order(self, selection: Selection) -> None:
        """Raise if the tensors are those that the anchors are of, in another order.

        Raises:
            InvalidValueError: they are.
        """
        if not self._known:
            return
        known = [reference() for reference in self._known]
        positions = {id(tensor): position for position, tensor in enumerate(known) if tensor is not None}
        found = [positions.get(id(tensor)) for tensor in self._anchored(selection)]
        if None in found or len(found) != len(known) or found == list(range(len(known))):
            return
        position = next(position for position, other in enumerate(found) if position != other)
        raise InvalidValueError(
            "params must come in the same order in each round, and to DistributedState, because anchors go by "
            f"position: the tensor at position {position} had position {found[position]} before"
        )

    def of(self, level: int, selection: Selection, reducer: Reducer) -> Anchor | None:
        """Return what a round's displacements are counted from; None where the weights go as they are."""
        anchor = self._levels[level]
        if anchor is None or anchor.moved_at is None or anchor.digest != selection.listing.digest_without_names:
            return None
        held = [None if values is None else values.numel() for values in anchor.values]
        if held != selection.anchored_lengths(with_float64=self._parts[level].with_float64):
            return None
        with reducer.operations.plain_memory():  # a state that was loaded may lie on another device
            anchor.values = [
                None if one is None else one.to(anchor.home(tensor.device))
                for one, tensor in zip(anchor.values, selection.tensors, strict=True)
            ]
        return anchor

    def mix_(
        self,
        level: int,
        selection: Selection,
        reducer: Reducer,
        means: Sequence[Tensor],
        *,
        num_ranks: int,
        lrs: Sequence[float | None],
        is_last: bool,
    ) -> list[Tensor | None]:
        """Move the anchor of ``level``, and return what the weights become; None of those that were pulled to it.

        Args:
            level: Which has an anchor.
            selection: The tensors.
            reducer: Writes them.
            means: Of what was staged: displacements from the anchor where there is one, else values.
            num_ranks: How many ranks the mean is of.
            lrs: The inner learning rate of each tensor that has an anchor, where it is known.
            is_last: Replicas must end as one model.
        """
        mixing, anchor = self._mixing(level, selection, reducer), self._levels[level]
        assert anchor is not None
        if mixing.pull is not None and not is_last:
            reducer.land_(selection, anchor.values, keep=1.0 - mixing.pull)
        with reducer.operations.plain_memory():
            present = [
                None if values is None else displacement.to(values.device)
                for values, displacement in zip(anchor.values, means, strict=True)
            ]
            mixing.mix_(reducer.shaped(selection, present), num_ranks=num_ranks, lrs=[lr or 0.0 for lr in lrs])
        is_pulled = mixing.pull is not None and not is_last
        return [
            mean if values is None else None if is_pulled else values
            for values, mean in zip(anchor.values, means, strict=True)
        ]

    def settings(self, level: int, selection: Selection, reducer: Reducer) -> str:
        """Return what of the mixer at work must be equal on all ranks."""
        return self._mixing(level, selection, reducer).settings()

    def know(self, selection: Selection) -> None:
        """Remember the tensors, and their order, where anchors are of them."""
        if not any(self._levels):
            return
        anchored = self._anchored(selection)
        if [id(reference()) for reference in self._known] != [id(whole) for whole in anchored]:
            self._known = [weakref.ref(whole) for whole in anchored]

    def take(
        self,
        level: int,
        selection: Selection,
        reducer: Reducer,
        *,
        within: Sequence[int],
        step: int,
        is_moved: bool,
    ) -> None:
        """After a round, count from the weights as they are: here, unless the round moved it, and within."""
        digest = selection.listing.digest_without_names
        for index in (*within, level):
            anchor = self._levels[index]
            if anchor is None:
                continue
            if anchor.digest != digest:
                anchor.residuals, anchor.plan = [], ""
                self._mixings[index] = self._mixer_states[index] = None
            anchor.moved_at, anchor.digest = step, digest
            if index != level or not is_moved:
                self._copy(index, anchor, selection, reducer)

    def moved(self, level: int, *, step: int) -> None:
        """After a round that lands later: the anchors of levels within stay, since replicas are not one model."""
        anchor = self._levels[level]
        if anchor is not None:
            anchor.moved_at = step

    def prepare(
        self, selection: Selection, reducer: Reducer, routes: Sequence[Route]
    ) -> list[tuple[Anchor, Mixing | None] | None]:
        """Return the anchor of each level and what moves it, with memory for what they will hold where there is none.

        Raises:
            InvalidValueError: the anchors that there are are of other tensors.
        """
        self.check_order(selection)
        digest = selection.listing.digest_without_names
        if any(anchor and anchor.moved_at is not None and anchor.digest != digest for anchor in self._levels):
            raise InvalidValueError(
                "named_params must be what is averaged, in its order: where averagers.attach was used, give its handle "
                "to DistributedState in place of the averager"
            )
        self.know(selection)
        for index, (anchor, parts, route) in enumerate(zip(self._levels, self._parts, routes, strict=True)):
            if anchor is None:
                continue
            if anchor.digest != digest:
                anchor.moved_at, anchor.digest, anchor.plan = None, digest, ""
                self._mixings[index] = self._mixer_states[index] = None
                self._copy(index, anchor, selection, reducer)
            if parts.method.codec is not None:
                reducer.prepare_residuals(anchor, selection, route, parts.method.codec)
            if parts.mixer is not None:
                self._mixing(index, selection, reducer)
        return [
            None if anchor is None else (anchor, mixing)
            for anchor, mixing in zip(self._levels, self._mixings, strict=True)
        ]

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
                "mixer": mixer_state if mixing is None else mixing.state_dict(),
            }
            for level, (anchor, mixing, mixer_state) in enumerate(
                zip(self._levels, self._mixings, self._mixer_states, strict=True)
            )
            if anchor is not None and anchor.moved_at is not None
        }

    def loaded(self, state_dict: Mapping[str, Any]) -> Anchors:
        """Return the anchors of the same levels that ``state_dict`` has copies of.

        Raises:
            StateDictError: an entry is damaged.
        """
        twin = Anchors(self._parts)
        for level, anchor in enumerate(twin._levels):
            saved = state_dict.get(f"anchor_{level}")
            if anchor is None or saved is None:
                continue
            try:
                anchor.moved_at = check_whole_number("moved_at", saved["moved_at"], minimum=0)
                anchor.digest = bytes.fromhex(saved["digest"])
                values = {int(index): flat_copy(one) for index, one in saved["values"].items()}
                num_tensors = check_whole_number("num_tensors", saved["num_tensors"], minimum=len(values))
                anchor.values = [values.get(index) for index in range(num_tensors)]
                anchor.residuals = [_clones(residuals) for residuals in saved["residuals"]]
                anchor.plan = saved["plan"]
                twin._mixer_states[level] = saved["mixer"]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise StateDictError(f"anchor_{level} in state_dict is damaged: {error!r}") from None
        return twin

    def _mixing(self, level: int, selection: Selection, reducer: Reducer) -> Mixing:
        mixer, anchor = self._parts[level].mixer or Assign(), self._levels[level]
        assert anchor is not None
        mixing = self._mixings[level]
        if mixing is None:
            with reducer.operations.plain_memory():
                mixing = mixer.start(reducer.shaped(selection, anchor.values))
            saved = self._mixer_states[level]
            if saved is not None:
                mixing.load_state_dict(saved)
            self._mixings[level], self._mixer_states[level] = mixing, None
        return mixing

    def _anchored(self, selection: Selection) -> list[Any]:
        """Return the caller's tensors that may have an anchor."""
        kinds = selection.layout.kinds
        return [whole for whole, kind in zip(selection.wholes, kinds, strict=True) if not kind.is_aside]

    def _copy(self, level: int, anchor: Anchor, selection: Selection, reducer: Reducer) -> None:
        with_float64 = self._parts[level].with_float64
        if reducer.copy_anchored(selection, anchor, with_float64=with_float64):
            # What moved the memory before does not know of the new one.
            self._mixings[level] = None


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: flat_copy(tensor) for name, tensor in tensors.items()}
