"""A tensor framework as the engine sees it: groups for the whole process, and reducers (pure)."""

from __future__ import annotations

from typing import final

from averagers.reduction.groups import Groups
from averagers.reduction.interface import GroupFactory, TensorOperations
from averagers.reduction.reducer import Reducer


@final
class Framework:
    """A tensor framework.

    Args:
        factory: Makes its process groups.
        operations: On its tensors.

    Attributes:
        groups: Makes and shares groups, one for the whole process.
        operations: On its tensors.
    """

    def __init__(self, factory: GroupFactory, operations: TensorOperations) -> None:
        self.groups = Groups(factory)
        self.operations = operations

    def new_reducer(self, bucket_bytes: int) -> Reducer:
        """Return a reducer for one averager."""
        return Reducer(self.operations, bucket_bytes)
