"""Claims: a step gets fewer threads while the system gives them no cores, and all of them again soon after; what a
team's threads do is counted, and what goes wrong in one of them is told."""

from __future__ import annotations

import threading
import time

import pytest

from anaphora.runtime.crowding import FIRST_PAUSE, LONGEST_PAUSE, Crowding
from anaphora.runtime.threads import ThreadTeam


def steps(crowding: Crowding, share: float, count: int) -> list[int]:
    """How many threads each of the steps got, if the system gives several threads this share and one thread all."""
    given = []
    for _ in range(count):
        given.append(crowding.num_threads)
        crowding.note(share if crowding.num_threads > 1 else 1.0)
    return given


def test_threads_with_cores_of_their_own_all_work() -> None:
    crowding = Crowding(2)
    assert steps(crowding, 0.95, 100) == [2] * 100
    assert steps(crowding, 0.2, 1) == [2]  # one late step changes nothing
    assert steps(crowding, 0.95, 100) == [2] * 100


def test_one_thread_works_while_the_cores_are_busy_and_longer_each_time() -> None:
    crowding = Crowding(2)
    assert steps(crowding, 0.5, 3 + FIRST_PAUSE) == [2] * 3 + [1] * FIRST_PAUSE
    assert steps(crowding, 0.5, 3 + 2 * FIRST_PAUSE) == [2] * 3 + [1] * 2 * FIRST_PAUSE
    for pause in (64, 128, 256, LONGEST_PAUSE):
        assert steps(crowding, 0.5, 3 + pause) == [2] * 3 + [1] * pause
    assert steps(crowding, 0.95, 200) == [2] * 200
    assert steps(crowding, 0.5, 20) == [2] * 3 + [1] * FIRST_PAUSE + [2]  # a quiet while starts from the beginning


def test_many_threads_become_fewer_by_halves() -> None:
    crowding = Crowding(6)
    assert steps(crowding, 0.1, 3) == [6, 6, 3]
    assert steps(crowding, 0.1, 2) == [3, 1]


def test_they_come_back_by_twice_as_many_each_after_a_pause() -> None:
    crowding = Crowding(6)
    assert steps(crowding, 0.1, 4) == [6, 6, 3, 3]
    assert steps(crowding, 0.95, 2 * FIRST_PAUSE + 64 + 2) == [1] * 32 + [2] * 64 + [4] * 2
    assert steps(crowding, 0.95, 63) == [4] * 62 + [6]


def test_two_threads_that_are_as_fast_as_one_stay_and_slower_ones_do_not() -> None:
    """One of two that gets half of its core makes it 0.75."""
    crowding = Crowding(2)
    assert steps(crowding, 0.75, 200) == [2] * 200
    assert steps(crowding, 0.65, 10)[-1] == 1


@pytest.mark.parametrize("share", [0.75, 0.84])
def test_a_share_that_is_neither_good_nor_bad_does_not_shorten_the_next_pause(share: float) -> None:
    crowding = Crowding(2)
    steps(crowding, 0.5, 3 + FIRST_PAUSE)
    assert steps(crowding, share, 100) == [2] * 100
    assert steps(crowding, 0.2, 60).count(1) >= 2 * FIRST_PAUSE


def test_one_good_step_among_middling_ones_does_not_shorten_the_next_pause() -> None:
    crowding = Crowding(2)
    steps(crowding, 0.5, 3 + FIRST_PAUSE)
    steps(crowding, 0.75, 10)
    steps(crowding, 0.95, 1)
    assert steps(crowding, 0.1, 1 + 2 * FIRST_PAUSE) == [2] + [1] * 2 * FIRST_PAUSE


def test_more_threads_are_tried_whatever_share_fewer_had() -> None:
    crowding = Crowding(2)
    steps(crowding, 0.5, 3)
    for _ in range(FIRST_PAUSE):
        crowding.note(0.3)  # the one thread has half a core as well
    assert steps(crowding, 0.9, 20) == [2] * 20


def test_the_pause_grows_whatever_the_share_that_is_too_small() -> None:
    crowding = Crowding(2)
    assert steps(crowding, 0.65, 1000).count(2) == 6 * 7  # and not in every pause of 16


def test_a_single_thread_stays_one() -> None:
    crowding = Crowding(1)
    for _ in range(50):
        crowding.note(0.1)
        assert crowding.num_threads == 1


def test_a_team_runs_as_many_threads_as_it_is_told_and_counts_their_time() -> None:
    team = ThreadTeam(3, 24)
    for count, expected in ((None, {0, 1, 2}), (2, {0, 1}), (1, {0}), (3, {0, 1, 2})):
        seen: set[int] = set()
        share = team.run(seen.add, lambda: None, count)
        assert seen == expected
        assert share >= 0
    assert team.run(lambda number: time.sleep(0.05), lambda: None, 2) < 0.5
    assert team.run(lambda number: _spin(0.05), lambda: None, 1) <= 1.05


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_what_goes_wrong_in_a_thread_is_raised_when_all_have_ended() -> None:
    team, ended = ThreadTeam(2, 24), threading.Event()

    def work(number: int) -> None:
        if number == 1:
            raise OSError("lost")
        ended.set()

    with pytest.raises(OSError, match="lost"):
        team.run(work, lambda: None)
    assert ended.is_set()
    assert team.run(lambda number: None, lambda: None) >= 0  # and it goes on


@pytest.mark.parametrize("lost", [0, 1])
def test_a_team_whose_thread_was_lost_meets_again(lost: int) -> None:
    pytest.importorskip("numba")
    from anaphora.runtime.kernels import barrier

    team = ThreadTeam(2, barrier.BARRIER_SIZE)
    place = team.barrier.ctypes.data

    def abandon() -> None:
        team.barrier[barrier.ABANDONED] = 1

    def work(number: int) -> None:
        if number == lost:
            raise KeyboardInterrupt
        assert not barrier.meet(place, 2)  # the other one never comes

    with pytest.raises(KeyboardInterrupt):
        team.run(work, abandon)
    met: list[tuple[int, bool]] = []
    team.run(lambda number: met.extend((number, barrier.meet(place, 2)) for _ in range(3)), abandon)
    assert sorted(met) == [(0, True)] * 3 + [(1, True)] * 3
    assert team.barrier[barrier.GENERATION] == 3
