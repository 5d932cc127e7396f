"""The public names: which there are, that each loads, and that importing them is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import averagers

PUBLIC = {
    "Adaptive",
    "Assign",
    "Attachment",
    "AveragersError",
    "Cast",
    "CenteredClipping",
    "ClosedError",
    "Codec",
    "Console",
    "Delayed",
    "DisagreementError",
    "DistributedState",
    "Elastic",
    "Event",
    "Every",
    "EverySeconds",
    "Growing",
    "HierarchicalModelAverager",
    "Int4",
    "Int8",
    "InvalidTypeError",
    "InvalidValueError",
    "JsonLines",
    "Median",
    "MissingDependencyError",
    "Mixer",
    "ModelAverager",
    "ModelAveragingOptimizer",
    "Nesterov",
    "NotInitializedError",
    "Observer",
    "Outer",
    "Overlap",
    "PeriodicModelAverager",
    "PostLocalSGD",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "QuadraticRule",
    "ReplicaGroup",
    "RoundFailed",
    "RoundFailedError",
    "RoundFinished",
    "RoundStarted",
    "Rule",
    "Schedule",
    "Shrinking",
    "SlowMo",
    "StateDictError",
    "TopK",
    "TrimmedMean",
    "UnsupportedTensorError",
    "__version__",
    "attach",
    "average_parameters",
    "equivalent_period",
    "post_local_sgd_hook",
    "run_replicas",
}


def test_the_public_names_are_these_and_each_loads() -> None:
    assert set(averagers.__all__) == PUBLIC
    assert all(getattr(averagers, name) is not None for name in averagers.__all__)
    assert set(averagers.__all__) <= set(dir(averagers))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'averagers' has no attribute 'Averager'"):
        _ = averagers.Averager


def test_importing_averagers_and_its_pure_parts_imports_no_framework() -> None:
    code = (
        "import sys, averagers, averagers.averager, averagers.engine, averagers.safety.failure\n"
        "averagers.PeriodicModelAverager, averagers.RoundFinished, averagers.AveragersError\n"
        "print({'torch', 'numpy', 'rich', 'typer', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
