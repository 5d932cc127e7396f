"""What a failed round says: which one it was, who did not come, and what to do."""

from __future__ import annotations

from averagers.errors import RoundFailedError
from averagers.reduction.groups import Group
from averagers.safety.agreement import format_ranks


def explain_failure(
    group: Group, error: BaseException, *, step: int | None = None, level: int | None = None
) -> RoundFailedError:
    """Return the error to raise on this rank after a collective of ``group`` failed with ``error``.

    Args:
        group: Where it failed; its ranks tell each other, through the job's store, who came.
        error: What the collective raised.
        step: The averager's step; None while the averager is built.
        level: The level of the round; None while the averager is built.
    """
    what = "building an averager" if step is None else f"the round at step {step}, level {level},"
    missing = group.missing_ranks()
    if missing:
        reason = (
            f"{format_ranks(missing)} did not come within the timeout of {group.timeout_s:g} s, or died: "
            "look at the log there, and let every rank make the same number of calls"
        )
    elif missing is None:
        reason = (
            "a rank died, or could not be reached, and which one is not known because the job's store "
            "(mostly on rank 0) does not answer either: look at the log of rank 0 first"
        )
    else:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        reason = f"every rank came, and then one of them failed: look at the log of each; here it was: {first_line}"
    return RoundFailedError(
        f"{what} among {format_ranks(group.ranks)} failed: {reason}",
        step=step,
        level=level,
        missing_ranks=missing or (),
    )
