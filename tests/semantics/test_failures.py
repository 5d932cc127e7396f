"""Ranks that die, hang or never come: the others say which, within the timeout, and nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from frameworks import averagers, dist, lib, num_groups
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")

TIMEOUT_S = 2.0
MOMENTS_S = 6.0  # the survivors give each other some seconds to say that they came


def params() -> list[lib.nn.Parameter]:
    return [lib.nn.Parameter(lib.randn(64, 64)) for _ in range(3)]


def seen_failure(action: Any) -> tuple[str, str, tuple[int, ...], float]:
    """Return type, message, missing ranks and seconds of the failure that ``action`` raises."""
    start = time.monotonic()
    try:
        action()
    except averagers.RoundFailedError as error:
        return type(error).__name__, str(error), error.missing_ranks, time.monotonic() - start
    return "nothing raised", "", (), time.monotonic() - start


def fewer_steps(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2, timeout_s=TIMEOUT_S)
    mine = params()
    averager.average_parameters(mine)
    averager.average_parameters(mine)
    if rank == 2:
        time.sleep(TIMEOUT_S + 1)
        return None
    failure = seen_failure(lambda: averager.average_parameters(mine))
    with pytest.raises(averagers.ClosedError, match="load a checkpoint"):
        averager.average_parameters(mine)
    return failure, averager.step


def test_a_rank_with_less_data_is_named_by_all_others_with_step_and_level() -> None:
    results = run_ranks(fewer_steps, 4)
    for rank in (0, 1, 3):
        (kind, message, missing, seconds), step = results[rank]
        assert kind == "RoundFailedError"
        assert message == results[0][0][1]
        assert "the round at step 2, level 0, among ranks 0-3 failed: rank 2 did not come" in message
        assert missing == (2,)
        assert seconds < TIMEOUT_S + MOMENTS_S
        assert step == 2


def killed(rank: int, victim: int) -> Any:
    averager = averagers.PeriodicModelAverager(1 + 1, timeout_s=20)
    mine = params()
    averager.average_parameters(mine)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    averager.average_parameters(mine)
    return seen_failure(lambda: averager.average_parameters(mine))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_long_before_the_timeout(victim: int) -> None:
    results = run_ranks(killed, 3, victim, may_die=[victim])
    for rank in {0, 1, 2} - {victim}:
        kind, message, missing, seconds = results[rank]
        assert kind == "RoundFailedError"
        assert f"rank {victim} did not come" in message
        assert missing == (victim,)
        assert seconds < 15


class _DiesWhenRead:
    def __call__(self, event: averagers.Event) -> None:
        if isinstance(event, averagers.RoundStarted):
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_middle(rank: int) -> Any:
    observers = [_DiesWhenRead()] if rank == 1 else []
    averager = averagers.PeriodicModelAverager(2, timeout_s=20, observers=observers)
    mine = [lib.nn.Parameter(lib.full((1000, 1000), float(rank)))]
    failure = seen_failure(lambda: averager.average_parameters(mine))
    return failure, averager.step, averager.is_usable


def test_a_rank_killed_after_the_agreement_fails_the_round_on_all_others() -> None:
    results = run_ranks(killed_in_the_middle, 3, may_die=[1])
    for rank in (0, 2):
        (kind, message, _, seconds), step, is_usable = results[rank]
        assert kind == "RoundFailedError"
        assert "the round at step 0" in message
        assert seconds < 15
        assert step == 0
        assert not is_usable


def killed_first_in_the_middle(rank: int) -> Any:
    def die(event: Any) -> None:
        if rank == 0 and isinstance(event, averagers.RoundStarted):
            os.kill(os.getpid(), signal.SIGKILL)

    averager = averagers.PeriodicModelAverager(2, timeout_s=4, observers=[die])
    return seen_failure(lambda: averager.average_parameters([lib.zeros(3_000_000)]))[2]


def test_a_rank_held_in_the_round_that_another_died_in_is_not_blamed() -> None:
    assert run_ranks(killed_first_in_the_middle, 4, may_die=[0])[1:] == [(0,)] * 3


def never_built(rank: int) -> Any:
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
        return None
    return seen_failure(lambda: averagers.PeriodicModelAverager(2, timeout_s=TIMEOUT_S))


def test_a_rank_that_builds_no_averager_is_named() -> None:
    results = run_ranks(never_built, 3)
    for rank in (0, 2):
        kind, message, missing, seconds = results[rank]
        assert kind == "RoundFailedError"
        assert "building an averager among ranks 0-2 failed: rank 1 did not come" in message
        assert missing == (1,)
        assert seconds < TIMEOUT_S + MOMENTS_S


def refused_input(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2, timeout_s=TIMEOUT_S)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(averagers.InvalidTypeError):
            averager.average_parameters(["not a tensor"])
        seconds = time.monotonic() - start
        time.sleep(TIMEOUT_S + 1)
        return seconds
    return seen_failure(lambda: averager.average_parameters(params()))


def test_a_rank_that_refuses_its_own_input_raises_at_once_and_is_named_by_the_others() -> None:
    own, *others = run_ranks(refused_input, 3)
    assert own < 1
    assert all("rank 0 did not come" in message for _, message, _, _ in others)


def recover(rank: int) -> Any:
    seen: list[averagers.Event] = []
    averager = averagers.PeriodicModelAverager(2, timeout_s=2, observers=[seen.append])
    mine = [lib.nn.Parameter(lib.tensor([float(rank)]))]
    saved = averager.state_dict()
    if rank:
        failure = seen_failure(lambda: averager.average_parameters(mine))[0]
        told = [type(event).__name__ for event in seen], seen[-1].missing_ranks
    else:
        time.sleep(TIMEOUT_S + 2.5)
        failure, told = "", None
        with pytest.raises(averagers.RoundFailedError):
            averager.average_parameters(mine)
    averager.load_state_dict(saved)
    averager.average_parameters(mine)
    return failure, told, mine[0].item(), averager.step


def test_after_a_failed_round_load_state_dict_on_every_rank_makes_the_averager_usable() -> None:
    results = run_ranks(recover, 3)
    assert [result[2:] for result in results] == [(1.0, 1)] * 3
    assert results[1][:2] == results[2][:2] == ("RoundFailedError", (["RoundFailed"], (0,)))


def store_host_dies(rank: int, folder: str) -> Any:
    port_file = f"{folder}/port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(port_file + ".part", "w") as file:
            file.write(str(store.port))
        os.rename(port_file + ".part", port_file)
    else:
        while not os.path.exists(port_file):
            time.sleep(0.01)
        with open(port_file) as file:
            store = dist.TCPStore("127.0.0.1", int(file.read()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    averager = averagers.PeriodicModelAverager(2, timeout_s=20)
    mine = params()
    averager.average_parameters(mine)
    averager.average_parameters(mine)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return seen_failure(lambda: averager.average_parameters(mine))


def test_when_the_rank_with_the_store_dies_the_others_say_to_look_there(tmp_path: Any) -> None:
    _, (kind, message, missing, seconds) = run_ranks(store_host_dies, 2, str(tmp_path), may_die=[0], initialize=False)
    assert kind == "RoundFailedError"
    assert "look at the log of rank 0 first" in message
    assert missing == ()
    assert seconds < 15


def interrupted(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2, timeout_s=3)
    mine = params()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises((KeyboardInterrupt, averagers.RoundFailedError)):
            averager.average_parameters(mine)
        return averager.is_usable
    time.sleep(1)
    return seen_failure(lambda: averager.average_parameters(mine))[0]


def test_an_interrupted_round_leaves_the_averager_refusing_further_use() -> None:
    assert run_ranks(interrupted, 2)[0] is False


def killed_while_groups_are_made(rank: int) -> Any:
    groups = averagers.ModelAverager._default_framework().groups
    make = groups._factory.new_lane

    def make_or_die(*args: Any, name: str, **options: Any) -> Any:
        if rank == 1 and name.endswith("/2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return make(*args, name=name, **options)

    groups._factory.new_lane = make_or_die
    before = num_groups()
    failure = seen_failure(lambda: averagers.PeriodicModelAverager(2, timeout_s=TIMEOUT_S))
    return failure, num_groups() - before


def test_a_rank_killed_while_groups_are_made_is_named_and_no_group_is_left() -> None:
    (kind, message, missing, _), left = run_ranks(killed_while_groups_are_made, 2, may_die=[1])[0]
    assert kind == "RoundFailedError"
    assert "building an averager among ranks 0-1 failed: rank 1 did not come" in message
    assert missing == (1,)
    assert left == 0
