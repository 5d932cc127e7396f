"""Rounds that go through the nodes one by one: chosen by itself, equal to the flat mean, alike on all ranks."""

from __future__ import annotations

import math
import random
import socket
from typing import Any

import pytest

from frameworks import averagers, bits, dist, lib, num_groups
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")

_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")


def _values(rank: int, size: int, dtype: str) -> Any:
    numbers = random.Random(rank + 31 * size)
    values = [numbers.gauss(0.0, 1.0) * 2.0 ** numbers.randint(-9, 8) for _ in range(size)]
    return lib.tensor(values, dtype=lib.float64).to(getattr(lib, dtype))


def _round(averager: Any, tensors: list[Any]) -> None:
    averager.step = 0
    averager.average_parameters(tensors)


def _both_ways(rank: int, nodes: str) -> tuple[list[bytes], list[float], list[int]]:
    """Return the bits after a two-level round, its distance from the flat mean, and how many legs each has."""
    found, distances, legs = [], [], []
    for bucket_bytes in (1000, 8000, 2**20):  # cut into four between nodes
        flat = averagers.PeriodicModelAverager(2, nodes=["one"] * len(nodes), bucket_bytes=bucket_bytes)
        split = averagers.PeriodicModelAverager(2, nodes=list(nodes), bucket_bytes=bucket_bytes)
        legs += [len(flat._routes.levels[0].legs), len(split._routes.levels[0].legs)]
        sizes = (1, 2, 3, 31, 64, 513)
        one, other = ([_values(rank, size, dtype) for dtype in _DTYPES for size in sizes] for _ in range(2))
        _round(flat, one)
        _round(split, other)
        for dtype, left, right in zip([dtype for dtype in _DTYPES for _ in sizes], one, other, strict=True):
            pairs = list(zip(left.tolist(), right.tolist(), strict=True))
            if dtype.endswith("16"):
                last_bit = 2.0 ** (-10 if dtype == "float16" else -7)
                distances.append(max(abs(a - b) / (abs(a) * last_bit or 1) for a, b in pairs))
            else:
                last_bit = 2.0 ** (-52 if dtype == "float64" else -23)
                distances.append(max(abs(a - b) for a, b in pairs) / (last_bit * 2000))
        found += [bits(tensor) for tensor in other]
    return found, distances, legs


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aabbcc", "ababab"])
def test_the_mean_through_the_nodes_is_the_flat_mean_and_alike_on_all_ranks(nodes: str) -> None:
    first, *others = run_ranks(_both_ways, len(nodes), nodes)
    assert all(bits_ == first[0] for bits_, _, _ in others)
    # The order of the sum differs: in the last bit of 16-bit floats, which are rounded once either way, and in those of
    # the summands, of up to 2,000, for the wider ones.
    assert max(first[1]) <= 1
    assert first[2] == [1, 2] * 3


def _chosen(rank: int, hosts: str) -> list[list[int]]:
    socket.gethostname = lambda: hosts[rank]
    before = num_groups()
    averager = averagers.HierarchicalModelAverager({2: 2, 4: len(hosts)})
    legs = [[leg.size for leg in route.legs] for route in averager._routes.levels]
    tensor = lib.tensor([float(rank)])
    averager.average_parameters([tensor])
    assert tensor.item() == pytest.approx((len(hosts) - 1) / 2)
    averager.close()
    assert num_groups() == before
    return legs


@pytest.mark.parametrize(
    ("hosts", "legs"),
    [
        ("aabb", [[2], [2, 2]]),
        ("aaaa", [[2], [4]]),
        ("abcd", [[2], [4]]),
        ("aaab", [[2], [4]]),
        ("aabbcc", [[2], [2, 3]]),
    ],
)
def test_nodes_are_told_by_their_host_names(hosts: str, legs: list[list[int]]) -> None:
    assert run_ranks(_chosen, len(hosts), hosts) == [legs] * len(hosts)


def _wrong_nodes(rank: int) -> list[str]:
    messages = []
    for nodes in ([0, 0, 1], "aabb", 2, [0, 0, rank // 2, 1]):
        with pytest.raises(averagers.AveragersError) as caught:
            averagers.PeriodicModelAverager(2, nodes=nodes)
        messages.append(str(caught.value))
    averagers.PeriodicModelAverager(2, nodes=[0, 0, 1, 1])
    return messages


def test_nodes_that_are_wrong_or_not_the_same_on_all_ranks_are_refused() -> None:
    first, *others = run_ranks(_wrong_nodes, 4)
    assert others == [first] * 3
    short, text, number, unequal = first
    assert "it has 3, and there are 4 ranks" in short
    assert "nodes must be a list with the node of each rank" in text
    assert "got 2 of type int" in number
    assert "nodes is ['0', '0', '0', '1'] on ranks 0-1, ['0', '0', '1', '1'] on ranks 2-3" in unequal


def _events(rank: int) -> tuple[int, float]:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(2, nodes=[0, 0, 1, 1], measure_drift=True, observers=[events.append])
    tensors = [lib.full((100,), float(rank)), lib.full((50,), float(rank)).to(lib.bfloat16)]
    averager.average_parameters(tensors)
    (finished,) = [event for event in events if isinstance(event, averagers.RoundFinished)]
    return finished.wire_bytes, finished.drift


def test_bytes_and_drift_are_told() -> None:
    # Within the node a part to the other, twice; between the nodes a ring's bytes of a part, in float32.
    float32, bfloat16 = 2 * 50 * 4 + 50 * 4, 2 * 25 * 2 + 25 * 4
    drift = math.sqrt(150 * (1.5**2 + 0.5**2) / 2)
    for sent, found in run_ranks(_events, 4):
        assert sent == float32 + bfloat16
        assert found == pytest.approx(drift, rel=1e-6)


def _copied(rank: int) -> tuple[bool, int, float]:
    import copy

    before = num_groups()
    averager = averagers.PeriodicModelAverager(2, nodes=[0, 0, 1, 1])
    twin = copy.deepcopy(averager)
    averager.close()
    tensor = lib.tensor([float(rank)])
    twin.average_parameters([tensor])
    open_then = num_groups() - before
    twin.close()
    return open_then > 0, num_groups() - before, tensor.item()


def test_a_copy_shares_the_groups_of_the_legs_too() -> None:
    assert run_ranks(_copied, 4) == [(True, 0, 1.5)] * 4


def _trained(rank: int) -> tuple[list[float], float]:
    averager = averagers.HierarchicalModelAverager({2: 2, 4: 4}, nodes=[0, 0, 1, 1])
    weight = lib.tensor([float(rank)] * 3)
    seen = []
    for _ in range(7):
        averager.average_parameters([weight])
        seen.append(weight[0].item())
        weight.add_(float(rank))
    averager.finish([weight])
    return seen, weight[0].item()


def test_a_hierarchy_over_nodes_averages_within_and_among_all_in_turn() -> None:
    results = run_ranks(_trained, 4)
    weights = [float(rank) for rank in range(4)]
    seen: list[list[float]] = [[] for _ in range(4)]
    for step in range(7):
        if step % 4 == 0:
            weights = [sum(weights) / 4] * 4
        elif step % 2 == 0:
            weights = [sum(weights[:2]) / 2] * 2 + [sum(weights[2:]) / 2] * 2
        for rank in range(4):
            seen[rank].append(weights[rank])
            weights[rank] += rank
    for rank, (found, last) in enumerate(results):
        assert found == pytest.approx(seen[rank])
        assert last == pytest.approx(sum(weights) / 4)


def _dies(rank: int) -> tuple[tuple[int, ...], str]:
    import os
    import signal

    averager = averagers.PeriodicModelAverager(2, nodes=[0, 0, 1, 1], timeout_s=20)
    weight = lib.zeros(100_000)
    averager.average_parameters([weight])
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    averager.average_parameters([weight])
    with pytest.raises(averagers.RoundFailedError) as caught:
        averager.average_parameters([weight])
    return caught.value.missing_ranks, str(caught.value)


def test_a_rank_that_dies_is_named_on_the_other_nodes_too() -> None:
    for missing, message in run_ranks(_dies, 4, may_die=[3])[:3]:
        assert missing == (3,)
        assert "rank 3 did not come" in message


def _members_of_a_part(rank: int) -> float:
    part = dist.new_group([1, 2, 4, 5])
    if rank not in (1, 2, 4, 5):
        return -1.0
    averager = averagers.PeriodicModelAverager(2, process_group=part, nodes=["x", "x", "y", "y"])
    tensor = lib.tensor([float(rank)])
    averager.average_parameters([tensor])
    return tensor.item()


def test_nodes_are_those_of_the_process_groups_ranks() -> None:
    assert run_ranks(_members_of_a_part, 6) == [-1.0, 3.0, 3.0, -1.0, 3.0, 3.0]
