"""The averagers: classes that fill in when to average and with whom, and one round without schedule."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar

from averagers.arguments import check_axes, per_level
from averagers.base import ModelAverager
from averagers.engine import ScheduledAverager
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.events import Observer
from averagers.hierarchy import Hierarchy
from averagers.mixing.anchors import Parts
from averagers.mixing.fragments import Fragments
from averagers.mixing.mixers import Mixer
from averagers.mixing.overlap import Overlap
from averagers.pace import Adaptive
from averagers.reduction.codecs import Codec
from averagers.reduction.method import Method
from averagers.reduction.rules import Rule
from averagers.schedule import Every, Hierarchical, Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
]

_BUCKET_BYTES = 4 * 2**20


class PeriodicModelAverager(ScheduledAverager):
    """Averages parameters among all ranks, every ``period`` steps after the warm-up.

    Averages at step ``s`` if ``s >= warmup_steps`` and ``(s - warmup_steps) % period == 0``. With plain
    data parallel as warm-up this is `post-local SGD <https://arxiv.org/abs/1808.07217>`_.

    Args:
        period: Steps from one round to the next; None with ``schedule``.
        warmup_steps: Steps before the first round.
        process_group: The ranks that average: a process group, or a ``DeviceMesh`` of one axis; None means
            all of them.
        schedule: When to average, in place of ``period`` and ``warmup_steps``, such as ``Adaptive(overhead=0.05)``.
        bucket_bytes: Most bytes of a bucket; about four buckets of memory are used on top of the model, for
            16-bit floats up to twelve.
        timeout_s: Seconds after which a round fails; None means the process group's own timeout.
        observers: Called with each event of a round, see `averagers.events`.
        measure_drift: Measure the replicas' distance from the mean in each round, for the observers;
            costs a pass over the weights and one more small message.
        nodes: The node of each rank of the process group, in its order, such as ``[0, 0, 1, 1]``; None to tell nodes by
            their host names. Where a level's groups span nodes with equally many ranks, two at least, rounds sum
            within each node first, so that fewest bytes cross the links between nodes.
        codec: How the displacements from the last round's weights travel in fewer bytes, such as ``Int8()``; None
            for the weights themselves. The first round, and dtypes wider than float32, go as they are. Costs four
            bytes an element for the weights of the last round.
        rule: What takes the place of the mean where a rank may send nonsense, such as ``TrimmedMean(1)``; None for
            the mean. Rounds then do not sum within nodes.
        mixer: What the mean does to the weights, such as ``Nesterov()`` for DiLoCo; None to take their place. The
            first round takes their place whatever the mixer, and makes the anchor that later rounds move.
        overlap: When the mean lands, such as ``Delayed(steps=5)`` to train on meanwhile; None for at once.
        fragments: Into how many parts the model is cut, tensors in turn, or lists of the names of each part's
            parameters or modules. Each part has its own place in the period, so that the peak of traffic is a part's.
        offload: ``"cpu"`` to keep what outlasts a round in the CPU's memory: the weights of the last round, and what
            the mixer and the codec's error feedback add. The mixer then works there. None for the parameters' device.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.
        NotInitializedError: ``torch.distributed.init_process_group`` was not called.
        DisagreementError: the ranks gave different arguments.
        RoundFailedError: a rank died, or did not build its averager within the timeout.

    Example:
        >>> averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
        >>> for batch, labels in data:
        ...     optimizer.zero_grad()
        ...     loss_fn(model(batch), labels).backward()
        ...     optimizer.step()
        ...     averager.average_parameters(model.parameters())
        >>> averager.finish(model.parameters())
    """

    def __init__(
        self,
        period: int | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        schedule: Schedule | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        timeout_s: float | None = None,
        observers: Iterable[Observer] = (),
        measure_drift: bool = False,
        nodes: Sequence[Hashable] | None = None,
        codec: Codec | None = None,
        rule: Rule | None = None,
        mixer: Mixer | None = None,
        overlap: Overlap | None = None,
        fragments: int | Sequence[Sequence[str]] | None = None,
        offload: str | None = None,
    ) -> None:
        chosen = _schedule(period, warmup_steps, schedule)
        if isinstance(chosen, Every):
            _warn_of_period_one(chosen.period)
        if isinstance(chosen, Adaptive) and overlap is not None:
            raise InvalidValueError(
                f"schedule=Adaptive cannot work with overlap={overlap!r}, under which rounds cost next to nothing: "
                "give a period, or EverySeconds"
            )
        super().__init__(
            process_group,
            chosen,
            None,
            {"class": "PeriodicModelAverager"},
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            observers=observers,
            measure_drift=measure_drift,
            nodes=nodes,
            parts=_parts(
                [chosen.period if isinstance(chosen, Every) else 0], codec, rule, mixer, overlap, fragments, offload
            ),
        )

    @property
    def period(self) -> int:
        """Steps from one round to the next.

        Raises:
            AttributeError: the schedule has no fixed period.
        """
        if not isinstance(self._schedule, Every):
            raise AttributeError(f"a {type(self._schedule).__name__} has no fixed period")
        return self._schedule.period


class HierarchicalModelAverager(ScheduledAverager):
    """Averages in small groups often and in large groups seldom: `hierarchical SGD <https://arxiv.org/abs/2010.12998>`_.

    Averages at step ``s`` if ``s >= warmup_steps`` and some period divides ``s``; of those that do the
    longest decides the group. The groups of a level are contiguous blocks of the process group's ranks.

    Args:
        period_group_size_dict: Maps the period of each level, in steps, to its groups' size, in ranks, in
            any order. Each size divides the next longer period's; the longest period's is the size of
            the process group.
        warmup_steps: Steps before the first round.
        process_group: The ranks that average: a process group, or a ``DeviceMesh`` of one axis; None means
            all of them.
        bucket_bytes: Most bytes of a bucket; about four buckets of memory are used on top of the model, for
            16-bit floats up to twelve.
        timeout_s: Seconds after which a round fails; None means the process group's own timeout.
        observers: Called with each event of a round, see `averagers.events`.
        measure_drift: Measure the replicas' distance from the mean in each round, for the observers;
            costs a pass over the weights and one more small message.
        nodes: The node of each rank of the process group, in its order, such as ``[0, 0, 1, 1]``; None to tell nodes by
            their host names. Where a level's groups span nodes with equally many ranks, two at least, rounds sum
            within each node first, so that fewest bytes cross the links between nodes.
        codec: How the displacements from the last round's weights travel in fewer bytes: for every level, such
            as ``Int8()``, or by period, such as ``{32: Int8()}``; None for the weights themselves. The first round,
            and dtypes wider than float32, go as they are. Costs four bytes an element for each level with a codec.
        rule: What takes the place of the mean where a rank may send nonsense, such as ``TrimmedMean(1)``, for every
            level or by period; None for the mean. Rounds with one do not sum within nodes.
        mixer: What the mean does to the weights, for every level or by period, such as ``{32: Nesterov()}`` for DiLoCo
            between nodes; None to take their place. A level's first round takes their place whatever the mixer, and
            makes the anchor that its later rounds move.
        overlap: When the mean lands, such as ``Delayed(steps=5)`` to train on meanwhile, for every level or by period;
            None for at once.
        fragments: Into how many parts the model is cut, tensors in turn, or lists of the names of each part's
            parameters or modules, for every level or by period. Each part has its own place in the period, so that the
            peak of traffic is a part's.
        offload: ``"cpu"`` to keep what outlasts a round in the CPU's memory, for every level or by period: the weights
            of the last round, and what the mixer and the codec's error feedback add. The mixer then works there. None
            for the parameters' device.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.
        NotInitializedError: ``torch.distributed.init_process_group`` was not called.
        DisagreementError: the ranks gave different arguments.
        RoundFailedError: a rank died, or did not build its averager within the timeout.

    Example:
        Every 4 steps among 2 neighbors, every 32 steps among all 4 ranks:

        >>> averager = averagers.HierarchicalModelAverager({4: 2, 32: 4}, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())  # after each optimizer.step()
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        timeout_s: float | None = None,
        observers: Iterable[Observer] = (),
        measure_drift: bool = False,
        nodes: Sequence[Hashable] | None = None,
        codec: Codec | Mapping[int, Codec | None] | None = None,
        rule: Rule | Mapping[int, Rule | None] | None = None,
        mixer: Mixer | Mapping[int, Mixer | None] | None = None,
        overlap: Overlap | Mapping[int, Overlap | None] | None = None,
        fragments: int | Sequence[Sequence[str]] | Mapping[int, Any] | None = None,
        offload: str | Mapping[int, str | None] | None = None,
    ) -> None:
        groups = self._framework_of(process_group).groups
        ranks = groups.members(groups.resolve(process_group))
        overall_size = None if ranks is None else len(ranks)
        hierarchy = Hierarchy.from_periods(period_group_size_dict, overall_size=overall_size)
        schedule = Hierarchical(hierarchy.periods, warmup_steps=warmup_steps)
        _warn_of_period_one(hierarchy.periods[-1])
        sizes = {level.period: level.group_size for level in hierarchy.levels}
        super().__init__(
            process_group,
            schedule,
            hierarchy,
            {
                "class": "HierarchicalModelAverager",
                # As text: checkpoint formats differ in what they make of dicts with integer keys.
                "period_group_size_dict": str(sizes),
            },
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            observers=observers,
            measure_drift=measure_drift,
            nodes=nodes,
            parts=_parts(hierarchy.periods, codec, rule, mixer, overlap, fragments, offload),
        )
        self._periods = hierarchy.periods

    @classmethod
    def from_mesh(cls, mesh: Any, axis_period_dict: Mapping[str, int], warmup_steps: int = 0, **options: Any) -> Self:
        """Build levels from the axes of a device mesh along which the model is replicated.

        Every rank of the mesh must call this. With sharded or tensor-parallel parameters (``DTensor``) each rank's
        shards are averaged with those who hold the same shards.

        Args:
            mesh: A ``DeviceMesh`` with named axes, the outermost first.
            axis_period_dict: Maps axes to the period of averaging along each, in steps, in any order. An axis
                that lies within another has the shorter period.
            warmup_steps: Steps before the first round.
            options: The keyword arguments of the constructor.

        Raises:
            InvalidTypeError, InvalidValueError: an argument breaks a rule.

        Example:
            Shards within each node, and averaging every 50 steps across the nodes:

            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
            >>> averager = averagers.HierarchicalModelAverager.from_mesh(mesh, {"replicate": 50})
        """
        names = check_axes(axis_period_dict, getattr(mesh, "mesh_dim_names", None))
        replicas = mesh[names if len(names) > 1 else names[0]]
        sizes = accumulate((mesh.size(mesh.mesh_dim_names.index(name)) for name in reversed(names)), mul)
        periods = {axis_period_dict[name]: size for name, size in zip(reversed(names), sizes, strict=True)}
        whole = replicas if len(names) == 1 else replicas._flatten()
        return cls(periods, warmup_steps, whole.get_group(), **options)

    @property
    def period_process_group_dict(self) -> OrderedDict[int, Any]:
        """The process group of each period, ascending; this rank's own, empty outside the process group."""
        return OrderedDict(
            (period, route.group.handle) for period, route in zip(self._periods, self._routes.levels, strict=False)
        )


class SingleRounds(ScheduledAverager):
    """One round at each call, without a count: what ``average_parameters`` is made of."""

    _kept: ClassVar[dict[tuple[type, Any], SingleRounds]] = {}

    def __init__(self, process_group: Any) -> None:
        super().__init__(
            process_group,
            Every(1),
            None,
            {"class": "averagers.average_parameters"},
            bucket_bytes=_BUCKET_BYTES,
            timeout_s=None,
            observers=(),
            measure_drift=False,
            nodes=None,
            parts=(Parts(Method()),),
        )

    @classmethod
    def of(cls, process_group: Any) -> SingleRounds:
        """Return the one for ``process_group``, kept until that is destroyed."""
        handle = cls._framework_of(process_group).groups.resolve(process_group)
        for stale in [known for known, rounds in list(cls._kept.items()) if not rounds.is_usable]:
            cls._kept.pop(stale, None)
        if (cls, handle) not in cls._kept:
            cls._kept[cls, handle] = cls(handle)
        return cls._kept[cls, handle]

    def average_parameters(self, params: Iterable[Any], *, weight: float | None = None) -> None:
        """Average ``params`` now."""
        self.step = 0
        self._once_trainable = set()
        super().average_parameters(params, weight=weight)


def average_parameters(params: Iterable[Any], process_group: Any = None) -> None:
    """Average ``params`` in place now, once, without schedule or state.

    Every rank of the process group must call this; a caller outside it leaves its tensors alone. The
    groups made at the first call are kept for the next until the process group is destroyed.

    Args:
        params: ``model.parameters()``, ``model.named_parameters()``, ``optimizer.param_groups`` or any
            iterable of tensors. Floating and complex tensors are averaged, except frozen parameters.
        process_group: The ranks that average; None means all of them.

    Raises:
        InvalidTypeError, UnsupportedTensorError: ``params`` cannot be averaged; nothing was sent.
        DisagreementError: the ranks passed different tensors; nothing was averaged.
        RoundFailedError: a rank died, or did not come within the process group's timeout.

    Example:
        >>> averagers.average_parameters(model.parameters())
    """
    SingleRounds.of(process_group).average_parameters(params)


def _schedule(period: int | None, warmup_steps: int, schedule: Schedule | None) -> Schedule:
    """Return the schedule that ``PeriodicModelAverager`` was given."""
    if schedule is None:
        if period is None:
            raise InvalidTypeError(
                "period must be an int, or schedule be given, such as averagers.Adaptive(), got None"
            )
        return Every(period, warmup_steps=warmup_steps)
    if not isinstance(schedule, Schedule):
        raise InvalidTypeError(
            f"schedule must be a Schedule such as averagers.Adaptive(), got {schedule!r} "
            f"of type {type(schedule).__name__}"
        )
    if period is not None or warmup_steps != 0:
        raise InvalidValueError(
            f"period and warmup_steps must not be given with schedule, which has its own, got period={period} and "
            f"warmup_steps={warmup_steps}"
        )
    if isinstance(schedule, Hierarchical):
        raise InvalidValueError("schedule must be of one level, got Hierarchical: use HierarchicalModelAverager")
    return schedule


def _parts(
    periods: Sequence[int],
    codec: object,
    rule: object,
    mixer: object,
    overlap: object,
    fragments: object,
    offload: object,
) -> list[Parts]:
    """Return what each level does; of the levels within one in fragments, none may count from an anchor."""
    codecs: Sequence[Codec | None] = per_level("codec", codec, periods, Codec)
    rules: Sequence[Rule | None] = per_level("rule", rule, periods, Rule)
    mixers: Sequence[Mixer | None] = per_level("mixer", mixer, periods, Mixer)
    overlaps: Sequence[Overlap | None] = per_level("overlap", overlap, periods, Overlap)
    counts = [
        Fragments.of(one, period)
        for one, period in zip(per_level("fragments", fragments, periods, object), periods, strict=True)
    ]
    offloads: Sequence[str | None] = per_level("offload", offload, periods, str)
    parts = [
        Parts(Method(codec, rule), mixer, overlap, fragments, offload)
        for codec, rule, mixer, overlap, fragments, offload in zip(
            codecs, rules, mixers, overlaps, counts, offloads, strict=True
        )
    ]
    if any(offloads) and not any(one.offload and one.has_anchor for one in parts):
        raise InvalidValueError(
            f"offload={offload!r} has nothing to keep on the CPU: the level has no codec, rule or mixer that counts "
            "from the weights of the last round; leave offload out"
        )
    for level, one in enumerate(parts):
        within = next((other for other in parts[:level] if other.has_anchor), None)
        if one.fragments.count > 1 and within is not None:
            raise InvalidValueError(
                f"fragments={one.fragments.count} of a level cannot work with a codec, rule or mixer of a level within "
                "that counts from the weights of its last round, which would be of other steps in each fragment: give "
                "these to the outermost level alone"
            )
    return parts


def _warn_of_period_one(longest_period: int) -> None:
    if longest_period == 1:
        warnings.warn(
            "with a period of 1 the weights of all ranks are averaged at every step, which costs no less than "
            "averaging the gradients: use DistributedDataParallel alone, or a longer period",
            UserWarning,
            stacklevel=3,
        )
