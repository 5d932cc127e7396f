"""Which tensors a round averages, to which bits, and that it touches nothing else of their memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from frameworks import averagers, bits, current, dist, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")

# A bucket of 16 float32: the cases below have sizes of both sides of it.
_SMALL_BUCKETS = 64
_LARGE_BUCKETS = 4 * 2**20


Tensor = Any


def _dtype(dtype: Any) -> Any:
    """Return the framework's dtype of a name; tables are made before there is a framework."""
    return getattr(lib, dtype) if isinstance(dtype, str) else dtype


def _replica(rank: int, *shape: int, dtype: Any = "float32", salt: int = 0) -> Tensor:
    """Return whole numbers of which every dtype holds the mean of 2, 3, 4 or 6 ranks exactly."""
    numbers = random.Random(1000 * salt + rank)
    values = [float(12 * numbers.randint(-20, 20)) for _ in range(math.prod(shape))]
    return lib.tensor(values, dtype=lib.float32).reshape(shape).to(_dtype(dtype))


def _mean(replicas: Sequence[Tensor]) -> Tensor:
    """Return the mean of the ranks' tensors, the obvious way."""
    wide = lib.complex128 if replicas[0].is_complex() else lib.float64
    total = replicas[0].to(wide)
    for replica in replicas[1:]:
        total = total + replica.to(wide)
    return (total / len(replicas)).to(replicas[0].dtype)


def _averager(**options: Any) -> averagers.PeriodicModelAverager:
    return averagers.PeriodicModelAverager(period=2, **options)


def _round(averager: averagers.PeriodicModelAverager, params: Any) -> None:
    """Run a round now."""
    averager.step = 0
    averager.average_parameters(params)


def _failed(claims: dict[str, bool]) -> list[str]:
    return [claim for claim, holds in claims.items() if not holds]


# Layouts: a case makes the memory of one rank, and the view of it that is averaged.

Case = Callable[[int], tuple[Tensor, Tensor]]


def _viewed(*shape: int, view: Callable[[Tensor], Tensor], dtype: Any = "float32") -> Case:
    def make(rank: int) -> tuple[Tensor, Tensor]:
        memory = _replica(rank, *shape, dtype=dtype)
        return memory, view(memory)

    return make


def _complex(*shape: int, view: Callable[[Tensor], Tensor], dtype: Any = "complex64") -> Case:
    def make(rank: int) -> tuple[Tensor, Tensor]:
        memory = lib.complex(_replica(rank, *shape, dtype="float64"), _replica(rank, *shape, dtype="float64", salt=1))
        memory = memory.to(_dtype(dtype))
        return memory, view(memory)

    return make


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


_LAYOUTS: dict[str, Case] = {
    "one number": _viewed(view=_whole),
    "a vector of one": _viewed(1, view=_whole),
    "a vector": _viewed(7, view=_whole),
    "no elements": _viewed(3, 0, view=_whole),
    "one element less than a bucket": _viewed(15, view=_whole),
    "as large as a bucket": _viewed(16, view=_whole),
    "one element more than a bucket": _viewed(17, view=_whole),
    "many buckets": _viewed(10, 33, view=_whole),
    "transposed": _viewed(5, 3, view=_transposed),
    "transposed, many buckets": _viewed(12, 20, view=_transposed),
    "permuted": _viewed(2, 3, 4, view=lambda memory: memory.permute(2, 0, 1)),
    "channels_last": _viewed(2, 5, 5, 3, view=lambda memory: memory.permute(0, 3, 1, 2)),
    "channels_last of 3 dimensions": _viewed(1, 2, 3, 4, 3, view=lambda memory: memory.permute(0, 4, 1, 2, 3)),
    "with ones among its dimensions": _viewed(1, 4, 1, 3, view=lambda memory: memory.permute(3, 0, 2, 1)),
    "every other column": _viewed(4, 12, view=lambda memory: memory[:, ::2]),
    "every other column, many buckets": _viewed(20, 12, view=lambda memory: memory[:, ::2]),
    "every other row, transposed": _viewed(12, 8, view=lambda memory: memory[::2].t()),
    "a row": _viewed(4, 6, view=lambda memory: memory[2]),
    "a column": _viewed(24, 2, view=lambda memory: memory[:, 1]),
    "a diagonal": _viewed(20, 20, view=lambda memory: memory.diagonal()),
    "a slice behind an offset": _viewed(40, view=lambda memory: memory[3:-5]),
    "a block with gaps in 3 dimensions": _viewed(6, 6, 6, view=lambda memory: memory[1:5, ::3, 2:5]),
    "float64": _viewed(21, view=_whole, dtype="float64"),
    "float16": _viewed(67, view=_whole, dtype="float16"),
    "float16, many buckets and gaps": _viewed(20, 12, view=lambda memory: memory[:, ::2], dtype="float16"),
    "bfloat16": _viewed(5, view=_whole, dtype="bfloat16"),
    "bfloat16, transposed": _viewed(16, 12, view=_transposed, dtype="bfloat16"),
    "complex64": _complex(5, view=_whole),
    "complex64, many buckets": _complex(5, 9, view=_transposed),
    "complex64, with gaps": _complex(6, 6, view=lambda memory: memory[::2, 1:]),
    "complex128": _complex(9, view=_whole, dtype="complex128"),
    "a conjugate": _complex(5, view=lambda memory: memory.conj()),
    "a conjugate, many buckets": _complex(24, view=lambda memory: memory.conj()),
    "a real part": _complex(24, view=lambda memory: memory.real),
    "an imaginary part": _complex(24, view=lambda memory: memory.imag),
}


# None, or the node of each rank: with several nodes of several ranks a round goes through the nodes one by one.
_CLUSTERS = {"2 ranks": (2, None), "3 ranks": (3, None), "2 nodes of 2": (4, "aabb"), "2 nodes of 3": (6, "ababab")}


def _average_layouts(rank: int, world_size: int, nodes: str | None, bucket_bytes: int) -> dict[str, bool]:
    # Between nodes buckets are cut into four.
    averager = _averager(bucket_bytes=4 * bucket_bytes if nodes else bucket_bytes, nodes=nodes and list(nodes))
    return {
        f"{name}: {claim}": holds
        for name, case in _LAYOUTS.items()
        for claim, holds in _average_layout(case, rank, world_size, averager).items()
    }


def _average_layout(
    case: Case, rank: int, world_size: int, averager: averagers.PeriodicModelAverager
) -> dict[str, bool]:
    memory, view = case(rank)
    mean = _mean([case(peer)[1] for peer in range(world_size)])
    expected_memory, expected_view = case(rank)
    expected_view.copy_(mean)
    before = (view.data_ptr(), view.stride(), view.shape, view.dtype, view.untyped_storage().nbytes())
    version = view._version
    _round(averager, [view])
    after = (view.data_ptr(), view.stride(), view.shape, view.dtype, view.untyped_storage().nbytes())
    return {
        "is the mean": lib.equal(view, mean),
        "is seen through the memory, whose rest is untouched": lib.equal(memory, expected_memory),
        "is where it was": before == after,
        "is seen by autograd": view._version > version or not view.numel(),
    }


@pytest.mark.parametrize("bucket_bytes", [_SMALL_BUCKETS, _LARGE_BUCKETS], ids=["small buckets", "large buckets"])
@pytest.mark.parametrize("cluster", list(_CLUSTERS))
def test_the_mean_is_written_where_a_tensor_of_any_layout_lies(cluster: str, bucket_bytes: int) -> None:
    world_size, nodes = _CLUSTERS[cluster]
    for found in run_ranks(_average_layouts, world_size, world_size, nodes, bucket_bytes):
        assert _failed(found) == []


def _average_all_layouts_at_once(rank: int, world_size: int, nodes: str | None) -> list[str]:
    wrong = []
    for bucket_bytes in (1, 60, 1000, _LARGE_BUCKETS):
        most = 24 if bucket_bytes == 1 else 1000  # each element of it is a message
        layouts = {name: case for name, case in _LAYOUTS.items() if case(rank)[1].numel() <= most}
        views = [case(rank)[1] for case in layouts.values()]
        _round(_averager(bucket_bytes=4 * bucket_bytes if nodes else bucket_bytes, nodes=nodes and list(nodes)), views)
        for (name, case), view in zip(layouts.items(), views, strict=True):
            if not lib.equal(view, _mean([case(peer)[1] for peer in range(world_size)])):
                wrong.append(f"{name} with buckets of {bucket_bytes}")
    return wrong


@pytest.mark.parametrize("cluster", list(_CLUSTERS))
def test_all_layouts_and_dtypes_in_one_list_are_averaged_with_any_size_of_bucket(cluster: str) -> None:
    world_size, nodes = _CLUSTERS[cluster]
    assert run_ranks(_average_all_layouts_at_once, world_size, world_size, nodes) == [[]] * world_size


def _average_sliding_window(rank: int) -> dict[str, bool]:
    world_size = dist.get_world_size()
    claims = {}
    for bucket_bytes in (4, 12, 24, _SMALL_BUCKETS, _LARGE_BUCKETS):
        memory = _replica(rank, 20)
        _round(_averager(bucket_bytes=bucket_bytes), [memory.unfold(0, 3, 1)])
        mean = _mean([_replica(peer, 20) for peer in range(world_size)])
        claims[f"buckets of {bucket_bytes}"] = lib.equal(memory, mean)
    return claims


def test_a_tensor_whose_own_elements_overlap_is_averaged_once() -> None:
    for claims in run_ranks(_average_sliding_window, 2):
        assert _failed(claims) == []


# What is left alone


def _average_beside_integers(rank: int) -> tuple[list[Any], list[float]]:
    dtypes = [lib.int64, lib.int32, lib.int16, lib.int8, lib.uint8, lib.bool]
    others = [lib.tensor([rank, rank + 1]).to(dtype) for dtype in dtypes]
    weight = _replica(rank, 3)
    _round(_averager(), [others[0], weight, *others[1:]])
    return [other.tolist() for other in others], weight.tolist()


def test_integers_and_booleans_stay_local_beside_floats() -> None:
    mean = _mean([_replica(rank, 3) for rank in range(2)]).tolist()
    for rank, (others, weight) in enumerate(run_ranks(_average_beside_integers, 2)):
        own = [rank, rank + 1]
        assert others == [own] * 5 + [[bool(value) for value in own]]
        assert weight == mean


def _average_integers_alone(rank: int) -> tuple[int, int]:
    averager, counter = _averager(), lib.tensor(rank)
    averager.average_parameters([counter])
    return averager.step, int(counter)


def test_integers_alone_are_a_round_with_nothing_in_it() -> None:
    assert run_ranks(_average_integers_alone, 2) == [(1, 0), (1, 1)]


def _average_nothing(rank: int) -> tuple[int, list[tuple[int, int, int]], float]:
    events: list[Any] = []
    averager = _averager(observers=[events.append])
    frozen = lib.nn.Parameter(lib.tensor(float(rank)), requires_grad=False)
    _round(averager, [])
    _round(averager, iter(()))
    _round(averager, [{"params": []}])
    _round(averager, [frozen])
    _round(averager, [lib.empty(0)])
    finished = [event for event in events if isinstance(event, averagers.RoundFinished)]
    return (
        averager.step,
        [(one.num_tensors, one.num_elements, one.wire_bytes) for one in finished],
        frozen.item(),
    )


def test_an_empty_or_all_frozen_list_is_a_round_with_nothing_in_it() -> None:
    for rank, (step, rounds, frozen) in enumerate(run_ranks(_average_nothing, 2)):
        assert (step, frozen) == (1, rank)
        assert rounds == [(0, 0, 0)] * 4 + [(1, 0, 0)]


def _average_parameter_kinds(rank: int) -> list[list[float]]:
    """Average parameters that are never trained, trained and then frozen, and thawed between two rounds."""
    make = [lib.nn.Parameter(_replica(rank, 2, salt=salt)) for salt in range(3)]
    never, frozen_later, thawed_later = make
    never.requires_grad_(False)
    thawed_later.requires_grad_(False)
    averager = _averager()
    seen = []
    _round(averager, make)
    seen.append([parameter.tolist() for parameter in make])
    with lib.no_grad():
        for salt, parameter in enumerate(make):
            parameter.copy_(_replica(rank, 2, salt=salt + 5))
    frozen_later.requires_grad_(False)
    thawed_later.requires_grad_(True)
    _round(averager, make)
    seen.append([parameter.tolist() for parameter in make])
    return seen


def test_a_frozen_parameter_is_left_alone_unless_it_was_ever_trainable() -> None:
    def mean(salt: int) -> list[float]:
        return _mean([_replica(rank, 2, salt=salt) for rank in range(2)]).tolist()

    for rank, (first, second) in enumerate(run_ranks(_average_parameter_kinds, 2)):
        assert first == [_replica(rank, 2).tolist(), mean(1), _replica(rank, 2, salt=2).tolist()]
        assert second == [_replica(rank, 2, salt=5).tolist(), mean(6), mean(7)]


# Gradients play no part


def _average_with_gradients(rank: int) -> list[list[float]]:
    params = [lib.nn.Parameter(_replica(rank, 3, salt=salt)) for salt in range(3)]
    params[0].grad = lib.ones(3)
    if rank == 0:
        params[1].grad = lib.ones(3)
    _round(_averager(), params)
    return [parameter.tolist() for parameter in params]


def test_gradients_that_are_missing_everywhere_or_on_one_rank_change_nothing() -> None:
    mean = [_mean([_replica(rank, 3, salt=salt) for rank in range(2)]).tolist() for salt in range(3)]
    assert run_ranks(_average_with_gradients, 2) == [mean] * 2


def _average_after_zero_grad(rank: int) -> tuple[float, float]:
    weight = lib.nn.Parameter(lib.tensor(float(rank)))
    optimizer = lib.optim.SGD([weight], lr=1.0)
    (weight * 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    averager = _averager()
    averager.average_parameters([weight])
    (weight * 3).backward()
    gradient = weight.grad.item() if weight.grad is not None else math.nan
    return weight.item(), gradient


def test_zero_grad_before_the_round_averages_and_training_goes_on() -> None:
    assert run_ranks(_average_after_zero_grad, 2) == [(-1.5, 3.0)] * 2


# Aliases, storages, duplicates


def _average_aliased(rank: int, bucket_bytes: int) -> dict[str, bool]:
    world_size = dist.get_world_size()
    flat = _replica(rank, 60)
    first, second = lib.nn.Parameter(flat[:40].view(5, 8)), lib.nn.Parameter(flat[40:])
    tied = lib.nn.Module()
    tied.first = first
    view_of_second = second.detach()[3:7]
    storage = (first.untyped_storage().data_ptr(), first.untyped_storage().nbytes())
    _round(_averager(bucket_bytes=bucket_bytes), [first, second])
    mean = _mean([_replica(peer, 60) for peer in range(world_size)])
    return {
        "a flat buffer made before sees it": lib.equal(flat, mean),
        "a tied module sees it": lib.equal(tied.first, mean[:40].view(5, 8)),
        "a view made before sees it": lib.equal(view_of_second, mean[43:47]),
        "the storage is as it was": storage == (first.untyped_storage().data_ptr(), first.untyped_storage().nbytes()),
        "parameters are leaves": first.is_leaf and second.is_leaf,
    }


@pytest.mark.parametrize("bucket_bytes", [_SMALL_BUCKETS, _LARGE_BUCKETS])
def test_aliases_see_the_mean_and_storages_stay_as_they_were(bucket_bytes: int) -> None:
    for claims in run_ranks(_average_aliased, 2, bucket_bytes):
        assert _failed(claims) == []


def _average_twice_listed(rank: int) -> tuple[list[float], int, list[bool]]:
    events: list[Any] = []
    weight = lib.nn.Parameter(_replica(rank, 3))
    _round(_averager(observers=[events.append]), [weight, weight, weight.detach(), {"params": [weight]}])
    overlapping = []
    for bucket_bytes in (8, _SMALL_BUCKETS, _LARGE_BUCKETS):
        for pick in (
            lambda memory: [memory, memory[1], memory[:, 2]],
            lambda memory: [memory[2:], memory],
            lambda memory: [memory, memory.t(), memory.view(-1)],
            lambda memory: [memory[:4], memory[3:]],
            lambda memory: [memory[::2], memory[1::2]],
        ):
            memory = _replica(rank, 6, 6)
            _round(_averager(bucket_bytes=bucket_bytes), pick(memory))
            overlapping.append(lib.equal(memory, _mean([_replica(peer, 6, 6) for peer in range(2)])))
    return weight.tolist(), events[0].num_tensors, overlapping


def test_a_tensor_listed_twice_is_averaged_once_and_overlapping_views_hold_the_mean() -> None:
    mean = _mean([_replica(rank, 3) for rank in range(2)]).tolist()
    assert run_ranks(_average_twice_listed, 2) == [(mean, 1, [True] * 15)] * 2


# A tensor is what it is at the time of the round


def _average_what_moved(rank: int) -> dict[str, bool]:
    world_size = dist.get_world_size()
    averager = _averager(bucket_bytes=_SMALL_BUCKETS)

    def mean(*shape: int, salt: int, dtype: Any = "float32") -> Tensor:
        return _mean([_replica(peer, *shape, salt=salt, dtype=dtype) for peer in range(world_size)])

    claims = {}
    model = lib.nn.Linear(5, 4)
    model.weight.data.copy_(_replica(rank, 4, 5))
    model.bias.data.copy_(_replica(rank, 4))
    _round(averager, model.parameters())
    claims["as built"] = lib.equal(model.weight, mean(4, 5, salt=0))

    old = model.weight.data
    old_values = old.clone()
    model.weight.data = _replica(rank, 4, 5, salt=1)
    _round(averager, model.parameters())
    claims["data pointed elsewhere"] = lib.equal(model.weight, mean(4, 5, salt=1)) and lib.equal(old, old_values)

    for parameter in model.parameters():
        parameter.data = parameter.data.to(lib.float64)
    with lib.no_grad():
        model.weight.copy_(_replica(rank, 4, 5, salt=2, dtype=lib.float64) + 2.0**-40 * rank)
    _round(averager, model.parameters())
    expected = mean(4, 5, salt=2, dtype=lib.float64) + 2.0**-40 * (world_size - 1) / 2
    claims["to another dtype"] = model.weight.dtype == lib.float64 and lib.equal(model.weight, expected)

    state = {"weight": _replica(rank, 4, 5, salt=3), "bias": _replica(rank, 4, salt=3)}
    model.load_state_dict(state, assign=True)
    _round(averager, model.parameters())
    claims["load_state_dict with assign"] = lib.equal(state["weight"], mean(4, 5, salt=3))

    model.weight = lib.nn.Parameter(_replica(rank, 2, 5, salt=4))
    _round(averager, model.parameters())
    claims["another shape"] = lib.equal(model.weight, mean(2, 5, salt=4))

    return claims


def test_a_tensor_moved_retyped_reloaded_or_laid_out_anew_between_rounds_is_seen() -> None:
    for claims in run_ranks(_average_what_moved, 2):
        assert _failed(claims) == []


# Bits: 16-bit floats


def _random_halves(rank: int, size: int, dtype: Any) -> Tensor:
    """Return numbers of very different sizes, so that a sum in 16 bits would lose most of them."""
    numbers = random.Random(rank + 17 * size)
    values = [numbers.gauss(0.0, 1.0) * 2.0 ** numbers.randint(-9, 8) for _ in range(size)]
    return lib.tensor(values, dtype=lib.float64).to(_dtype(dtype))


def _rounded_mean(replicas: Sequence[Tensor]) -> Tensor:
    """Return the sum in float32, divided, rounded once."""
    total = lib.zeros_like(replicas[0], dtype=lib.float32)
    for replica in replicas:
        total = total + replica.float()
    return (total / len(replicas)).to(replicas[0].dtype)


_HALF_SIZES = (1, 2, 3, 5, 31, 32, 33, 120, 481)


def _average_halves(rank: int, world_size: int) -> list[str]:
    wrong = []
    for dtype in (lib.float16, lib.bfloat16):
        for bucket_bytes in (_SMALL_BUCKETS, 240, _LARGE_BUCKETS):
            averager = _averager(bucket_bytes=bucket_bytes)
            alone = [_random_halves(rank, size, dtype) for size in _HALF_SIZES]
            for tensor in alone:
                _round(averager, [tensor])
            together = [_random_halves(rank, size, dtype) for size in _HALF_SIZES]
            _round(averager, together)
            for size, one, other in zip(_HALF_SIZES, alone, together, strict=True):
                mean = _rounded_mean([_random_halves(peer, size, dtype) for peer in range(world_size)])
                if not (bits(one) == bits(other) == bits(mean)):
                    wrong.append(f"{size} of {dtype} in buckets of {bucket_bytes}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_16_bit_floats_are_exactly_the_rounded_mean_of_the_sum_in_float32(world_size: int) -> None:
    assert run_ranks(_average_halves, world_size, world_size) == [[]] * world_size


_EXTREMES: dict[str, tuple[str, tuple[float, float, float]]] = {
    "the largest float16": ("float16", (65504.0, 65504.0, 65504.0)),
    "the largest float16 and its negative": ("float16", (65504.0, 65504.0, -65504.0)),
    "the smallest float16": ("float16", (2.0**-24, 2.0**-24, 2.0**-24)),
    "small float16": ("float16", (3 * 2.0**-24, 0.0, 0.0)),
    "the smallest bfloat16": ("bfloat16", (2.0**-133, 2.0**-133, 2.0**-133)),
    "small bfloat16": ("bfloat16", (3 * 2.0**-133, 0.0, 0.0)),
    "large bfloat16": ("bfloat16", (2.0**126, 2.0**126, -(2.0**126))),
    "the largest bfloat16": ("bfloat16", (3.3895313892515355e38,) * 3),
    "large float32": ("float32", (3e38, 3e38, 3e38)),
    "large float64": ("float64", (1.7e308, 1.7e308, 1.7e308)),
}


def _average_extremes(rank: int, world_size: int) -> dict[str, list[float]]:
    found = {}
    for name, (dtype, values) in _EXTREMES.items():
        packed, in_place = (lib.full((size,), values[rank], dtype=_dtype(dtype)) for size in (5, 48))
        _round(_averager(bucket_bytes=_SMALL_BUCKETS), [packed])
        _round(_averager(bucket_bytes=_SMALL_BUCKETS), [in_place])
        found[name] = sorted({*packed.tolist(), *in_place.tolist()})
    return found


def _exact_mean(name: str, world_size: int) -> tuple[float, float]:
    """Return the mean rounded to its dtype, and how far off it may be."""
    dtype, values = _EXTREMES[name]
    scale = max(map(abs, values))  # so that the oracle cannot overflow either
    mean = scale * (sum(value / scale for value in values[:world_size]) / world_size)
    tolerance = {"float32": 2.0**-21, "float64": 2.0**-50}.get(dtype, 0.0) * scale
    return lib.tensor(mean, dtype=lib.float64).to(_dtype(dtype)).item(), tolerance


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_overflows_or_underflows(world_size: int) -> None:
    for found in run_ranks(_average_extremes, world_size, world_size):
        for name in _EXTREMES:
            expected, tolerance = _exact_mean(name, world_size)
            assert found[name] == pytest.approx([expected], rel=0, abs=tolerance), name


# Bits: identical replicas, all ranks alike


# From the denormal to the large; TensorPlay itself rounds denormal numbers to bfloat16 as zero.
_EXPONENTS = {
    "torch": {"float16": (-19, 12), "bfloat16": (-131, 124), "float32": (-131, 124), "float64": (-1026, 1020)},
    "tensorplay": {"float16": (-19, 12), "bfloat16": (-120, 124), "float32": (-131, 124), "float64": (-1026, 1020)},
}


def _numbers_of_all_sizes(dtype: str) -> Tensor:
    """Return numbers of all sizes, the same on every rank."""
    numbers = random.Random(3)
    exponents = _EXPONENTS[current()][dtype]
    values = [numbers.gauss(0.0, 1.0) * 2.0 ** numbers.randint(*exponents) for _ in range(997)]
    return lib.tensor(values, dtype=lib.float64).to(_dtype(dtype))


def _average_identical(rank: int) -> dict[str, int]:
    """Return by how many last bits identical replicas changed at most."""
    changes = {}
    for dtype in _EXPONENTS[current()]:
        integers = {2: lib.int16, 4: lib.int32, 8: lib.int64}[_dtype(dtype).itemsize]
        worst = 0
        for bucket_bytes in (500, _LARGE_BUCKETS):  # in place, and packed
            tensor = _numbers_of_all_sizes(dtype)
            before = tensor.view(integers).tolist()
            _round(_averager(bucket_bytes=bucket_bytes), [tensor])
            steps = [abs(one - other) for one, other in zip(tensor.view(integers).tolist(), before, strict=True)]
            worst = max(worst, *steps)
        changes[dtype] = worst
    return changes


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_identical_replicas_change_by_half_as_many_last_bits_as_ranks_and_16_bits_not_at_all(
    world_size: int,
) -> None:
    for changes in run_ranks(_average_identical, world_size):
        assert changes["float16"] == 0
        assert changes["bfloat16"] == 0
        assert changes["float32"] <= world_size // 2
        assert changes["float64"] <= world_size // 2


def _bits_of_all(rank: int) -> list[bytes]:
    tensors = [
        _random_halves(rank, size, dtype)
        for size in (1, 7, 100, 1001)
        for dtype in ("float64", "float32", "float16", "bfloat16", "complex64")
    ]
    tensors[0][0] = math.nan if rank == 1 else 1.0
    averager = averagers.HierarchicalModelAverager({2: 2, 4: dist.get_world_size()}, bucket_bytes=256)
    for _ in range(3):  # rounds at the top, then within pairs
        averager.average_parameters(tensors)
    tensors.append(_random_halves(rank, 999, "float32"))
    averager.finish(tensors)
    return [bits(tensor) for tensor in tensors]


def test_all_ranks_end_a_round_bit_identical() -> None:
    first, *others = run_ranks(_bits_of_all, 4)
    assert others == [first] * 3


def _bits_of_level(rank: int) -> list[bytes]:
    averager = averagers.HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=2)
    averager.step = 2
    tensor = _random_halves(rank, 100, lib.float32)
    averager.average_parameters([tensor])
    return [
        bits(tensor),
        bits(_mean([_random_halves(peer, 100, lib.float32) for peer in (rank // 2 * 2, rank // 2 * 2 + 1)])),
    ]


def test_a_lower_level_averages_neighbors_only() -> None:
    found = run_ranks(_bits_of_level, 4)
    assert all(averaged == expected for averaged, expected in found)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


# Modes of autograd


def _average_in_modes(rank: int) -> dict[str, bool]:
    claims = {}
    for bucket_bytes in (_SMALL_BUCKETS, _LARGE_BUCKETS):
        for mode in (lib.inference_mode, lib.no_grad, lib.enable_grad):
            averager = _averager(bucket_bytes=bucket_bytes, measure_drift=True)
            params = [lib.nn.Parameter(_replica(rank, 5, 7, dtype=dtype)) for dtype in (lib.float32, lib.bfloat16)]
            with mode():
                _round(averager, params)
            right = all(
                lib.equal(one, _mean([_replica(peer, 5, 7, dtype=one.dtype) for peer in range(2)])) for one in params
            )
            averager.finish(params)  # what was kept from the round serves outside of the mode too
            (params[0] ** 2).sum().backward()
            trains = params[0].grad is not None and lib.equal(params[0].grad, 2 * params[0])
            claims[f"{mode.__name__} with buckets of {bucket_bytes}"] = right and trains
    return claims


def test_a_round_works_in_every_mode_of_autograd_and_training_goes_on() -> None:
    for claims in run_ranks(_average_in_modes, 2):
        assert _failed(claims) == []


def _average_between_forward_and_backward(rank: int) -> list[str]:
    silent = []
    for dtype in (lib.float32, lib.float64, lib.bfloat16, lib.complex64):
        for size in (3, 64, 65):  # packed, and in place with and without a rest
            weight = lib.nn.Parameter(lib.ones(size, dtype=dtype) * (rank + 1))
            untouched = lib.nn.Parameter(lib.ones(size, dtype=dtype))
            loss = (weight * weight).abs().sum() + (untouched * untouched).abs().sum()
            _round(_averager(bucket_bytes=_SMALL_BUCKETS), [weight])
            try:
                loss.backward()
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
            else:
                silent.append(f"{size} of {dtype}")
    return silent


def test_averaging_between_forward_and_backward_is_autograds_own_error() -> None:
    assert run_ranks(_average_between_forward_and_backward, 2) == [[]] * 2


# Nobody to average with


def _average_alone(rank: int) -> tuple[list[float], int, int]:
    alone = [dist.new_group([peer]) for peer in range(dist.get_world_size())][rank]
    weight = _replica(rank, 9)
    version = weight._version
    periodic = averagers.PeriodicModelAverager(2, 0, alone)
    hierarchical = averagers.HierarchicalModelAverager({2: 1}, 0, alone)
    for _ in range(4):
        periodic.average_parameters([weight])
        hierarchical.average_parameters([weight])
    averagers.average_parameters([weight], alone)
    periodic.finish([weight])
    with periodic.averaged([weight]):
        pass
    return weight.tolist(), weight._version - version, periodic.step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_world_or_a_group_of_one_counts_and_writes_nothing(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(_average_alone, world_size)):
        assert found == (_replica(rank, 9).tolist(), 0, 4)


def _average_outside(rank: int) -> tuple[list[list[float]], int, int]:
    group = dist.new_group([0, 2])
    weights = [_replica(rank, 4, salt=salt) for salt in range(4)]
    periodic = averagers.PeriodicModelAverager(3, 0, group)
    hierarchical = averagers.HierarchicalModelAverager({3: 2}, 0, group)
    periodic.average_parameters(weights[:1])
    hierarchical.average_parameters(weights[1:2])
    averagers.average_parameters(weights[2:3], group)
    with periodic.averaged(weights[3:]):
        inside = weights[3].tolist()
    periodic.finish(weights[:1])
    return [*(weight.tolist() for weight in weights), inside], periodic.step, hierarchical.step


def test_a_rank_outside_the_group_counts_and_keeps_its_tensors() -> None:
    mean = [_mean([_replica(rank, 4, salt=salt) for rank in (0, 2)]).tolist() for salt in range(4)]
    for rank, (weights, *steps) in enumerate(run_ranks(_average_outside, 3)):
        own = [_replica(rank, 4, salt=salt).tolist() for salt in range(4)]
        expected = [*own, own[3]] if rank == 1 else [*mean[:3], own[3], mean[3]]
        assert weights == expected
        assert steps == [1, 1]


def _average_on_local_steps(rank: int) -> int:
    reads = 0

    def params() -> Any:
        nonlocal reads
        reads += 1
        yield lib.zeros(3)

    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=2)
    for _ in range(7):  # due at 2 and 6; the first call reads the list to check it
        averager.average_parameters(params())
    return reads


def test_a_local_step_does_not_read_the_parameters() -> None:
    assert run_ranks(_average_on_local_steps, 2) == [3, 3]


# What a round tells of itself


def _observed_round(rank: int, tensors: Sequence[Tensor], **options: Any) -> Any:
    events: list[Any] = []
    averager = _averager(observers=[events.append], **options)
    _round(averager, tensors)
    (finished,) = [event for event in events if isinstance(event, averagers.RoundFinished)]
    return finished


_DRIFTING: dict[str, Callable[[int], list[Tensor]]] = {
    "packed": lambda rank: [_random_halves(rank, 11, lib.float32), _random_halves(rank, 3, lib.float32)],
    "in place": lambda rank: [_random_halves(rank, 1001, lib.float32)],
    "with gaps": lambda rank: [_random_halves(rank, 100, lib.float32)[::3]],
    "float64": lambda rank: [_random_halves(rank, 40, lib.float64)],
    "float16": lambda rank: [
        _replica(rank, 40, dtype=lib.float16),
        _replica(rank, 500, dtype=lib.float16),
    ],
    "bfloat16": lambda rank: [
        _replica(rank, 40, dtype=lib.bfloat16),
        _replica(rank, 500, dtype=lib.bfloat16),
    ],
    "complex": lambda rank: [lib.complex(_replica(rank, 20), _replica(rank, 20, salt=1))],
    "mixed": lambda rank: [_replica(rank, 40, dtype=lib.bfloat16), _replica(rank, 30), lib.tensor(rank)],
    "none": lambda rank: [lib.ones(5)],
    "nothing": lambda rank: [],
}


def _drifts(rank: int) -> dict[str, float | None]:
    found = {}
    for name, make in _DRIFTING.items():
        for bucket_bytes in (_SMALL_BUCKETS, _LARGE_BUCKETS):
            finished = _observed_round(rank, make(rank), bucket_bytes=bucket_bytes, measure_drift=True)
            found[f"{name} {bucket_bytes}"] = finished.drift
    found["not asked for"] = _observed_round(rank, [lib.ones(2)]).drift
    return found


def test_the_drift_is_the_distance_from_the_mean_as_root_mean_square_over_the_ranks() -> None:
    ranks = range(3)
    found, *others = run_ranks(_drifts, 3)
    assert others == [found] * 2
    assert found.pop("not asked for") is None
    for name, make in _DRIFTING.items():
        lists = [[tensor for tensor in make(rank) if tensor.dtype != lib.int64] for rank in ranks]
        squares = 0.0
        for replicas in zip(*lists, strict=True):
            columns = zip(*(replica.reshape(-1).tolist() for replica in replicas), strict=True)
            squares += sum(
                abs(value - sum(column) / len(ranks)) ** 2 for column in map(list, columns) for value in column
            )
        expected = math.sqrt(squares / len(ranks))
        for bucket_bytes in (_SMALL_BUCKETS, _LARGE_BUCKETS):
            # The mean of float32 is itself rounded, hence the tolerance.
            assert found[f"{name} {bucket_bytes}"] == pytest.approx(expected, rel=1e-6, abs=1e-6), name


def test_measuring_the_drift_changes_no_bit_of_the_mean() -> None:
    assert run_ranks(_bits_with_and_without_drift, 3) == [True] * 3


def _bits_with_and_without_drift(rank: int) -> bool:
    results = []
    for measure_drift in (False, True):
        tensors = [tensor for name in ("packed", "in place", "float16") for tensor in _DRIFTING[name](rank)]
        _round(_averager(bucket_bytes=_SMALL_BUCKETS, measure_drift=measure_drift), tensors)
        results.append([bits(tensor) for tensor in tensors])
    return results[0] == results[1]


def _wire_bytes(rank: int) -> dict[str, int]:
    def sent(*tensors: Tensor, bucket_bytes: int = _LARGE_BUCKETS) -> int:
        return _observed_round(rank, tensors, bucket_bytes=bucket_bytes).wire_bytes

    return {
        "30 float32": sent(lib.zeros(30)),
        "30 float32, cut": sent(lib.zeros(30), bucket_bytes=40),
        "30 float32 in three": sent(lib.zeros(9), lib.zeros(20), lib.zeros(1)),
        "1 float32": sent(lib.zeros(1)),
        "30 float64": sent(lib.zeros(30, dtype=lib.float64)),
        "30 complex64": sent(lib.zeros(30, dtype=lib.complex64)),
        "30 float16": sent(lib.zeros(30, dtype=lib.float16)),
        "31 float16": sent(lib.zeros(31, dtype=lib.float16)),
        "30 bfloat16 in buckets of 10": sent(lib.zeros(30, dtype=lib.bfloat16), bucket_bytes=20),
        "30 float32 and 30 float16": sent(lib.zeros(30), lib.zeros(30, dtype=lib.float16)),
        "integers": sent(lib.zeros(30, dtype=lib.int32)),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bytes_sent_are_those_of_a_ring_at_the_tensors_own_dtype(world_size: int) -> None:
    def ring(num_bytes: int) -> float:
        return 2 * (world_size - 1) / world_size * num_bytes

    def exchange(*lengths: int) -> int:
        """Two times one part to each of the others, for each bucket of 16-bit floats."""
        return sum(2 * (world_size - 1) * -(-length // world_size) * 2 for length in lengths)

    expected = {
        "30 float32": ring(120),
        "30 float32, cut": ring(120),
        "30 float32 in three": ring(120),
        "1 float32": ring(4),
        "30 float64": ring(240),
        "30 complex64": ring(240),
        "30 float16": exchange(30),
        "31 float16": exchange(31),
        "30 bfloat16 in buckets of 10": exchange(10, 10, 10),
        "30 float32 and 30 float16": ring(120) + exchange(30),
        "integers": 0,
    }
    for found in run_ranks(_wire_bytes, world_size):
        assert found == {name: round(value) for name, value in expected.items()}


def _counted_round(rank: int) -> dict[str, Any]:
    events: list[Any] = []
    averager = averagers.HierarchicalModelAverager({3: 1, 6: 2}, warmup_steps=3, observers=[events.append])
    tensors = [
        lib.zeros(3),
        lib.zeros(4, 5),
        lib.tensor(1),
        lib.nn.Parameter(lib.zeros(9), requires_grad=False),
    ]
    for _ in range(7):
        averager.average_parameters(tensors)
    averager.finish(tensors)
    started, finished = events
    return {
        "started": (started.call, started.step, started.level, started.group_size, started.rank),
        "finished": (finished.call, finished.step, finished.level, finished.group_size, finished.rank),
        "sizes": {(event.num_tensors, event.num_elements) for event in events},
        "seconds": finished.seconds,
    }


def test_events_name_the_round_and_count_what_was_averaged() -> None:
    for rank, found in enumerate(run_ranks(_counted_round, 2)):
        # Only the round at 6 has somebody to average with, and finish finds it done.
        assert found["started"] == ("average_parameters", 6, 1, 2, rank)
        assert found["finished"] == ("average_parameters", 6, 1, 2, rank)
        assert found["sizes"] == {(2, 23)}
        assert found["seconds"] > 0


def _refused(rank: int) -> list[str]:
    messages = []
    averager = _averager()
    with lib.inference_mode():
        made_in_inference = lib.zeros(2)
    for params in (
        [("head.weight", lib.eye(2).to_sparse())],
        lib.nn.LazyLinear(3).named_parameters(),
        [("head.weight", made_in_inference)],
        [("head.weight", lib.zeros(1).expand(4))],
        lib.zeros(3),
        [3],
    ):
        try:
            averager.average_parameters(params)
        except TypeError as error:
            messages.append(f"{type(error).__name__}: {error}")
    averager.average_parameters([lib.zeros(2)])  # nothing was sent, and nothing is out of step
    return [*messages, f"step {averager.step}"]


def test_what_cannot_be_averaged_is_refused_at_the_first_call_before_anything_is_sent() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    assert [message.split(":")[0] for message in first] == ["UnsupportedTensorError"] * 4 + ["InvalidTypeError"] * 2 + [
        "step 1"
    ]
    assert all("head.weight" in first[index] for index in (0, 2, 3))
    assert "weight" in first[1]


def _refused_in_warmup(rank: int) -> list[str]:
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
    kinds = []
    for params in (lib.zeros(2), ["weight"]):
        try:
            averager.average_parameters(params)
        except TypeError as error:
            kinds.append(type(error).__name__)
    averager.average_parameters(lib.nn.Linear(1, 1).named_parameters())
    return [*kinds, str(averager.step)]


def test_a_wrong_type_is_refused_at_the_first_call_of_the_warmup() -> None:
    assert run_ranks(_refused_in_warmup, 2) == [["InvalidTypeError", "InvalidTypeError", "1"]] * 2
