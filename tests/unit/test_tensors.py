"""What is averaged: every form of input, every refusal, and views of elements against a flatten oracle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from averagers.errors import AveragersError, InvalidTypeError, InvalidValueError, UnsupportedTensorError
from averagers.reduction import selection
from averagers.reduction.pytorch import PYTORCH
from averagers.reduction.selection import Listing, elements, overlapping

_OPERATIONS = PYTORCH.operations


def select_tensors(params: Any, once_trainable: set[int]) -> list[tuple[Any, Tensor]]:
    selected = selection.select_tensors(params, once_trainable, _OPERATIONS)
    assert all(one.whole is one.tensor for one in selected)
    return [(one.record, one.tensor) for one in selected]


def select_every_tensor(tensors: Any) -> list[tuple[Any, Tensor]]:
    return [(one.record, one.tensor) for one in selection.select_every_tensor(tensors, _OPERATIONS)]


def in_memory_order(tensor: Tensor) -> Tensor:
    return selection.in_memory_order(_OPERATIONS.reals(tensor))


def _select(params: Any, once_trainable: set[int] | None = None) -> list[tuple[str, Tensor]]:
    """Return the names and tensors selected."""
    selected = select_tensors(params, set() if once_trainable is None else once_trainable)
    return [(record.name, tensor) for record, tensor in selected]


def _describe(params: Any) -> Listing:
    return selection.describe([record for record, _ in select_tensors(params, set())], _OPERATIONS)


def _stride_order(tensor: Tensor) -> tuple[int, ...]:
    return _describe([tensor]).descriptions[0].order


def _overlapping(params: Any) -> frozenset[int]:
    return overlapping([record for record, _ in select_tensors(params, set())])


def _names(params: Any, once_trainable: set[int] | None = None) -> list[str]:
    return [name for name, _ in _select(params, once_trainable)]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


# Forms of input


def test_parameters_are_taken_in_order_and_named_by_position() -> None:
    model = _model()
    selected = _select(model.parameters())
    assert [name for name, _ in selected] == ["#0", "#1", "#2", "#3"]
    assert all(taken is given_ for (_, taken), given_ in zip(selected, model.parameters(), strict=True))


def test_named_parameters_keep_their_names() -> None:
    assert _names(_model().named_parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_parameter_without_a_name_is_named_by_position() -> None:
    assert _names([("", torch.zeros(1)), torch.zeros(1)]) == ["#0", "#1"]


def test_parameter_groups_are_read_through() -> None:
    model = _model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], lr=1.0
    )
    selected = _select(optimizer.param_groups)
    assert all(taken is given_ for (_, taken), given_ in zip(selected, model.parameters(), strict=True))


def test_the_names_of_an_optimizer_built_with_names_are_kept() -> None:
    optimizer = torch.optim.SGD(_model().named_parameters(), lr=1.0)
    assert _names(optimizer.param_groups) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_parameter_group_may_hold_one_tensor_pairs_or_a_generator() -> None:
    groups = [
        {"params": torch.zeros(1)},
        {"params": [("w", torch.zeros(1)), torch.zeros(1)]},
        {"params": (torch.zeros(1) for _ in range(2))},
    ]
    assert _names(groups) == ["#0", "w", "#2", "#3", "#4"]


def test_a_mix_of_forms_is_read_in_order() -> None:
    assert _names([torch.zeros(1), ("b", torch.zeros(1)), {"params": [torch.zeros(1)]}]) == ["#0", "b", "#2"]


def test_a_generator_is_read_once() -> None:
    reads = []

    def params() -> Iterator[Tensor]:
        reads.append("start")
        yield torch.zeros(2)

    assert len(_select(params())) == 1
    assert reads == ["start"]


def test_nothing_is_nothing() -> None:
    assert _select([]) == []
    assert _select(iter(())) == []
    assert _select([{"params": []}]) == []


def test_plain_tensors_are_averaged_whether_or_not_they_require_a_gradient() -> None:
    assert len(_select([torch.zeros(1), torch.zeros(1, requires_grad=True)])) == 2


def test_a_list_is_not_changed_by_what_has_a_gradient() -> None:
    with_grad, without = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with_grad.grad = torch.ones(1)
    assert len(_select([with_grad, without])) == 2


# Wrong types


@pytest.mark.parametrize(
    "params",
    [
        None,
        3,
        "weights",
        torch.zeros(2),
        nn.Parameter(torch.zeros(2)),
        {"params": []},
        nn.Linear(1, 1),
        {"w": torch.zeros(1)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_list_of_tensors_is_refused_by_its_type(params: Any) -> None:
    with pytest.raises(InvalidTypeError, match=f"params must be an iterable .*, got a single {type(params).__name__}"):
        _select(params)


@pytest.mark.parametrize(
    ("params", "where", "kind"),
    [
        ([torch.zeros(1), None], r"params\[1\]", "NoneType"),
        ([torch.zeros(1), 2.0], r"params\[1\]", "float"),
        (["weight"], r"params\[0\]", "str"),
        ([[torch.zeros(1)]], r"params\[0\]", "list"),
        ([(torch.zeros(1), "name")], r"params\[0\]", "tuple"),
        ([("name", torch.zeros(1), 1)], r"params\[0\]", "tuple"),
        ([("name", None)], r"params\[0\]", "tuple"),
        ([{"parameters": [torch.zeros(1)]}], r"params\[0\]", "dict"),
        ([torch.zeros(1), {"params": [torch.zeros(1), 5]}], r"params\[1\]\['params'\]\[1\]", "int"),
        ([{"params": 3}], r"params\[0\]\['params'\]", "int"),
    ],
)
def test_a_wrong_item_is_refused_by_position_and_type(params: Any, where: str, kind: str) -> None:
    with pytest.raises(InvalidTypeError, match=rf"^{where} must be a tensor, .* got {kind}$") as caught:
        _select(params)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, AveragersError)


def test_a_group_with_more_parameters_than_names_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"params\[0\]\['param_names'\] .* has 1 names, and there are 2"):
        _select([{"params": [torch.zeros(1), torch.zeros(1)], "param_names": ["a"]}])


# Which dtypes


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_floating_and_complex_tensors_are_averaged(dtype: torch.dtype) -> None:
    assert len(_select([torch.zeros(2, dtype=dtype)])) == 1


def test_half_complex_tensors_are_averaged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them experimental
        assert len(_select([torch.zeros(2, dtype=torch.complex32)])) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64],
    ids=str,
)
def test_integer_and_boolean_tensors_are_passed_over(dtype: torch.dtype) -> None:
    assert _select([torch.zeros(2, dtype=dtype), torch.zeros(2)], set())[0][0] == "#1"
    assert _select([nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)], {0}) == []


# Refusals


class _Wrapped(Tensor):
    """A traceable wrapper subclass, as quantized and sharded tensors are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Tensor:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on a tensor that must only be refused")


def _freed() -> Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


def _sparse(make: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta
        return getattr(torch.eye(2), make)()


def _nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the strided layout is a prototype
        return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])


_REFUSED = {
    "sparse": (lambda: _sparse("to_sparse"), "torch.sparse_coo"),
    "csr": (lambda: _sparse("to_sparse_csr"), "torch.sparse_csr"),
    "mkldnn": (lambda: torch.zeros(2).to_mkldnn(), "torch._mkldnn"),
    "nested": (_nested, "nested"),
    "float8": (lambda: torch.zeros(2).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    "float8 of the other kind": (lambda: torch.zeros(2).to(torch.float8_e5m2), "torch.float8_e5m2"),
    "uninitialized": (lambda: nn.LazyLinear(3).weight, "not initialized yet"),
    "wrapper subclass": (lambda: _Wrapped(torch.zeros(2)), "it is a _Wrapped"),
    "meta": (lambda: torch.zeros(2, device="meta"), "meta device"),
    "inference mode": (_inference, "inference_mode"),
    "freed": (_freed, "memory is freed"),
    "expanded": (lambda: torch.zeros(1, 3).expand(4, 3), "expand"),
}


@pytest.mark.parametrize("kind", list(_REFUSED))
def test_what_cannot_be_averaged_in_place_is_refused_by_name_and_reason(kind: str) -> None:
    make, reason = _REFUSED[kind]
    with pytest.raises(UnsupportedTensorError, match="cannot be averaged") as caught:
        _select([("fine", torch.zeros(1)), ("head.weight", make())])
    assert "head.weight" in str(caught.value)
    assert reason in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("kind", ["sparse", "float8", "uninitialized", "meta", "expanded"])
def test_a_parameter_never_trained_is_passed_over_whatever_it_is(kind: str) -> None:
    if kind == "uninitialized":
        parameter: nn.Parameter = nn.UninitializedParameter(requires_grad=False)
    else:
        parameter = nn.Parameter(_REFUSED[kind][0](), requires_grad=False)
    assert _select([parameter]) == []


def test_a_tensor_expanded_over_one_row_is_like_any_other() -> None:
    assert len(_select([torch.zeros(3).expand(1, 3)])) == 1


def test_an_empty_tensor_is_accepted_in_any_shape() -> None:
    assert len(_select([torch.zeros(0), torch.zeros(2, 0), torch.zeros(3, 4)[:, :0]])) == 3


def test_an_empty_expanded_tensor_shares_no_element_and_is_accepted() -> None:
    assert len(_select([torch.zeros(0).expand(5, 0)])) == 1


def test_a_broadcast_takes_integers_and_float8_too_and_refuses_what_has_no_memory() -> None:
    taken = [
        ("count", torch.tensor(3)),
        ("flag", torch.tensor(True)),
        ("f8", torch.zeros(2).to(torch.float8_e5m2)),
    ]
    assert [record.name for record, _ in select_every_tensor(taken)] == ["count", "flag", "f8"]
    with pytest.raises(UnsupportedTensorError, match=r"mask .*expand"):
        select_every_tensor([("mask", torch.zeros(1).expand(3))])


# Frozen parameters


def test_a_parameter_never_trainable_is_left_out_and_its_position_counted() -> None:
    params = [nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))]
    once_trainable: set[int] = set()
    assert _names(params, once_trainable) == ["#1"]
    assert once_trainable == {1}


def test_a_parameter_frozen_later_is_averaged_on() -> None:
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    once_trainable: set[int] = set()
    _select(params, once_trainable)
    params[0].requires_grad_(False)
    assert _names(params, once_trainable) == ["#0", "#1"]


def test_a_parameter_thawed_later_is_averaged_from_then_on_and_stays() -> None:
    parameter = nn.Parameter(torch.zeros(1), requires_grad=False)
    once_trainable: set[int] = set()
    assert _names([parameter], once_trainable) == []
    assert _names([parameter.requires_grad_(True)], once_trainable) == ["#0"]
    assert _names([parameter.requires_grad_(False)], once_trainable) == ["#0"]


def test_a_frozen_parameter_seen_before_under_the_other_name_is_taken_by_its_position() -> None:
    assert _names([nn.Parameter(torch.zeros(1), requires_grad=False)], {0}) == ["#0"]
    assert _names([nn.Parameter(torch.zeros(1), requires_grad=False)], {1}) == []


# Duplicates


def test_a_tensor_listed_twice_is_taken_once_under_its_first_name() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    assert _names([("encoder", weight), ("decoder", weight)]) == ["encoder"]


def test_two_views_of_the_same_elements_are_one() -> None:
    weight = torch.zeros(4)
    assert _names([weight, weight[:], weight.detach(), weight.view(4)]) == ["#0"]


def test_views_of_other_elements_or_another_shape_are_taken_too() -> None:
    weight = torch.zeros(4)
    assert _names([weight, weight[1:], weight.view(2, 2)]) == ["#0", "#1", "#2"]


def test_two_parameters_of_one_memory_are_one_though_the_first_is_frozen() -> None:
    trained = nn.Parameter(torch.zeros(2))
    frozen = nn.Parameter(trained.detach(), requires_grad=False)
    assert _names([frozen, trained]) == ["#1"]


def test_empty_tensors_are_not_mistaken_for_each_other() -> None:
    assert _names([torch.zeros(0), torch.zeros(0)]) == ["#0", "#1"]


# Description


def test_a_description_holds_what_ranks_must_agree_on_and_nothing_of_this_process() -> None:
    listing = _describe([("w", torch.zeros(2, 3).t()), ("z", torch.zeros(4, dtype=torch.complex64))])
    first, second = listing.descriptions
    assert (first.name, first.shape, first.dtype, first.order, first.device) == (
        "w",
        (3, 2),
        "float32",
        (1, 0),
        "cpu:0",
    )
    assert (second.shape, second.dtype, second.order) == ((4,), "complex64", (0,))
    assert listing.num_elements == 10


def test_the_digest_depends_on_name_shape_dtype_and_order_of_strides_alone() -> None:
    def digest(name: str, tensor: Tensor) -> bytes:
        return _describe([(name, tensor)]).digest

    reference = digest("w", torch.zeros(2, 3))
    assert digest("w", torch.ones(2, 3)) == reference
    assert digest("w", torch.zeros(2, 4)[:, :3]) == reference
    others = [
        digest("v", torch.zeros(2, 3)),
        digest("w", torch.zeros(3, 2)),
        digest("w", torch.zeros(2, 3, dtype=torch.float64)),
        digest("w", torch.zeros(3, 2).t()),
    ]
    assert reference not in others
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.zeros(()), ()),
        (torch.zeros(1, 1), ()),
        (torch.zeros(2, 3), (0, 1)),
        (torch.zeros(2, 3).t(), (1, 0)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3)),
    ],
)
def test_the_order_of_strides_is_from_the_largest_to_the_smallest_without_ones(
    tensor: Tensor, order: tuple[int, ...]
) -> None:
    assert _stride_order(tensor) == order


# Memory shared between tensors


def test_tensors_whose_memory_overlaps_are_told_from_the_others() -> None:
    storage = torch.zeros(20)
    tensors = [torch.zeros(5), storage[0:10], storage[9:12], storage[12:14], storage[13:20], torch.zeros(5)]
    assert _overlapping(tensors) == {1, 2, 3, 4}


def test_neighbors_in_one_storage_do_not_overlap() -> None:
    storage = torch.zeros(20)
    assert _overlapping([storage[10:], storage[:10]]) == frozenset()


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=6))
def test_every_pair_that_shares_an_element_is_found(ranges: list[tuple[int, int]]) -> None:
    spans = list({(min(pair), max(pair) + 1) for pair in ranges})
    storage = torch.zeros(20)
    expected = {
        index
        for index, (start, stop) in enumerate(spans)
        if any(start < end and begin < stop for other, (begin, end) in enumerate(spans) if other != index)
    }
    assert _overlapping([storage[start:stop] for start, stop in spans]) == expected


# Views of elements


@st.composite
def _views(draw: st.DrawFn) -> Tensor:
    """A view of distinct numbers in memory, with random shape, order of dimensions, slices and gaps."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    base = torch.arange(float(math.prod(shape))).reshape(shape)
    view = base.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(view.shape):
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        step = draw(st.integers(1, 3))
        view = view[(slice(None),) * dim + (slice(start, stop, step),)]
    for _ in range(draw(st.integers(0, 2))):
        view = view.unsqueeze(draw(st.integers(0, view.dim())))
    return view


@given(_views(), st.data())
def test_elements_are_those_of_the_flattened_view(view: Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, view.numel()))
    stop = data.draw(st.integers(start, view.numel()))
    flat = [block.reshape(-1) for block in elements(view, start, stop)]
    assert torch.equal(torch.cat([torch.empty(0), *flat]), view.reshape(-1)[start:stop])


@given(_views(), st.data())
def test_writing_to_elements_writes_to_the_view_and_to_nothing_else(view: Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, view.numel()))
    stop = data.draw(st.integers(start, view.numel()))
    whole = torch.empty(0).set_(view.untyped_storage())
    written = set(view.reshape(-1)[start:stop].tolist())
    expected = [-1.0 if value in written else value for value in whole.tolist()]
    for block in elements(view, start, stop):
        block.fill_(-1.0)
    assert whole.tolist() == expected


@given(_views())
def test_memory_order_has_the_same_elements_and_falling_strides(view: Tensor) -> None:
    ordered = in_memory_order(view)
    assert sorted(ordered.reshape(-1).tolist()) == sorted(view.reshape(-1).tolist())
    assert ordered.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    strides = [stride for stride, size in zip(ordered.stride(), ordered.shape, strict=True) if size > 1]
    assert strides == sorted(strides, reverse=True)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_dense_tensor_is_flat_in_memory_order_whatever_the_order_of_its_dimensions(
    shape: list[int], data: st.DataObject
) -> None:
    dense = torch.arange(float(math.prod(shape))).reshape(shape)
    permuted = dense.permute(data.draw(st.permutations(range(len(shape)))))
    ordered = in_memory_order(permuted)
    assert ordered.is_contiguous()
    assert torch.equal(ordered.reshape(-1), dense.reshape(-1))


def test_two_tensors_of_one_order_of_strides_pair_their_elements_whatever_the_gaps() -> None:
    dense = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    gaps = torch.zeros(4, 6, 4)[::2, ::2].permute(2, 0, 1)
    gaps.copy_(dense)
    assert _stride_order(gaps) == _stride_order(dense)
    assert torch.equal(in_memory_order(gaps), in_memory_order(dense))


def test_complex_numbers_are_seen_as_pairs_of_reals() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert in_memory_order(tensor).tolist() == [[1, 2], [3, -4]]


def test_conjugate_views_are_seen_as_they_lie_in_memory() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert in_memory_order(tensor.conj()).tolist() == [[1, 2], [3, -4]]


def test_writing_in_memory_order_is_seen_by_autograd() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    before = weight._version
    view = in_memory_order(weight)
    assert not view.requires_grad
    view.add_(1)
    assert weight._version == before + 1
    assert torch.equal(weight, torch.ones(2, 3))
