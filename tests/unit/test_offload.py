"""Anchors and buffers kept on the CPU: where they lie, and that weights end the same as where nothing is offloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import averagers
from second_device import DEVICE, second_device  # noqa: F401 - a fixture

WORLD = 2
STEPS = 12

_OUTER = averagers.Outer(functools.partial(torch.optim.AdamW, lr=0.1))

METHODS: dict[str, dict[str, Any]] = {
    "codec": {"codec": averagers.Int8()},
    "16 bits": {"codec": averagers.Cast(torch.bfloat16)},
    "error feedback": {"codec": averagers.Int4(error_feedback=0.95)},
    "sparse": {"codec": averagers.TopK()},
    "clipping": {"rule": averagers.CenteredClipping(0.5)},
    "momentum": {"mixer": averagers.Nesterov()},
    "slow momentum": {"mixer": averagers.SlowMo(0.5)},
    "outer optimizer": {"mixer": _OUTER},
    "elastic": {"mixer": averagers.Elastic(0.2)},
    "momentum, coded": {"mixer": averagers.Nesterov(), "codec": averagers.Int4(error_feedback=0.9)},
    "late": {"mixer": averagers.Nesterov(), "codec": averagers.Int8(), "overlap": averagers.Delayed(2)},
    "late, carried": {"codec": averagers.Int4(error_feedback=0.9), "overlap": averagers.Delayed(1, carry=True)},
    "fragments": {"mixer": averagers.Nesterov(), "fragments": 2},
}


def model_of(rank: int, device: Any) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    shapes = ((700,), (3, 5), (4, 3, 2, 2))
    tensors = [torch.randn(shape, generator=random) for shape in shapes]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    return [tensor.to(device) for tensor in [*tensors, torch.randn(90, generator=random).to(torch.bfloat16)]]


def trained(
    options: dict[str, Any], device: Any, place: Callable[[], Any], resumed: dict[str, Any] | None = None
) -> list[tuple[list[list[float]], set[str]]]:
    """Return each replica's weights after some steps, and the devices of what its averager keeps.

    With ``resumed`` the second half is another averager's, with these options, that loads the first one's state.
    """

    def train(group: averagers.ReplicaGroup) -> tuple[list[list[float]], set[str]]:
        with place():
            model = model_of(group.rank, device)
            random = torch.Generator().manual_seed(10 + group.rank)
            averager = averagers.PeriodicModelAverager(3, process_group=group, **options)
            devices: set[str] = set()
            for step in range(STEPS):
                for tensor in model:
                    noise = torch.randn(tensor.shape, generator=random)
                    tensor.add_(noise.to(tensor.device, tensor.dtype), alpha=0.1)
                averager.average_parameters([{"params": model, "lr": 0.1}])
                state = averager.state_dict()
                devices |= {leaf.device.type for leaf in tree_leaves(kept(state)) if isinstance(leaf, torch.Tensor)}
                if step == STEPS // 2 and resumed is not None:
                    averager = averagers.PeriodicModelAverager(3, process_group=group, **resumed)
                    averager.load_state_dict(state)
            averager.finish([{"params": model, "lr": 0.1}])
            return [tensor.to("cpu").flatten().tolist() for tensor in model], devices

    return averagers.run_replicas(train, WORLD, timeout_s=60)


def kept(state: dict[str, Any]) -> list[Any]:
    """Return what an averager keeps between rounds; rounds under way lie where the weights do."""
    return [anchor for name, anchor in state.items() if name.startswith("anchor_")]


@pytest.mark.parametrize("name", METHODS)
def test_what_is_offloaded_lies_on_the_cpu_and_changes_no_weights(name: str, second_device: Any) -> None:  # noqa: F811
    options = METHODS[name]
    here = trained(options, "cpu", nullcontext)
    beside = trained(options, DEVICE, second_device)
    offloaded = trained({**options, "offload": "cpu"}, DEVICE, second_device)
    assert [weights for weights, _ in offloaded] == [weights for weights, _ in here]
    assert [weights for weights, _ in beside] == [weights for weights, _ in here]
    assert {device for _, devices in offloaded for device in devices} == {"cpu"}
    assert all(DEVICE.type in devices for _, devices in beside)


@pytest.mark.parametrize("name", ["error feedback", "momentum", "outer optimizer", "late"])
def test_a_state_goes_from_offloaded_to_not_and_back(name: str, second_device: Any) -> None:  # noqa: F811
    options = METHODS[name]
    offloaded = {**options, "offload": "cpu"}
    whole = [weights for weights, _ in trained(options, "cpu", nullcontext)]
    for before, after in ((offloaded, options), (options, offloaded)):
        assert [weights for weights, _ in trained(before, DEVICE, second_device, after)] == whole


def test_offload_is_refused_where_there_is_nothing_to_keep_and_for_other_devices() -> None:
    def build(group: averagers.ReplicaGroup) -> list[str]:
        messages = []
        for options in ({"offload": "cpu"}, {"offload": "disk", "codec": averagers.Int8()}, {"offload": True}):
            with pytest.raises((averagers.InvalidValueError, averagers.InvalidTypeError)) as caught:
                averagers.PeriodicModelAverager(4, process_group=group, **options)
            messages.append(str(caught.value))
        with pytest.raises(averagers.InvalidValueError) as caught:
            averagers.HierarchicalModelAverager(
                {2: 1, 4: 2}, process_group=group, codec={4: averagers.Int8()}, offload={2: "cpu"}
            )
        return [*messages, str(caught.value)]

    nothing, value, kind, level = averagers.run_replicas(build, 2)[0]
    assert "offload='cpu' has nothing to keep on the CPU" in nothing
    assert "offload must be 'cpu' or None, got 'disk'" in value
    assert "offload must be a str such as 'cpu', or None, got True of type bool" in kind
    assert "offload={2: 'cpu'} has nothing to keep" in level


def test_a_level_of_a_hierarchy_may_keep_its_own_on_the_cpu_alone(second_device: Any) -> None:  # noqa: F811
    def train(group: averagers.ReplicaGroup) -> list[set[str]]:
        with second_device():
            averager = averagers.HierarchicalModelAverager(
                {2: 1, 4: 2}, process_group=group, codec=averagers.Int8(), offload={4: "cpu"}
            )
            model = model_of(group.rank, DEVICE)
            for _ in range(5):
                averager.average_parameters(model)
            state = averager.state_dict()
            return [{one.device.type for one in state[f"anchor_{level}"]["values"].values()} for level in (0, 1)]

    assert averagers.run_replicas(train, 2) == [[{DEVICE.type}, {"cpu"}]] * 2
