"""The plan of a round: every element travels once, in buckets that are bounded and nearly equal."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.reduction.layout import Bucket, Kind, plan_buckets

HALF, SINGLE, DOUBLE = Kind("cpu", "half", 2), Kind("cpu", "single", 4), Kind("cpu", "double", 8)
ELSEWHERE = Kind("gpu", "single", 4)

_sizes = st.lists(st.integers(0, 70), max_size=25)
_bucket_bytes = st.integers(1, 200)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[list[int], list[Kind], int]:
    sizes = draw(_sizes)
    kinds = [draw(st.sampled_from([HALF, SINGLE, DOUBLE, ELSEWHERE])) for _ in sizes]
    return sizes, kinds, draw(_bucket_bytes)


def _plan(sizes: list[int], bucket_bytes: int, kind: Kind = SINGLE) -> tuple[Bucket, ...]:
    return plan_buckets(sizes, [kind] * len(sizes), bucket_bytes=bucket_bytes)


def _streams(sizes: list[int], kinds: list[Kind], bucket_bytes: int) -> list[list[Bucket]]:
    """Return the buckets grouped by what they were cut from: one large tensor, or a kind's small ones."""

    def source(bucket: Bucket) -> object:
        first = bucket.slots[0].tensor
        is_large = 2 * sizes[first] * kinds[first].itemsize >= bucket_bytes
        return first if is_large else bucket.kind

    buckets = plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes)
    return [list(group) for _, group in groupby(buckets, key=source)]


@given(_requests())
def test_every_element_is_in_exactly_one_slot(request_: tuple[list[int], list[Kind], int]) -> None:
    sizes, kinds, bucket_bytes = request_
    travels = [
        (slot.tensor, element)
        for bucket in plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes)
        for slot in bucket.slots
        for element in range(slot.start, slot.stop)
    ]
    assert sorted(travels) == [(tensor, element) for tensor, size in enumerate(sizes) for element in range(size)]


@given(_requests())
def test_slots_fill_their_bucket_without_gap_or_overlap(request_: tuple[list[int], list[Kind], int]) -> None:
    sizes, kinds, bucket_bytes = request_
    for bucket in plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes):
        filled = 0
        for slot in bucket.slots:
            assert slot.offset == filled
            assert slot.start < slot.stop
            filled += slot.stop - slot.start
        assert filled == bucket.num_elements


@given(_requests())
def test_no_bucket_is_larger_than_allowed_and_none_is_empty(
    request_: tuple[list[int], list[Kind], int],
) -> None:
    sizes, kinds, bucket_bytes = request_
    for bucket in plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes):
        assert 1 <= bucket.num_elements <= max(1, bucket_bytes // bucket.kind.itemsize)


@given(_requests())
def test_a_bucket_holds_one_kind(request_: tuple[list[int], list[Kind], int]) -> None:
    sizes, kinds, bucket_bytes = request_
    for bucket in plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes):
        assert {kinds[slot.tensor] for slot in bucket.slots} == {bucket.kind}


@given(_requests())
def test_a_tensor_of_half_a_buckets_size_and_more_shares_no_bucket(
    request_: tuple[list[int], list[Kind], int],
) -> None:
    sizes, kinds, bucket_bytes = request_
    for bucket in plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes):
        large = [slot for slot in bucket.slots if 2 * sizes[slot.tensor] * bucket.kind.itemsize >= bucket_bytes]
        assert not large or len(bucket.slots) == 1


@given(_requests())
def test_buckets_cut_from_one_source_are_the_fewest_and_equal_but_for_the_last(
    request_: tuple[list[int], list[Kind], int],
) -> None:
    sizes, kinds, bucket_bytes = request_
    for stream in _streams(sizes, kinds, bucket_bytes):
        lengths = [bucket.num_elements for bucket in stream]
        capacity = max(1, bucket_bytes // stream[0].kind.itemsize)
        assert len(lengths) <= -(-sum(lengths) // capacity)
        assert len(set(lengths[:-1])) <= 1
        assert 0 <= lengths[0] - lengths[-1] < len(lengths)


@given(_requests())
def test_small_tensors_travel_in_their_order(request_: tuple[list[int], list[Kind], int]) -> None:
    sizes, kinds, bucket_bytes = request_
    for stream in _streams(sizes, kinds, bucket_bytes):
        traveled = [(slot.tensor, slot.start) for bucket in stream for slot in bucket.slots]
        assert traveled == sorted(traveled)


@given(_requests())
def test_the_same_request_gives_the_same_plan(request_: tuple[list[int], list[Kind], int]) -> None:
    sizes, kinds, bucket_bytes = request_
    plan = plan_buckets(sizes, kinds, bucket_bytes=bucket_bytes)
    assert plan == plan_buckets(tuple(sizes), tuple(kinds), bucket_bytes=bucket_bytes)


def test_nothing_is_no_bucket() -> None:
    assert _plan([], 64) == ()
    assert _plan([0, 0], 64) == ()


@pytest.mark.parametrize(("size", "sharing"), [(7, True), (8, False), (9, False), (17, False)])
def test_a_tensor_shares_a_bucket_one_element_below_half_its_size_and_not_at_it(size: int, sharing: bool) -> None:
    shared = any(len(bucket.slots) > 1 for bucket in _plan([1, size], 64))
    assert shared is sharing


@pytest.mark.parametrize(("size", "lengths"), [(16, [16]), (17, [9, 8]), (32, [16, 16]), (33, [11, 11, 11])])
def test_a_large_tensor_is_cut_into_equal_pieces(size: int, lengths: list[int]) -> None:
    assert [bucket.num_elements for bucket in _plan([size], 64)] == lengths


def test_a_small_tensor_may_be_cut_at_a_buckets_end() -> None:
    slots = [[(slot.tensor, slot.start, slot.stop) for slot in bucket.slots] for bucket in _plan([4, 4, 4], 36)]
    assert slots == [[(0, 0, 4), (1, 0, 2)], [(1, 2, 4), (2, 0, 4)]]


def test_a_bucket_smaller_than_an_element_holds_one() -> None:
    assert [bucket.num_elements for bucket in _plan([3], 1, DOUBLE)] == [1, 1, 1]


def test_one_dtype_on_two_devices_is_two_kinds() -> None:
    buckets = plan_buckets([4, 4, 4], [SINGLE, ELSEWHERE, SINGLE], bucket_bytes=64)
    assert [[slot.tensor for slot in bucket.slots] for bucket in buckets] == [[0, 2], [1]]


def test_different_sizes_and_kinds_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        plan_buckets([1, 2], [SINGLE], bucket_bytes=64)
