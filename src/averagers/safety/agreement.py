"""Agreement: before a round, all ranks of a group compare what they are about to do.

One fixed-size message tells whether they agree. Only when they do not, each sends the details, and
all raise the same error. Nothing that a peer sent is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, final

from averagers.errors import DisagreementError
from averagers.reduction.groups import Group
from averagers.reduction.selection import Listing

_ADVICE = {
    "step": "every rank must call average_parameters and finish equally often",
    "call": "every rank must call average_parameters and finish equally often",
    "averager": "call the averagers of one process group in the same order on every rank",
    "tensors": "every rank must pass the same tensors in the same order",
    "the anchor's round": "load the same checkpoint on every rank, averager included",
    "the learning rate": "every rank must have the same learning rates, in the same parameter groups",
    "weight": "give a weight on every rank, or on none; 0 for one that only receives",
    "shards": (
        "average among ranks that hold the same shards, over the mesh axes along which the model is replicated: "
        "process_group=mesh['name of the axis'], or HierarchicalModelAverager.from_mesh"
    ),
}


@final
@dataclass(frozen=True)
class Statement:
    """What one rank is about to do.

    Attributes:
        facts: Named values that must be equal on all ranks, in the order in which they are compared.
        listing: The tensors of a round; None where there are none to compare.
    """

    facts: Mapping[str, Any]
    listing: Listing | None = None

    def digest(self) -> tuple[int, int]:
        """Return two non-negative 63-bit numbers that differ where statements do."""
        state = blake2b(repr(sorted(self.facts.items())).encode(), digest_size=16)
        if self.listing is not None:
            state.update(self.listing.digest)
        digest = state.digest()
        return int.from_bytes(digest[:8], "big") >> 1, int.from_bytes(digest[8:], "big") >> 1

    def details(self) -> bytes:
        """Return the statement as JSON."""
        tensors = None if self.listing is None else self.listing.descriptions
        return json.dumps({"facts": dict(self.facts), "tensors": tensors}).encode()


class Figures(NamedTuple):
    """What a rank tells the others before a round, and may differ.

    Attributes:
        weight: How much it counts; below 0 where none was given.
        step_s: Seconds of a step since the last round.
        round_s: Seconds of the last round.
    """

    weight: float = -1.0
    step_s: float = 0.0
    round_s: float = 0.0


NO_FIGURES = Figures()


class Agreement(NamedTuple):
    """What the ranks of a group told each other beside what must be equal.

    Attributes:
        wish: The largest of the ranks.
        figures: Of the ranks, in the group's order.
    """

    wish: int
    figures: tuple[Figures, ...]

    @property
    def weights(self) -> list[float]:
        """Of the ranks, in the group's order; 1 where none was given."""
        return [1.0 if figures.weight < 0 else figures.weight for figures in self.figures]


def agree(group: Group, statement: Statement, wish: int = 0, figures: Figures = NO_FIGURES) -> Agreement:
    """Return if all ranks of ``group`` make the same statement.

    Args:
        group: Whose ranks all call this.
        statement: What must be equal.
        wish: A number that may differ.
        figures: More of them.

    Raises:
        DisagreementError: they do not; the message is the same on every rank.
    """
    if group.size == 1:
        return Agreement(wish, (figures,))
    rows = group.open_round("3q3d", *statement.digest(), wish, *figures)
    if all(row[:2] == rows[0][:2] for row in rows):
        agreement = Agreement(max(row[2] for row in rows), tuple(Figures(*row[3:]) for row in rows))
        given = [one.weight >= 0 for one in agreement.figures]
        # 0 goes with both: that rank only receives.
        if not all(given) and any(one.weight > 0 for one in agreement.figures):
            texts = ["given" if is_given else "not given" for is_given in given]
            raise DisagreementError(
                f"the ranks disagree: {_sides('weight is ', group.ranks, texts)}; {_ADVICE['weight']}"
            )
        return agreement
    statements = [json.loads(details) for details in group.gather(statement.details())]
    raise DisagreementError(explain_difference(group.ranks, statements))


def explain_difference(ranks: Sequence[int], statements: Sequence[Any]) -> str:
    """Return the first difference between the ranks' statements, and the ranks on each side."""
    for fact in dict.fromkeys(fact for statement in statements for fact in statement["facts"]):
        values = [statement["facts"].get(fact, "missing") for statement in statements]
        if any(value != values[0] for value in values):
            advice = _ADVICE.get(fact, f"give every rank the same {fact}")
            return f"the ranks disagree: {_sides(fact + ' is ', ranks, [str(value) for value in values])}; {advice}"
    shards = [[entry[5] for entry in statement["tensors"] or []] for statement in statements]
    are_sharded = len(set(map(len, shards))) == 1 and any(shard != shards[0] for shard in shards)
    advice = _ADVICE["shards" if are_sharded else "tensors"]
    return f"the ranks disagree: {_tensor_difference(ranks, statements)}; {advice}"


def _tensor_difference(ranks: Sequence[int], statements: Sequence[Any]) -> str:
    lists = [statement["tensors"] or [] for statement in statements]
    counts = [f"{len(tensors)} tensor{'s' if len(tensors) != 1 else ''}" for tensors in lists]
    prefix = "" if len(set(counts)) == 1 else _sides("there are ", ranks, counts) + "; "
    rows = [[tensors[i] if i < len(tensors) else None for tensors in lists] for i in range(max(map(len, lists)))]
    index, row = next((i, row) for i, row in enumerate(rows) if any(entry != row[0] for entry in row))
    names = {entry[0] for entry in row if entry is not None}
    name = names.pop() if len(names) == 1 else None
    shown = [_describe(entry, with_name=name is None) for entry in row]
    where = f"`{name}`" if name else f"tensor {index}"
    return f"{prefix}the first difference is {where}: {_sides('', ranks, shown)}"


def _describe(entry: Sequence[Any] | None, *, with_name: bool) -> str:
    if entry is None:
        return "missing"
    name, shape, dtype, order, device, shard = entry
    size = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    text = f"{size} {dtype}"
    if list(order) != sorted(order):
        text += f" with dimensions in memory order {tuple(order)}"
    if device != "cpu:0":
        text += f" on device {device}"
    if shard:
        text += f", shard {shard},"
    return f"`{name}` {text}" if with_name else text


def _sides(prefix: str, ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return ``prefix`` and each distinct value with its ranks, the fewest ranks first."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    sides = sorted(by_value.items(), key=lambda side: (len(side[1]), side[1]))
    return prefix + ", ".join(f"{value} on {format_ranks(members)}" for value, members in sides)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs shortened.

    Example:
        >>> from averagers.safety.agreement import format_ranks
        >>> format_ranks([3]), format_ranks([0, 1, 2, 5])
        ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts)}"
