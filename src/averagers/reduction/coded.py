"""How one bucket of displacements crosses the group coded: the collectives, and the arithmetic between them (pure)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from averagers.reduction.codecs import Codec, TopK
from averagers.reduction.interface import Lane, Tensor, TensorOperations, Work
from averagers.reduction.loads import Buffers, Load
from averagers.reduction.rules import Rule
from averagers.reduction.transfers import Shares, Transfer, sum_


@final
@dataclass(frozen=True)
class Encoder:
    """Writes one bucket's values in a codec, and keeps what was left out for the next round.

    Attributes:
        codec: How values are written.
        residuals: What was left out, by its place, see `residual_sizes`, perhaps on another device; empty without error
            feedback.
    """

    codec: Codec
    residuals: Mapping[str, Tensor]

    def encode(
        self, place: str, values: Tensor, wire: Tensor, operations: TensorOperations, *, uncoded: int | None = None
    ) -> None:
        """Write rows of ``values`` into the rows of ``wire``; adds the residual of ``place`` to ``values`` first.

        Args:
            place: Where in the exchange.
            values: Rows of float32.
            wire: Rows of bytes.
            operations: Of the framework.
            uncoded: The row that nobody decodes, so that nothing is left out of it; None where there is none.
        """
        decay = self.codec.error_feedback
        if decay is None:
            self.codec.encode(values, wire, operations)
            return
        kept = self.residuals[place].view(values.shape)
        residual = kept.to(values.device)
        values.add_(residual, alpha=decay)
        self.codec.encode(values, wire, operations)
        self.codec.decode(wire, residual, operations)
        # What is no number cannot be made up for later, and would stay for ever.
        residual.neg_().add_(values).nan_to_num_(0.0, 0.0, 0.0)
        if uncoded is not None:
            residual[uncoded].zero_()
        if kept.device != residual.device:
            kept.copy_(residual)


def residual_sizes(codec: Codec, num_elements: int, leg_sizes: Sequence[int]) -> dict[str, int]:
    """Return how many values are kept at each place where a bucket's displacements are coded."""
    if codec.error_feedback is None:
        return {}
    *within, across = leg_sizes
    ranks_of_node = within[0] if within else 1
    if isinstance(codec, TopK):
        return {"sent": _coded_part(codec, num_elements, ranks_of_node)[0]}
    size, _ = _coded_part(codec, num_elements, across * ranks_of_node)
    return {"sent": across * size, "common": size}


@final
class CodedExchange(Transfer):
    """Displacements, summed within the node as they are, and coded where they cross the slow link.

    Every rank computes one part of the bucket: of what the others sent of it, decoded, and its own, which was never
    coded. The result is coded once more for all; every rank decodes the same bytes, so that all end alike.

    Args:
        encoder: How displacements are written.
        shares: How much each rank counts.
        rule: What takes the place of the mean; only without nodes.
        num_legs: Of the route.
    """

    def __init__(self, encoder: Encoder, shares: Shares, rule: Rule | None, num_legs: int) -> None:
        self.lags = (2, 2) if num_legs == 1 else (1, 2, 2, 1)
        self._encoder = encoder
        self._shares = shares
        self._rule = rule

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all and an all-gather of codes, between those within the node where there are nodes."""
        *within, across = lanes
        encoder, codec, operations = self._encoder, self._encoder.codec, load.operations
        num_nodes, ranks_of_node = across.size, within[0].size if within else 1
        size, num_bytes = _coded_part(codec, load.num_elements, num_nodes * ranks_of_node)

        def take(role: str, count: int, dtype: Any) -> Tensor:
            return buffers.take(role, count, load.device, dtype)

        values = take("values", ranks_of_node * num_nodes * size, operations.float32)
        load.pack(values)
        values[load.num_elements :].zero_()
        if self._rule is None:
            self._shares.scale_(values)
        own = values
        if within:
            received = take("received", values.numel(), operations.float32)
            yield within[0].all_to_all(received, values)
            own = take("own", num_nodes * size, operations.float32)
            sum_(own, received.split(num_nodes * size))
        own = own.view(num_nodes, size)
        sent, arrived = (take(role, num_nodes * num_bytes, operations.uint8) for role in ("sent", "arrived"))
        encoder.encode("sent", own, sent.view(num_nodes, num_bytes), operations, uncoded=across.rank)
        yield across.all_to_all(arrived, sent)
        decoded = take("decoded", num_nodes * size, operations.float32).view(num_nodes, size)
        codec.decode(arrived.view(num_nodes, num_bytes), decoded, operations)
        decoded[across.rank].copy_(own[across.rank])
        common = take("common", size, operations.float32)
        if self._rule is None:
            sum_(common, list(decoded))
        else:
            counts = [row for row, share in zip(decoded, self._shares.of_first_leg, strict=True) if share]
            common.copy_(self._rule.reduce_(operations.concatenated(counts).view(len(counts), size)))
        coded = take("coded", num_bytes, operations.uint8)
        encoder.encode("common", common.view(1, size), coded.view(1, num_bytes), operations)
        yield across.all_gather(arrived, coded)
        codes = arrived
        if within:
            codes = take("codes", ranks_of_node * num_nodes * num_bytes, operations.uint8)
            yield within[0].all_gather(codes, arrived)
        codec.decode(codes.view(-1, num_bytes), values.view(-1, size), operations)
        load.unpack(values)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return what this rank sends: codes to the others of its leg twice, and within the node values, then codes."""
        *within, across = sizes
        ranks_of_node = within[0] if within else 1
        size, num_bytes = _coded_part(self._encoder.codec, load.num_elements, across * ranks_of_node)
        inside = (ranks_of_node - 1) * across * (4 * size + num_bytes)
        return inside + 2 * (across - 1) * num_bytes


@final
class SparseGather(Transfer):
    """Displacements, summed within the node as they are, of which each rank sends its choice to all the others.

    Choices of different places do not add up to one of the same size, so that there is nothing to reduce on the way:
    every rank adds up all of them, in the same order.

    Args:
        encoder: How a choice is written.
        shares: How much each rank counts.
        num_legs: Of the route.
    """

    def __init__(self, encoder: Encoder, shares: Shares, num_legs: int) -> None:
        self.lags = (2,) if num_legs == 1 else (1, 2, 1)
        self._encoder = encoder
        self._shares = shares

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-gather of choices, between an all-to-all and an all-gather within the node, where there are."""
        *within, across = lanes
        codec, operations = self._encoder.codec, load.operations
        assert isinstance(codec, TopK)
        ranks_of_node = within[0].size if within else 1
        size, num_bytes = _coded_part(codec, load.num_elements, ranks_of_node)

        def take(role: str, count: int, dtype: Any) -> Tensor:
            return buffers.take(role, count, load.device, dtype)

        values = take("values", ranks_of_node * size, operations.float32)
        load.pack(values)
        values[load.num_elements :].zero_()
        self._shares.scale_(values)
        own = values
        if within:
            received = take("received", values.numel(), operations.float32)
            yield within[0].all_to_all(received, values)
            own = take("own", size, operations.float32)
            sum_(own, received.split(size))
        sent = take("sent", num_bytes, operations.uint8)
        self._encoder.encode("sent", own.view(1, size), sent.view(1, num_bytes), operations)
        codes = arrived = take("arrived", across.size * num_bytes, operations.uint8)
        yield across.all_gather(arrived, sent)
        if within:
            codes = take("codes", ranks_of_node * arrived.numel(), operations.uint8)
            yield within[0].all_gather(codes, arrived)
        choices = codes.view(ranks_of_node, across.size, num_bytes)
        total = values.zero_().view(ranks_of_node, size)
        for node in range(across.size):
            codec.add(choices[:, node], total, operations)
        load.unpack(values)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return what this rank sends: its choice to its leg, and within the node values, then choices."""
        *within, across = sizes
        ranks_of_node = within[0] if within else 1
        size, num_bytes = _coded_part(self._encoder.codec, load.num_elements, ranks_of_node)
        return (ranks_of_node - 1) * (4 * size + across * num_bytes) + (across - 1) * num_bytes


def _coded_part(codec: Codec, num_elements: int, num_parts: int) -> tuple[int, int]:
    """Return how many values a part of the bucket has, and how many bytes its code."""
    size = -(-num_elements // (num_parts * codec.granularity)) * codec.granularity
    return size, codec.wire_bytes(size)
