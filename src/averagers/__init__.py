"""Train one model on many machines by averaging models now and then.

Public names load on first use, so that ``import averagers`` is light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averagers.averager import HierarchicalModelAverager as HierarchicalModelAverager
    from averagers.averager import PeriodicModelAverager as PeriodicModelAverager
    from averagers.averager import average_parameters as average_parameters
    from averagers.base import ModelAverager as ModelAverager
    from averagers.errors import AveragersError as AveragersError
    from averagers.errors import ClosedError as ClosedError
    from averagers.errors import DisagreementError as DisagreementError
    from averagers.errors import InvalidTypeError as InvalidTypeError
    from averagers.errors import InvalidValueError as InvalidValueError
    from averagers.errors import MissingDependencyError as MissingDependencyError
    from averagers.errors import NotInitializedError as NotInitializedError
    from averagers.errors import RoundFailedError as RoundFailedError
    from averagers.errors import StateDictError as StateDictError
    from averagers.errors import UnsupportedTensorError as UnsupportedTensorError
    from averagers.events import Event as Event
    from averagers.events import Observer as Observer
    from averagers.events import RoundFailed as RoundFailed
    from averagers.events import RoundFinished as RoundFinished
    from averagers.events import RoundStarted as RoundStarted
    from averagers.mixing.mixers import Assign as Assign
    from averagers.mixing.mixers import Elastic as Elastic
    from averagers.mixing.mixers import Mixer as Mixer
    from averagers.mixing.mixers import Nesterov as Nesterov
    from averagers.mixing.mixers import Outer as Outer
    from averagers.mixing.mixers import SlowMo as SlowMo
    from averagers.mixing.overlap import Delayed as Delayed
    from averagers.mixing.overlap import Overlap as Overlap
    from averagers.observe.console import Console as Console
    from averagers.observe.jsonl import JsonLines as JsonLines
    from averagers.pace import Adaptive as Adaptive
    from averagers.pace import EverySeconds as EverySeconds
    from averagers.reduction.codecs import Cast as Cast
    from averagers.reduction.codecs import Codec as Codec
    from averagers.reduction.codecs import Int4 as Int4
    from averagers.reduction.codecs import Int8 as Int8
    from averagers.reduction.codecs import TopK as TopK
    from averagers.reduction.rules import CenteredClipping as CenteredClipping
    from averagers.reduction.rules import Median as Median
    from averagers.reduction.rules import Rule as Rule
    from averagers.reduction.rules import TrimmedMean as TrimmedMean
    from averagers.replicas import ReplicaGroup as ReplicaGroup
    from averagers.replicas import run_replicas as run_replicas
    from averagers.schedule import Every as Every
    from averagers.schedule import Growing as Growing
    from averagers.schedule import QuadraticRule as QuadraticRule
    from averagers.schedule import Schedule as Schedule
    from averagers.schedule import Shrinking as Shrinking
    from averagers.schedule import equivalent_period as equivalent_period
    from averagers.training.attach import Attachment as Attachment
    from averagers.training.attach import attach as attach
    from averagers.training.checkpoint import DistributedState as DistributedState
    from averagers.training.ddp import PostLocalSGDState as PostLocalSGDState
    from averagers.training.ddp import post_local_sgd_hook as post_local_sgd_hook
    from averagers.training.optimizer import ModelAveragingOptimizer as ModelAveragingOptimizer
    from averagers.training.optimizer import PostLocalSGDOptimizer as PostLocalSGDOptimizer
    from averagers.training.post_local import PostLocalSGD as PostLocalSGD

_MODULE_OF = {
    "HierarchicalModelAverager": "averager",
    "ModelAverager": "base",
    "PeriodicModelAverager": "averager",
    "average_parameters": "averager",
    "AveragersError": "errors",
    "ClosedError": "errors",
    "DisagreementError": "errors",
    "InvalidTypeError": "errors",
    "InvalidValueError": "errors",
    "MissingDependencyError": "errors",
    "NotInitializedError": "errors",
    "RoundFailedError": "errors",
    "StateDictError": "errors",
    "UnsupportedTensorError": "errors",
    "Event": "events",
    "Observer": "events",
    "RoundFailed": "events",
    "RoundFinished": "events",
    "RoundStarted": "events",
    "Assign": "mixing.mixers",
    "Elastic": "mixing.mixers",
    "Mixer": "mixing.mixers",
    "Nesterov": "mixing.mixers",
    "Outer": "mixing.mixers",
    "SlowMo": "mixing.mixers",
    "Delayed": "mixing.overlap",
    "Overlap": "mixing.overlap",
    "Console": "observe.console",
    "JsonLines": "observe.jsonl",
    "Adaptive": "pace",
    "EverySeconds": "pace",
    "Cast": "reduction.codecs",
    "Codec": "reduction.codecs",
    "Int4": "reduction.codecs",
    "Int8": "reduction.codecs",
    "TopK": "reduction.codecs",
    "CenteredClipping": "reduction.rules",
    "Median": "reduction.rules",
    "Rule": "reduction.rules",
    "TrimmedMean": "reduction.rules",
    "ReplicaGroup": "replicas",
    "run_replicas": "replicas",
    "Every": "schedule",
    "Growing": "schedule",
    "QuadraticRule": "schedule",
    "Schedule": "schedule",
    "Shrinking": "schedule",
    "equivalent_period": "schedule",
    "Attachment": "training.attach",
    "attach": "training.attach",
    "DistributedState": "training.checkpoint",
    "PostLocalSGDState": "training.ddp",
    "post_local_sgd_hook": "training.ddp",
    "ModelAveragingOptimizer": "training.optimizer",
    "PostLocalSGDOptimizer": "training.optimizer",
    "PostLocalSGD": "training.post_local",
}

__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604 - all of them are str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("averagers")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'averagers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"averagers.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
