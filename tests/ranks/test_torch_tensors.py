"""What torch's tensors can be that others cannot, and what a round does with its memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import averagers
from ranks_runner import run_ranks

_SMALL_BUCKETS = 64
_LARGE_BUCKETS = 4 * 2**20


def _replica(rank: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Return whole numbers of which every dtype holds the mean of 2, 3, 4 or 6 ranks exactly."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return 12 * torch.randint(-20, 21, shape, generator=generator).to(dtype)


def _mean(replicas: Sequence[Tensor]) -> Tensor:
    """Return the mean of the ranks' tensors, the obvious way."""
    wide = torch.complex128 if replicas[0].is_complex() else torch.float64
    return torch.stack([replica.to(wide) for replica in replicas]).mean(0).to(replicas[0].dtype)


def _averager(**options: Any) -> averagers.PeriodicModelAverager:
    return averagers.PeriodicModelAverager(period=2, **options)


def _round(averager: averagers.PeriodicModelAverager, params: Any) -> None:
    """Run a round now."""
    averager.step = 0
    averager.average_parameters(params)


def _average_negative_view(rank: int) -> list[list[float]]:
    found = []
    for size, bucket_bytes in ((5, _LARGE_BUCKETS), (32, _SMALL_BUCKETS)):
        view = torch.complex(_replica(rank, size), _replica(rank, size, salt=1)).conj().imag
        assert view.is_neg()
        _round(_averager(bucket_bytes=bucket_bytes), [view])
        found.append(view.tolist())
    return found


def test_a_view_that_is_negated_when_read_is_averaged_like_any_other() -> None:
    mean = [_mean([-_replica(rank, size, salt=1) for rank in range(2)]).tolist() for size in (5, 32)]
    assert run_ranks(_average_negative_view, 2) == [mean] * 2


def _average_half_complex(rank: int, bucket_bytes: int) -> tuple[list[list[float]], bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the dtype experimental
        pairs = _replica(rank, 40, 2, dtype=torch.float16)
        tensor = torch.view_as_complex(pairs)
        pointer = tensor.data_ptr()
        _round(_averager(bucket_bytes=bucket_bytes), [tensor])
        return pairs.tolist(), tensor.data_ptr() == pointer


@pytest.mark.parametrize("bucket_bytes", [_SMALL_BUCKETS, _LARGE_BUCKETS])
def test_half_complex_numbers_are_averaged_as_pairs(bucket_bytes: int) -> None:
    mean = _mean([_replica(rank, 40, 2, dtype=torch.float16) for rank in range(2)]).tolist()
    assert run_ranks(_average_half_complex, 2, bucket_bytes) == [(mean, True)] * 2


def _average_shared_memory(rank: int, bucket_bytes: int) -> tuple[bool, bool, bool, list[float]]:
    shared = nn.Parameter(_replica(rank, 30)).share_memory_()
    storage = (shared.untyped_storage().data_ptr(), shared.untyped_storage().nbytes())
    _round(_averager(bucket_bytes=bucket_bytes), [shared])
    same = storage == (shared.untyped_storage().data_ptr(), shared.untyped_storage().nbytes())
    return shared.is_shared(), same, shared._base is None, shared.tolist()


@pytest.mark.parametrize("bucket_bytes", [_SMALL_BUCKETS, _LARGE_BUCKETS])
def test_shared_memory_stays_shared(bucket_bytes: int) -> None:
    mean = _mean([_replica(rank, 30) for rank in range(2)]).tolist()
    assert run_ranks(_average_shared_memory, 2, bucket_bytes) == [(True, True, True, mean)] * 2


def _average_channels_last(rank: int) -> tuple[list[float], bool]:
    averager = _averager(bucket_bytes=_SMALL_BUCKETS)
    conv = nn.Conv2d(3, 2, 3)
    _round(averager, conv.parameters())
    conv.to(memory_format=torch.channels_last)
    conv.weight.data.copy_(_replica(rank, 2, 3, 3, 3))
    _round(averager, conv.parameters())
    return conv.weight.flatten().tolist(), conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_turned_to_channels_last_between_rounds_is_seen() -> None:
    mean = _mean([_replica(rank, 2, 3, 3, 3) for rank in range(2)]).flatten().tolist()
    assert run_ranks(_average_channels_last, 2) == [(mean, True)] * 2


class _Ops(TorchDispatchMode):
    """Records which operations on tensors run, and how many bytes the largest fresh result has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fresh_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(result, Tensor) and not func.is_view and not str(func).split(".")[1].endswith("_"):
            self.fresh_bytes.append(result.untyped_storage().nbytes())
        return result


def _average_alone(rank: int, group_sizes: Sequence[int]) -> tuple[list[str], list[float], int, int]:
    group = None
    for first in range(0, dist.get_world_size(), group_sizes[-1]):
        made = dist.new_group(list(range(first, first + group_sizes[-1])))
        group = made if first == rank // group_sizes[-1] * group_sizes[-1] else group
    weight = _replica(rank, 9)
    version = weight._version
    periodic = averagers.PeriodicModelAverager(2, 0, group)
    sizes = {2 * (level + 1): size for level, size in enumerate(group_sizes)}
    hierarchical = averagers.HierarchicalModelAverager(sizes, 0, group)
    with _Ops() as ops:
        for _ in range(4):
            periodic.average_parameters([weight])
            hierarchical.average_parameters([weight])
        averagers.average_parameters([weight], group)
        periodic.finish([weight])
        with periodic.averaged([weight]):
            pass
    names = [name for name in ops.names if "detach" not in name]
    return names, weight.tolist(), weight._version - version, periodic.step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_world_or_a_group_of_one_counts_and_touches_nothing(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(_average_alone, world_size, [1])):
        assert found == ([], _replica(rank, 9).tolist(), 0, 4)


# Memory


def _allocations(rank: int) -> tuple[int, int, int]:
    bucket_bytes = 2**14
    averager = _averager(bucket_bytes=bucket_bytes)
    shapes = [(300, 500), (5000,), (100, 64)] + [(50, 30)] * 50
    params = [torch.zeros(shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    with _Ops() as first:
        _round(averager, params)
    with _Ops() as second:
        _round(averager, params)
    model_bytes = sum(param.nbytes for param in params)
    return model_bytes // bucket_bytes, sum(first.fresh_bytes) // bucket_bytes, sum(second.fresh_bytes)


def test_a_round_allocates_its_buckets_once_and_not_the_model() -> None:
    for model_buckets, first_buckets, second_bytes in run_ranks(_allocations, 2):
        assert model_buckets > 60
        # Four in flight: values each, and for 16-bit floats what was received and its sum in float32.
        assert first_buckets <= 4 * 4
        assert second_bytes <= 1024


def _refused(rank: int) -> str:
    with pytest.raises(averagers.UnsupportedTensorError) as caught:
        _averager().average_parameters([("head.weight", torch.zeros(2).to(torch.float8_e4m3fn))])
    return str(caught.value)


def test_float8_is_refused_by_name() -> None:
    for message in run_ranks(_refused, 2):
        assert "head.weight" in message
        assert "its dtype is torch.float8_e4m3fn" in message
