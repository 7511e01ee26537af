"""The schedule alone: events in, commands out, time as a number. No process, no file, no clock."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hydra_plugins.hydra_gpu_pool_launcher._events import (
    Abandon,
    Abandoned,
    Cancel,
    Command,
    End,
    Ending,
    Event,
    Freed,
    Gone,
    Held,
    Interrupt,
    Kill,
    Look,
    Measured,
    Released,
    Retry,
    Returned,
    Saving,
    Scarce,
    Start,
    StartRefused,
    Stop,
    Submitted,
    Taken,
    Waiting,
)
from hydra_plugins.hydra_gpu_pool_launcher._model import (
    Cause,
    Device,
    Exit,
    Job,
    Layout,
    Outcome,
    Policy,
    Report,
    Slot,
    Status,
)
from hydra_plugins.hydra_gpu_pool_launcher._schedule import Schedule
from hydra_plugins.hydra_gpu_pool_launcher._tries import IllegalEventError
from hydra_plugins.hydra_gpu_pool_launcher._verdict import LOST_AFTER_S, Stopped, judge

GRACE_S = 30.0
WELL = Exit(code=0, signal=None, cpu_s=1.0, peak_mb=1.0)
DONE = Report(Status.COMPLETED, None, None, 0.5, "sha")
RAISED = Report(Status.FAILED, "ValueError", "no", None, "sha", "Traceback")
FULL = Report(Status.FAILED, "torch.OutOfMemoryError", "CUDA out of memory", None, "sha", out_of_memory=True)
WAYS = ("crash", "oom", "timeout", "error")
CTRL_C = Stop("Ctrl-C", signal.SIGINT)
TERMINATE = Stop("SIGTERM to main", signal.SIGTERM)
NOW = Stop("Ctrl-C again", signal.SIGKILL)


def layout(devices: int = 1, slots: int = 1, per_job: int = 1) -> Layout:
    return Layout(tuple(Device(str(d)) for d in range(devices)), slots, per_job)


def schedule(devices: int = 1, slots: int = 1, per_job: int = 1) -> Schedule:
    return Schedule(layout(devices, slots, per_job), Policy(GRACE_S))


def submitted(*nums: int) -> Submitted:
    return Submitted(tuple(Job(num, (f"x={num}",)) for num in nums))


def gone(num: int, report: Report | None = DONE, exit_: Exit = WELL) -> Gone:
    return Gone(num, exit_, report)


def signalled(signum: int) -> Exit:
    return Exit(code=None, signal=signum, cpu_s=0.0, peak_mb=0.0)


def placed(commands: Sequence[Command]) -> dict[int, list[tuple[int, int]]]:
    """Of the Starts among the commands, in order: the (device, number) of each slot by job."""
    return {c.job.num: [(s.device, s.number) for s in c.slots] for c in commands if isinstance(c, Start)}


def ended(commands: Sequence[Command]) -> dict[int, Outcome]:
    """Of the Ends among the commands, in order: the outcome by job."""
    return {c.job.num: c.outcome for c in commands if isinstance(c, End)}


# --- placement ---


def test_the_least_loaded_device_comes_first_and_on_it_the_lowest_slot() -> None:
    pool = schedule(devices=2, slots=2)
    assert placed(pool.handle(submitted(0, 1, 2, 3), 0)) == {0: [(0, 0)], 1: [(1, 0)], 2: [(0, 1)], 3: [(1, 1)]}


def test_a_device_with_fewer_jobs_is_preferred_to_a_lower_one() -> None:
    pool = schedule(devices=2, slots=2)
    pool.handle(submitted(0, 1, 2, 3), 0)
    assert placed(pool.handle(gone(1), 1)) == {}
    assert placed(pool.handle(gone(3), 1)) == {}
    assert placed(pool.handle(submitted(4, 5), 1)) == {4: [(1, 0)], 5: [(1, 1)]}


def test_jobs_start_in_the_order_in_which_they_were_submitted() -> None:
    pool = schedule()
    order = [*placed(pool.handle(submitted(3, 1), 0)), *placed(pool.handle(submitted(2, 0), 0))]
    for _ in range(3):
        order += placed(pool.handle(gone(order[-1]), 1))
    assert order == [3, 1, 2, 0]


def test_no_device_has_more_jobs_than_slots() -> None:
    pool = schedule(devices=2, slots=3)
    first = placed(pool.handle(submitted(*range(10)), 0))
    assert sorted(slot for slots in first.values() for slot in slots) == [(d, k) for d in range(2) for k in range(3)]


def test_a_job_with_several_devices_gets_each_only_once_though_others_have_less_room() -> None:
    pool = schedule(devices=3, slots=2, per_job=2)
    assert placed(pool.handle(submitted(0, 1, 2, 3), 0)) == {
        0: [(0, 0), (1, 0)],
        1: [(0, 1), (2, 0)],
        2: [(1, 1), (2, 1)],
    }


def test_two_free_slots_on_one_device_are_no_room_for_a_job_with_two_devices() -> None:
    pool = schedule(devices=2, slots=2, per_job=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(Ending(0), 0)
    pool.handle(Ending(1), 0)
    pool.tick(LOST_AFTER_S)
    pool.handle(Abandoned(0, DONE), LOST_AFTER_S)
    assert not ended(pool.handle(submitted(2), LOST_AFTER_S)), "job 1 may still end and make room"
    assert ended(pool.handle(Abandoned(1, DONE), LOST_AFTER_S)).keys() == {1, 2}


def test_a_freed_slot_is_given_to_the_next_job_in_the_same_step() -> None:
    pool = schedule(devices=2)
    pool.handle(submitted(0, 1, 2), 0)
    commands = pool.handle(gone(1), 1)
    assert [type(command) for command in commands] == [End, Start]
    assert placed(commands) == {2: [(1, 0)]}


def test_a_slot_is_not_free_while_something_of_its_last_job_is_left() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1), 0)
    assert pool.handle(Ending(0), 1) == []
    assert placed(pool.handle(gone(0), 2)) == {1: [(0, 0)]}


# --- a start that the system refuses ---


def test_a_refused_job_goes_back_in_front_and_is_tried_again_when_another_ends() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    assert pool.handle(StartRefused(1, "EAGAIN", True), 0) == []
    assert list(placed(pool.handle(gone(0), 1))) == [1, 2]


def test_several_jobs_refused_in_one_step_keep_their_order() -> None:
    pool = schedule(slots=3)
    pool.handle(submitted(0, 1, 2, 3), 0)
    assert pool.handle(StartRefused(0, "EAGAIN", True), 0) == []
    assert pool.handle(StartRefused(1, "EAGAIN", True), 0) == []
    assert list(placed(pool.handle(gone(2), 1))) == [0, 1, 3]


def test_a_refused_job_is_lost_where_none_runs_and_the_next_one_has_its_try() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1), 0)
    commands = pool.handle(StartRefused(0, "Resource temporarily unavailable", True), 0)
    outcome = ended(commands)[0]
    assert (outcome.status, outcome.cause, outcome.error_type) == (Status.FAILED, Cause.LOST, "JobLostError")
    assert "Resource temporarily unavailable" in (outcome.error_text or "")
    assert list(placed(commands)) == [1]


def test_a_refused_job_is_tried_again_also_when_the_only_other_one_is_given_up() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(StartRefused(1, "EAGAIN", True), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    commands = pool.handle(Abandoned(0, None), LOST_AFTER_S)
    assert [type(command) for command in commands] == [End, Start]
    assert placed(commands) == {1: [(0, 1)]}


def test_a_refused_start_gives_its_slots_back() -> None:
    pool = schedule(devices=2, per_job=2)
    pool.handle(submitted(0), 0)
    pool.handle(StartRefused(0, "EAGAIN", True), 0)
    assert placed(pool.handle(submitted(1), 1)) == {1: [(0, 0), (1, 0)]}


def test_a_job_that_can_never_be_started_is_lost_at_once_although_others_run() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    commands = pool.handle(StartRefused(1, "Too many levels of symbolic links", False), 0)
    assert ended(commands)[1].error_text == "could not be started: Too many levels of symbolic links"
    assert list(placed(commands)) == [2]


# --- stop ---


def test_a_polite_stop_interrupts_what_runs_with_its_reason_and_its_signal() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1), 0)
    assert pool.handle(CTRL_C, 5) == [Interrupt(0, "Ctrl-C", signal.SIGINT), Interrupt(1, "Ctrl-C", signal.SIGINT)]
    outcome = ended(pool.handle(gone(0), 6))[0]
    assert outcome == Outcome(
        Status.CANCELLED, Cause.CANCELLED, "JobCancelledError", "was cancelled: Ctrl-C", by_itself=False
    )


def test_a_stop_cancels_what_has_not_started_before_it_interrupts_what_runs() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1, 2), 0)
    commands = pool.handle(CTRL_C, 5)
    assert [type(command) for command in commands] == [End, End, Interrupt]
    assert [(num, outcome.status) for num, outcome in ended(commands).items()] == [
        (1, Status.CANCELLED),
        (2, Status.CANCELLED),
    ]
    assert all("Ctrl-C" in (outcome.error_text or "") for outcome in ended(commands).values())


def test_nothing_starts_after_a_stop_neither_from_the_queue_nor_what_is_submitted_later() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(CTRL_C, 5)
    commands = pool.handle(submitted(3, 4), 6)
    assert {num: outcome.status for num, outcome in ended(commands).items()} == {
        3: Status.CANCELLED,
        4: Status.CANCELLED,
    }
    assert not placed([*commands, *pool.handle(gone(0), 7), *pool.handle(gone(1), 7)])
    assert pool.idle


def test_a_stop_of_an_idle_pool_commands_nothing() -> None:
    pool = schedule()
    assert pool.handle(CTRL_C, 0) == []
    assert pool.idle
    assert pool.deadline is None


def test_what_outlives_its_grace_is_killed_at_the_deadline_and_not_before() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(CTRL_C, 5)
    assert pool.deadline == 5 + GRACE_S
    assert pool.tick(5 + GRACE_S - 1e-6) == []
    assert [type(command) for command in pool.tick(5 + GRACE_S)] == [Kill]
    assert pool.tick(5 + GRACE_S) == []
    assert ended(pool.handle(gone(0, None, signalled(signal.SIGKILL)), 36))[0].error_text == "was cancelled: Ctrl-C"


def test_a_second_polite_stop_changes_nothing() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(CTRL_C, 5)
    assert pool.handle(TERMINATE, 20) == []
    assert pool.deadline == 5 + GRACE_S
    assert ended(pool.handle(gone(0), 21))[0].error_text == "was cancelled: Ctrl-C"


def test_a_second_stop_with_sigkill_kills_at_once_and_leaves_the_first_reason() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(CTRL_C, 5)
    pool.handle(Ending(1), 6)
    assert pool.handle(NOW, 6) == [Kill(0, "Ctrl-C again")], "job 1's process is gone already"
    assert pool.handle(NOW, 7) == [], "a further one has nothing to hasten"
    assert ended(pool.handle(gone(0, None, signalled(signal.SIGKILL)), 8))[0].error_text == "was cancelled: Ctrl-C"


def test_a_first_stop_with_sigkill_interrupts_nobody() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1), 0)
    commands = pool.handle(NOW, 5)
    assert [type(command) for command in commands] == [End, Kill]
    assert (
        ended(pool.handle(gone(0, None, signalled(signal.SIGKILL)), 6))[0].error_text == "was cancelled: Ctrl-C again"
    )


def test_a_polite_stop_after_a_kill_does_not_wait_for_grace_again() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(NOW, 5)
    assert pool.handle(CTRL_C, 6) == []
    assert pool.deadline == 5 + LOST_AFTER_S


@pytest.mark.parametrize("stop", [CTRL_C, NOW], ids=["interrupted", "killed"])
def test_a_job_that_had_ended_by_itself_before_the_signal_keeps_its_own_outcome(stop: Stop) -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(stop, 5)
    assert pool.handle(Returned(0), 5) == []
    assert ended(pool.handle(gone(0, DONE, signalled(signal.SIGKILL)), 6))[0] == Outcome(
        Status.COMPLETED, Cause.RETURNED, value=0.5, by_itself=True
    )


def test_a_job_that_had_ended_by_itself_is_killed_all_the_same_when_its_exit_outlives_the_grace() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(CTRL_C, 0)
    pool.handle(Returned(0), 0)
    assert [type(command) for command in pool.tick(GRACE_S)] == [Kill]
    assert ended(pool.handle(gone(0, RAISED, signalled(signal.SIGKILL)), GRACE_S))[0] == Outcome(
        Status.FAILED, Cause.ERROR, "ValueError", "no", by_itself=True
    )


# --- cancel ---

BY_HAND = "somebody cancelled it by hand"


def cancel(num: int) -> Cancel:
    return Cancel(num, BY_HAND)


def test_a_running_job_that_is_cancelled_is_stopped_alone_and_the_sweep_goes_on() -> None:
    pool = schedule(devices=2)
    pool.handle(submitted(0, 1, 2), 0)
    assert pool.handle(cancel(1), 5) == [Interrupt(1, BY_HAND, signal.SIGTERM, Cause.CANCELLED)]
    assert pool.tick(5 + GRACE_S) == [Kill(1, "did not end within kill_grace_s")]
    commands = pool.handle(gone(1, None, signalled(signal.SIGKILL)), 40)
    assert (ended(commands)[1].status, ended(commands)[1].error_text) == (
        Status.CANCELLED,
        f"was cancelled: {BY_HAND}",
    )
    assert placed(commands) == {2: [(1, 0)]}


def test_a_queued_job_that_is_cancelled_ends_at_once_and_is_never_started() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1, 2), 0)
    outcomes = ended(pool.handle(cancel(1), 1))
    assert outcomes[1].error_text == f"was cancelled: {BY_HAND}; it was not started"
    assert placed(pool.handle(gone(0), 2)) == {2: [(0, 0)]}


def test_a_job_that_waits_for_its_retry_can_be_cancelled_and_those_behind_it_go_on() -> None:
    pool = Schedule(layout(slots=2), Policy(GRACE_S, max_retries=1, retry_on=frozenset({"oom"})))
    pool.handle(submitted(0, 1, 2), 0)
    assert placed(pool.handle(gone(0, FULL), 1)) == {}  # it waits for the whole device, and 2 waits for it
    commands = pool.handle(cancel(0), 2)
    assert [command.attempt for command in commands if isinstance(command, End)] == [1]
    assert "it was not tried again, after job 0 (x=0) raised" in str(ended(commands)[0].error_text)
    assert placed(commands) == {2: [(0, 0)]}


@pytest.mark.parametrize("num", [0, 1, 2, 7])
def test_what_has_ended_or_ends_already_is_not_cancelled(num: int) -> None:
    pool = schedule(devices=3)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(gone(0), 1)
    pool.handle(Ending(1), 1)
    pool.handle(cancel(2), 1)
    assert pool.handle(cancel(num), 2) == []


# --- what cannot be ended ---


def test_remnants_of_a_job_are_waited_for_so_long_and_then_abandoned_with_their_slots() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(Ending(0), 5)
    assert pool.deadline == 5 + LOST_AFTER_S
    assert pool.tick(5 + LOST_AFTER_S - 1e-6) == []
    assert pool.tick(5 + LOST_AFTER_S) == [Abandon(0)]
    assert pool.deadline is None
    commands = pool.handle(Abandoned(0, None), 15)
    assert ended(commands)[0].error_type == "JobLostError"
    assert not placed(commands), "slot 0 is retired"
    assert placed(pool.handle(gone(1), 16)) == {2: [(0, 1)]}


def test_a_killed_process_that_does_not_die_is_abandoned() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(NOW, 5)
    assert pool.deadline == 5 + LOST_AFTER_S
    assert pool.tick(5 + LOST_AFTER_S) == [Abandon(0)]
    outcome = ended(pool.handle(Abandoned(0, None), 15))[0]
    assert (outcome.status, outcome.error_type) == (Status.FAILED, "JobLostError")
    assert NOW.why in (outcome.error_text or "")
    assert pool.idle


def test_what_an_abandoned_job_has_said_of_itself_counts() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    outcome = ended(pool.handle(Abandoned(0, DONE), LOST_AFTER_S))[0]
    assert (outcome.status, outcome.by_itself) == (Status.COMPLETED, True)


def test_when_the_last_slot_is_retired_what_is_left_is_lost() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    outcomes = ended(pool.handle(Abandoned(0, DONE), LOST_AFTER_S))
    assert [(num, outcome.cause) for num, outcome in outcomes.items()] == [
        (0, Cause.RETURNED),
        (1, Cause.LOST),
        (2, Cause.LOST),
    ]
    assert pool.idle


def test_what_is_submitted_when_no_slot_is_left_is_lost_too() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    pool.handle(Abandoned(0, DONE), LOST_AFTER_S)
    assert {num: outcome.cause for num, outcome in ended(pool.handle(submitted(1), 20)).items()} == {1: Cause.LOST}
    assert pool.idle


def test_the_deadline_is_the_earliest_of_all_jobs() -> None:
    pool = schedule(slots=3)
    pool.handle(submitted(0, 1, 2), 0)
    assert pool.deadline is None
    pool.handle(Ending(2), 4)
    pool.handle(Ending(0), 3)
    assert pool.deadline == 3 + LOST_AFTER_S
    pool.handle(gone(0), 5)
    assert pool.deadline == 4 + LOST_AFTER_S


# --- timeout ---


def timed(timeout_s: float = 60.0, **more: Any) -> Schedule:
    return Schedule(layout(), Policy(GRACE_S, timeout_s=timeout_s, **more))


def test_a_try_that_takes_too_long_is_terminated_then_killed_and_the_job_has_timed_out() -> None:
    pool = timed()
    pool.handle(submitted(0), 100)
    assert pool.deadline == 160
    assert pool.tick(159.9) == []
    assert pool.tick(160) == [Interrupt(0, "took longer than timeout_min=1", signal.SIGTERM, Cause.TIMEOUT)]
    assert pool.deadline == 160 + GRACE_S
    assert [type(command) for command in pool.tick(160 + GRACE_S)] == [Kill]
    outcome = ended(pool.handle(gone(0, DONE, signalled(signal.SIGKILL)), 200))[0]
    assert (outcome.status, outcome.cause, outcome.error_type) == (Status.FAILED, Cause.TIMEOUT, "JobTimeoutError")
    assert outcome.error_text == "was stopped: it took longer than timeout_min=1"
    assert not outcome.by_itself


def test_the_time_of_a_try_begins_with_its_own_start() -> None:
    pool = timed()
    pool.handle(submitted(0, 1), 0)
    pool.handle(gone(0), 50)
    assert pool.deadline == 110


def test_a_job_that_had_ended_by_itself_when_its_time_was_over_keeps_its_outcome() -> None:
    pool = timed()
    pool.handle(submitted(0), 0)
    pool.tick(60)
    pool.handle(Returned(0), 60)
    assert ended(pool.handle(gone(0, DONE), 61))[0].status is Status.COMPLETED


def test_a_timeout_stops_its_own_job_only() -> None:
    pool = Schedule(layout(slots=2), Policy(GRACE_S, timeout_s=60))
    pool.handle(submitted(0), 0)
    pool.handle(submitted(1, 2), 30)
    assert [command.num for command in pool.tick(60) if isinstance(command, Interrupt)] == [0]
    assert list(placed(pool.handle(gone(0), 61))) == [2]


def test_a_stop_while_a_job_is_stopped_for_its_time_leaves_it_its_reason_and_its_grace() -> None:
    pool = timed()
    pool.handle(submitted(0), 0)
    pool.tick(60)
    assert pool.handle(CTRL_C, 65) == []
    assert pool.deadline == 60 + GRACE_S
    assert ended(pool.handle(gone(0), 66))[0].error_type == "JobTimeoutError"


def test_a_job_that_waits_to_save_its_result_has_as_much_time_again_as_often_as_it_still_waits() -> None:
    pool = timed()
    pool.handle(submitted(0), 0)
    for now in (60, 120):
        assert [type(command) for command in pool.tick(now)] == [Interrupt]
        assert pool.handle(Saving(0), now) == []
        assert pool.deadline == now + 60
    pool.tick(180)
    assert ended(pool.handle(gone(0, None, signalled(signal.SIGTERM)), 181))[0].error_type == "JobTimeoutError"


# --- retries ---

CRASHED = gone(0, None, signalled(signal.SIGSEGV))
ALL_WAYS = frozenset(WAYS)


def retrying(devices: int = 1, slots: int = 1, per_job: int = 1, max_retries: int = 1, **more: Any) -> Schedule:
    policy = Policy(GRACE_S, max_retries=max_retries, **{"retry_on": ALL_WAYS, **more})
    return Schedule(layout(devices, slots, per_job), policy)


@pytest.mark.parametrize(
    ("way", "end"),
    [
        ("crash", CRASHED),
        ("crash", gone(0, None, Exit(3, None, 0, 0))),
        ("oom", gone(0, FULL)),
        ("error", gone(0, RAISED)),
    ],
)
def test_a_job_is_tried_again_where_it_failed_in_one_of_the_ways_to_retry_on_and_no_other(way: str, end: Gone) -> None:
    commands = retrying(retry_on=frozenset({way})).handle
    commands(submitted(0), 0)
    retry, start = commands(end, 1)
    assert isinstance(retry, Retry)
    assert (retry.attempt, retry.outcome.status) == (1, Status.FAILED)
    assert start == Start(Job(0, ("x=0",)), 2, (Slot(0, 0),), alone=way == "oom")
    other = retrying(retry_on=ALL_WAYS - {way}).handle
    other(submitted(0), 0)
    assert ended(other(end, 1)).keys() == {0}


def test_a_job_has_as_many_further_tries_as_max_retries_and_the_last_one_counts() -> None:
    pool = retrying(max_retries=2)
    pool.handle(submitted(0), 0)
    assert [type(c) for c in pool.handle(CRASHED, 1)] == [Retry, Start]
    assert [type(c) for c in pool.handle(gone(0, RAISED), 2)] == [Retry, Start]
    (end,) = pool.handle(CRASHED, 3)
    assert isinstance(end, End)
    assert (end.attempt, end.outcome.error_type) == (3, "JobCrashedError")


def test_a_retry_that_completes_is_a_completed_job() -> None:
    pool = retrying()
    pool.handle(submitted(0), 0)
    pool.handle(CRASHED, 1)
    (end,) = pool.handle(gone(0, DONE), 2)
    assert isinstance(end, End)
    assert (end.attempt, end.outcome.status) == (2, Status.COMPLETED)


def test_a_timeout_is_retried_where_that_is_asked_for_with_its_whole_time_again() -> None:
    pool = retrying(timeout_s=60.0)
    pool.handle(submitted(0), 0)
    pool.tick(60)
    assert [type(c) for c in pool.handle(gone(0, None, signalled(signal.SIGTERM)), 65)] == [Retry, Start]
    assert pool.deadline == 125


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_somebody_ended_by_hand_is_never_retried(signum: signal.Signals) -> None:
    pool = retrying()
    pool.handle(submitted(0), 0)
    assert ended(pool.handle(gone(0, None, signalled(signum)), 1))[0].status is Status.CANCELLED


def test_what_says_itself_that_it_was_told_to_stop_by_hand_is_cancelled_and_never_retried() -> None:
    pool = retrying()
    pool.handle(submitted(0), 0)
    told = Report(Status.CANCELLED, "JobCancelledError", "was cancelled: SIGTERM was sent", None, "sha")
    outcome = ended(pool.handle(gone(0, told), 1))[0]
    assert (outcome.status, outcome.cause, outcome.by_itself) == (Status.CANCELLED, Cause.CANCELLED, False)


def test_what_is_lost_is_not_retried() -> None:
    pool = retrying()
    pool.handle(submitted(0), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    assert ended(pool.handle(Abandoned(0, None), LOST_AFTER_S)).keys() == {0}


def test_nothing_is_retried_after_a_stop_and_what_waits_for_its_retry_says_how_it_had_failed() -> None:
    pool = retrying(slots=2, stagger_s=100.0)
    pool.handle(submitted(0), 0)
    pool.handle(submitted(1), 200)
    assert [type(c) for c in pool.handle(gone(1, RAISED), 201)] == [Retry], "its start is not due yet"
    commands = pool.handle(CTRL_C, 202)
    assert ended(commands)[1].error_text == (
        "was cancelled: Ctrl-C; it was not tried again, after job 1 (x=1) raised ValueError: no"
    )
    assert next(c.attempt for c in commands if isinstance(c, End)) == 1
    assert ended(pool.handle(CRASHED, 203))[0].status is Status.CANCELLED


def test_a_retried_job_comes_before_all_that_was_submitted_after_it() -> None:
    pool = retrying()
    pool.handle(submitted(0, 1), 0)
    assert list(placed(pool.handle(CRASHED, 1))) == [0]


# --- a retry on whole devices ---


def test_what_ran_out_of_memory_is_tried_again_alone_on_a_device_which_takes_no_others_meanwhile() -> None:
    pool = retrying(devices=1, slots=3)
    pool.handle(submitted(0, 1, 2, 3, 4), 0)
    assert [type(c) for c in pool.handle(gone(1, FULL), 1)] == [Retry]
    assert not placed(pool.handle(gone(0), 2)), "else it would never have the device for itself"
    assert placed(pool.handle(gone(2), 3)) == {1: [(0, 0), (0, 1), (0, 2)]}
    assert placed(pool.handle(gone(1), 4)) == {3: [(0, 0)], 4: [(0, 1)]}


def test_the_device_that_will_be_free_soonest_is_kept_for_it_and_the_others_go_on() -> None:
    pool = retrying(devices=2, slots=2)
    pool.handle(submitted(0, 1, 2, 3, 4, 5), 0)  # 0 and 2 on device 0, 1 and 3 on device 1
    assert [type(c) for c in pool.handle(gone(1, FULL), 1)] == [Retry]
    assert placed(pool.handle(gone(3), 2)) == {1: [(1, 0), (1, 1)]}
    assert placed(pool.handle(gone(2), 3)) == {4: [(0, 1)]}
    assert [type(c) for c in pool.handle(gone(4, FULL), 4)] == [Retry], "device 0 is the emptier one now"
    assert placed(pool.handle(gone(1), 5)) == {4: [(1, 0), (1, 1)], 5: [(0, 1)]}


def test_a_job_with_several_devices_has_all_of_each_for_itself() -> None:
    pool = retrying(devices=2, slots=2, per_job=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(gone(0, FULL), 1)
    assert placed(pool.handle(gone(1), 2)) == {0: [(0, 0), (0, 1), (1, 0), (1, 1)]}


def test_a_retired_slot_keeps_nobody_from_the_rest_of_its_device() -> None:
    pool = retrying(slots=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    pool.handle(Abandoned(0, DONE), LOST_AFTER_S)
    assert placed(pool.handle(gone(1, FULL), 20)) == {1: [(0, 1)]}


def test_a_device_on_which_something_is_stuck_is_the_last_choice_for_a_job_that_needs_it_alone() -> None:
    pool = retrying(devices=2, slots=2)
    pool.handle(submitted(0, 1, 2, 3), 0)
    pool.handle(Ending(0), 0)
    pool.tick(LOST_AFTER_S)
    pool.handle(Abandoned(0, DONE), LOST_AFTER_S)
    pool.handle(gone(2), 20)
    assert [type(c) for c in pool.handle(gone(1, FULL), 21)] == [Retry], "it waits for device 1"
    assert placed(pool.handle(gone(3), 22)) == {1: [(1, 0), (1, 1)]}


def test_on_cpu_slots_it_is_tried_again_on_any_slot() -> None:
    pool = Schedule(Layout((Device(""),), 2), Policy(GRACE_S, max_retries=1, retry_on=ALL_WAYS))
    pool.handle(submitted(0, 1), 0)
    assert placed(pool.handle(gone(1, FULL), 1)) == {1: [(0, 1)]}


def test_a_second_failure_of_another_kind_keeps_the_job_alone() -> None:
    pool = retrying(slots=2, max_retries=2)
    pool.handle(submitted(0), 0)
    assert placed(pool.handle(gone(0, FULL), 1)) == {0: [(0, 0), (0, 1)]}
    assert placed(pool.handle(CRASHED, 2)) == {0: [(0, 0), (0, 1)]}


# --- fail_fast ---


def failing_fast(slots: int = 1, **more: Any) -> Schedule:
    return Schedule(layout(slots=slots), Policy(GRACE_S, fail_fast=True, **more))


def test_the_first_failure_cancels_all_that_has_not_ended_and_later_launches_and_is_named() -> None:
    pool = failing_fast(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    commands = pool.handle(gone(0, RAISED), 1)
    assert [type(c) for c in commands] == [End, End, Interrupt]
    why = "fail_fast, since job 0 (x=0) raised ValueError: no"
    assert ended(commands)[2].error_text == f"was cancelled: {why}; it was not started"
    assert commands[2] == Interrupt(1, why, signal.SIGTERM)
    assert ended(pool.handle(gone(1), 2))[1].error_text == f"was cancelled: {why}"
    assert ended(pool.handle(submitted(3), 3))[3].error_text == f"was cancelled: {why}; it was not started"


def test_a_crash_is_named_by_gpu_pools_own_sentence() -> None:
    pool = failing_fast()
    pool.handle(submitted(0, 1), 0)
    text = ended(pool.handle(CRASHED, 1))[1].error_text
    assert text == "was cancelled: fail_fast, since job 0 (x=0) was ended by SIGSEGV; it was not started"


def test_only_the_last_try_of_a_job_is_its_failure() -> None:
    pool = failing_fast(max_retries=1, retry_on=ALL_WAYS)
    pool.handle(submitted(0, 1), 0)
    assert list(placed(pool.handle(CRASHED, 1))) == [0]
    assert list(placed(pool.handle(gone(0), 2))) == [1]
    pool.handle(gone(1, RAISED), 3)
    assert ended(pool.handle(gone(1, RAISED), 4)).keys() == {1}


def test_a_job_ended_by_hand_ends_that_job_only() -> None:
    pool = failing_fast()
    pool.handle(submitted(0, 1), 0)
    assert list(placed(pool.handle(gone(0, None, signalled(signal.SIGTERM)), 1))) == [1]


def test_a_start_that_was_refused_in_the_step_in_which_another_failed_is_cancelled() -> None:
    pool = failing_fast(slots=2)
    pool.handle(submitted(0, 1), 0)
    commands = pool.handle(StartRefused(0, "Too many levels of symbolic links", False), 0)
    assert [type(c) for c in commands] == [End, Interrupt]
    outcome = ended(pool.handle(StartRefused(1, "EAGAIN", True), 0))[1]
    assert outcome.status is Status.CANCELLED
    assert (outcome.error_text or "").endswith("; it was not started")
    assert pool.idle


def test_a_second_failure_while_the_rest_is_stopped_changes_no_reason() -> None:
    pool = failing_fast(slots=3)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(gone(0, RAISED), 1)
    pool.handle(Returned(1), 1)
    assert len(pool.handle(gone(1, RAISED), 2)) == 1
    assert "job 0" in (ended(pool.handle(gone(2), 3))[2].error_text or "")


# --- stagger_s ---


def test_any_two_starts_are_so_far_apart_retries_included() -> None:
    pool = Schedule(layout(slots=4), Policy(GRACE_S, stagger_s=10, max_retries=1, retry_on=ALL_WAYS))
    assert list(placed(pool.handle(submitted(0, 1, 2), 0))) == [0]
    assert pool.deadline == 10
    assert not pool.tick(9.9)
    assert list(placed(pool.tick(10))) == [1]
    assert [type(c) for c in pool.handle(CRASHED, 12)] == [Retry]
    assert pool.deadline == 20
    assert list(placed(pool.tick(20))) == [0]
    assert list(placed(pool.tick(31))) == [2]
    assert pool.deadline is None
    assert list(placed(pool.handle(submitted(3), 50))) == [3]


def test_a_stop_lets_no_delayed_start_come() -> None:
    pool = Schedule(layout(slots=2), Policy(GRACE_S, stagger_s=10))
    pool.handle(submitted(0, 1), 0)
    pool.handle(CTRL_C, 5)
    pool.handle(gone(0), 6)
    assert pool.deadline is None
    assert pool.tick(10) == []


# --- while nothing can be recorded ---


def test_nothing_starts_while_the_pool_is_held_and_all_that_waits_starts_in_its_order_when_it_is_released() -> None:
    pool = schedule(slots=2)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(Held(), 1)
    assert not placed(pool.handle(gone(0), 2))
    assert not placed(pool.handle(submitted(3), 2))
    assert not placed(pool.handle(gone(1), 3))
    assert not pool.idle
    assert list(placed(pool.handle(Released(), 4))) == [2, 3]


def test_a_start_that_is_refused_while_the_pool_is_held_is_not_lost_although_none_runs() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(Held(), 0)
    assert pool.handle(StartRefused(0, "No space left on device", True), 0) == []
    assert list(placed(pool.handle(Released(), 1))) == [0]


def test_a_stop_ends_a_pool_that_is_held() -> None:
    pool = schedule()
    pool.handle(Held(), 0)
    pool.handle(submitted(0), 0)
    assert ended(pool.handle(CTRL_C, 1)).keys() == {0}
    assert pool.idle


# --- the phases: which event is possible in which ---


def _steps(*steps: Callable[[Schedule], object]) -> Callable[[], Schedule]:
    def reach() -> Schedule:
        pool = schedule()
        for step in steps:
            step(pool)
        return pool

    return reach


def _run(pool: Schedule) -> None:
    pool.handle(submitted(0), 0)


def _stop(pool: Schedule) -> None:
    pool.handle(CTRL_C, 0)


def _kill(pool: Schedule) -> None:
    pool.handle(NOW, 0)


def _ending(pool: Schedule) -> None:
    pool.handle(Ending(0), 0)


def _abandon(pool: Schedule) -> None:
    pool.tick(1000)


def _over(pool: Schedule) -> None:
    pool.handle(gone(0), 0)


REACHED: dict[str, Callable[[], Schedule]] = {
    "not running": _steps(),
    "running": _steps(_run),
    "stopping": _steps(_run, _stop),
    "killed": _steps(_run, _kill),
    "ending": _steps(_run, _ending),
    "abandoned": _steps(_run, _ending, _abandon),
    "over": _steps(_run, _over),
}
POSSIBLE: dict[Event, set[str]] = {
    StartRefused(0, "EAGAIN", True): {"running", "stopping", "killed"},
    Returned(0): {"stopping", "killed"},
    Saving(0): {"stopping"},
    Ending(0): {"running", "stopping", "killed"},
    gone(0): {"running", "stopping", "killed", "ending"},
    Abandoned(0, None): {"abandoned"},
}


@pytest.mark.parametrize("event", POSSIBLE, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("phase", REACHED)
def test_an_event_that_cannot_be_is_refused_by_its_name_and_the_jobs_phase(phase: str, event: Event) -> None:
    pool = REACHED[phase]()
    if phase in POSSIBLE[event]:
        pool.handle(event, 1000)
        return
    shown = "not running" if phase == "over" else phase
    with pytest.raises(IllegalEventError, match=rf"^{type(event).__name__} for job 0, which is {shown}$"):
        pool.handle(event, 1000)


# --- the verdict ---


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_job_that_somebody_else_ended_by_hand_is_cancelled(signum: signal.Signals) -> None:
    outcome = judge(None, signalled(signum), None)
    assert (outcome.status, outcome.cause, outcome.error_type) == (
        Status.CANCELLED,
        Cause.CANCELLED,
        "JobCancelledError",
    )
    assert signum.name in (outcome.error_text or "")
    assert not outcome.by_itself


@pytest.mark.parametrize(
    ("exit_", "words"),
    [
        (signalled(signal.SIGKILL), ["SIGKILL", "memory", "dmesg"]),
        (signalled(signal.SIGBUS), ["SIGBUS", "/dev/shm"]),
        (signalled(signal.SIGSEGV), ["SIGSEGV"]),
        (signalled(signal.SIGABRT), ["SIGABRT"]),
        (signalled(35), ["signal 35"]),  # a real-time signal, for which Python has no name
        (Exit(0, None, 0, 0), ["exit code 0"]),
        (Exit(1, None, 0, 0), ["exit code 1"]),
        (Exit(70, None, 0, 0), ["exit code 70"]),
    ],
    ids=lambda x: f"{x.signal or x.code}" if isinstance(x, Exit) else "",
)
def test_an_end_without_an_outcome_is_a_crash_that_names_signal_or_exit_code(exit_: Exit, words: list[str]) -> None:
    outcome = judge(None, exit_, None)
    assert (outcome.status, outcome.cause, outcome.error_type) == (Status.FAILED, Cause.CRASH, "JobCrashedError")
    assert all(word in (outcome.error_text or "") for word in words)
    assert not outcome.by_itself


def test_a_job_that_the_kernel_never_gave_back_is_lost() -> None:
    outcome = judge(None, None, None)
    assert (outcome.status, outcome.cause, outcome.error_type) == (Status.FAILED, Cause.LOST, "JobLostError")


@pytest.mark.parametrize("exit_", [WELL, signalled(signal.SIGKILL), signalled(signal.SIGTERM), None])
@pytest.mark.parametrize("report", [DONE, RAISED])
def test_what_a_job_says_of_itself_counts_however_its_process_ended(report: Report, exit_: Exit | None) -> None:
    outcome = judge(None, exit_, report)
    assert outcome.by_itself
    assert (outcome.status, outcome.error_type, outcome.error_text, outcome.value) == (
        report.status,
        report.error_type,
        report.error_text,
        report.value,
    )
    assert outcome.cause is (Cause.RETURNED if report is DONE else Cause.ERROR)


@pytest.mark.parametrize("report", [DONE, RAISED, None])
def test_what_the_pool_stopped_and_cannot_be_killed_is_lost_whatever_it_says(report: Report | None) -> None:
    outcome = judge(Stopped(Cause.CANCELLED, "the sweep was stopped"), None, report)
    assert (outcome.status, outcome.cause, outcome.by_itself) == (Status.FAILED, Cause.LOST, False)
    assert "the sweep was stopped" in (outcome.error_text or "")
    assert "did not die" in (outcome.error_text or "")


@pytest.mark.parametrize("exit_", [WELL, signalled(signal.SIGKILL), Exit(1, None, 0, 0)])
@pytest.mark.parametrize("report", [DONE, RAISED, None])
def test_what_the_pool_stopped_is_cancelled_whatever_it_says_or_does(report: Report | None, exit_: Exit) -> None:
    outcome = judge(Stopped(Cause.CANCELLED, "the sweep was stopped"), exit_, report)
    assert outcome == Outcome(
        Status.CANCELLED, Cause.CANCELLED, "JobCancelledError", "was cancelled: the sweep was stopped"
    )


# --- any order of events ---


class AnyWorld(RuleBasedStateMachine):
    """A world that does whatever a real one may do, at any time, and checks each command when it comes.

    It carries commands out as the loop of ``_pool`` does: all of a step, then the answers to them, in order.
    """

    for_memory = False
    """True where jobs also wait for memory: then they may wait although there are slots."""

    @initialize(
        devices=strategies.integers(1, 4),
        slots=strategies.integers(1, 3),
        data=strategies.data(),
        first=strategies.integers(0, 3),
    )
    def begin(self, devices: int, slots: int, data: strategies.DataObject, first: int) -> None:
        self.layout = layout(devices, slots, data.draw(strategies.integers(1, devices), "devices per job"))
        self.policy = self._policy(data)
        self.schedule = Schedule(self.layout, self.policy)
        self.now = 0.0
        self.order: list[int] = []  # as submitted
        self.waiting: list[int] = []  # in the order of submission
        self.alone: set[int] = set()  # of those that wait or run: what ran out of memory
        self.tries: dict[int, int] = {}  # made, by job
        self.taken: dict[Slot, int] = {}  # by job
        self.retired: set[Slot] = set()
        self.alive: set[int] = set()
        self.started: dict[int, float] = {}
        self.last_start = float("-inf")
        self.outcomes: dict[int, Outcome] = {}
        self.retried: Outcome | None = None  # in the last step
        self.stopped = self.stopped_hard = self.held = self.refused_since_an_end = False
        self.ending: set[int] = set()
        self.interrupted: dict[int, float] = {}
        self.killed: dict[int, float] = {}
        self.reasons: dict[int, Stopped] = {}  # of what was stopped before it had ended by itself
        self.returned: set[int] = set()
        self.cancelled: set[int] = set()
        self.looking = False
        self._submit(first, data)

    # what happens

    @rule(count=strategies.integers(1, 4), data=strategies.data())
    def submit(self, count: int, data: strategies.DataObject) -> None:
        if len(self.order) + count <= 12:
            self._submit(count, data)

    @precondition(lambda self: self.alive - self.ending)
    @rule(data=strategies.data())
    def a_process_ends_and_leaves_something(self, data: strategies.DataObject) -> None:
        num = data.draw(strategies.sampled_from(sorted(self.alive - self.ending)), "job")
        self.ending.add(num)
        self._step(Ending(num), data)

    @precondition(lambda self: self.alive)
    @rule(data=strategies.data(), report=strategies.sampled_from([None, DONE, RAISED, FULL]))
    def a_tree_is_gone(self, data: strategies.DataObject, report: Report | None) -> None:
        num = data.draw(strategies.sampled_from(sorted(self.alive)), "job")
        self._end(num, report or (DONE if num in self.returned else None), data)

    @rule(data=strategies.data(), stop=strategies.sampled_from([CTRL_C, TERMINATE, NOW]))
    def somebody_stops_it(self, data: strategies.DataObject, stop: Stop) -> None:
        first, self.stopped = not self.stopped, True
        self.stopped_hard = self.stopped_hard or stop is NOW
        running = self.alive - self.ending
        self._step(stop, data)
        assert not self.waiting
        if stop is NOW:
            assert running <= self.killed.keys() | self.outcomes.keys()
        elif first:
            assert running <= self.interrupted.keys() | self.outcomes.keys()

    @precondition(lambda self: self.order)
    @rule(data=strategies.data())
    def somebody_cancels_one(self, data: strategies.DataObject) -> None:
        num = data.draw(strategies.sampled_from(self.order), "job")
        waited = num in self.waiting
        self.cancelled.add(num)
        self._step(Cancel(num, BY_HAND), data)
        assert not waited or self.outcomes[num].status is Status.CANCELLED

    @rule(data=strategies.data())
    def time_passes(self, data: strategies.DataObject) -> None:
        self._step(None, data)

    @rule(data=strategies.data())
    def the_disk_is_full_or_is_not_any_more(self, data: strategies.DataObject) -> None:
        self.held = not self.held
        if not self.held:
            self.refused_since_an_end = False
        self._step(Held() if self.held else Released(), data)

    # what must hold

    @invariant()
    def every_job_is_over_or_waits_or_runs(self) -> None:
        assert self.outcomes.keys() | set(self.waiting) | self.alive == set(self.order)
        assert len(self.outcomes) + len(self.waiting) + len(self.alive) == len(self.order)
        assert self.schedule.idle == (len(self.outcomes) == len(self.order))

    @invariant()
    def nothing_waits_while_nothing_runs(self) -> None:
        if self.waiting and not self.alive and not self.held and not self.looking:
            assert self.schedule.deadline is not None, "no event will ever come that could start it"
            assert self.now < self.last_start + self.policy.stagger_s or self.for_memory

    @invariant()
    def no_room_is_idle_while_a_job_waits(self) -> None:
        if self.held or self.refused_since_an_end or self.now < self.last_start + self.policy.stagger_s:
            return
        if self.looking or (self.for_memory and self.schedule.deadline is not None):
            return
        if set(self.waiting) - self.alone:
            assert len(self._room()) < self.layout.devices_per_job
        if self.alone & set(self.waiting) and self._reserved():
            assert self._load(self._reserved()), "whole devices are free, and a job waits for them"

    @invariant()
    def the_deadline_is_still_to_come_and_is_there_for_all_that_must_end(self) -> None:
        if self.schedule.deadline is not None:
            assert self.schedule.deadline > self.now or (self.policy.kill_grace_s == 0 and self.interrupted)
        bounded = self.alive & (self.ending | self.interrupted.keys() | self.killed.keys())
        if bounded or (self.policy.timeout_s is not None and self.alive):
            assert self.schedule.deadline is not None

    def teardown(self) -> None:
        """Whatever came before: once the disk has room and every process that runs ends, all is over."""
        if not hasattr(self, "alive"):
            return
        if self.held:
            self.held = False
            self._tell(Released(), None)
        for _ in range(200):
            if self.looking:
                self._answer(None)
            if self.schedule.deadline is not None and not self.alive:
                self.now = max(self.now, self.schedule.deadline)
                self._carry_out(self.schedule.tick(self.now), None)
            for num in sorted(self.alive):
                self._end(num, DONE, None)
        assert self.outcomes.keys() == set(self.order)
        assert self.schedule.idle
        assert self.schedule.deadline is None

    def _policy(self, data: strategies.DataObject) -> Policy:
        return Policy(
            data.draw(strategies.sampled_from([0.0, 1.0, GRACE_S]), "grace"),
            timeout_s=data.draw(strategies.sampled_from([None, 5.0]), "timeout"),
            stagger_s=data.draw(strategies.sampled_from([0.0, 0.5]), "stagger"),
            max_retries=data.draw(strategies.integers(0, 2), "retries"),
            retry_on=frozenset(data.draw(strategies.sets(strategies.sampled_from(WAYS)), "retry on")),
            fail_fast=data.draw(strategies.booleans(), "fail fast"),
        )

    # how commands are carried out

    def _submit(self, count: int, data: strategies.DataObject) -> None:
        nums = list(range(len(self.order), len(self.order) + count))
        self.order += nums
        self.waiting += nums
        self.tries.update(dict.fromkeys(nums, 0))
        self._step(submitted(*nums), data)

    def _end(self, num: int, report: Report | None, data: strategies.DataObject | None) -> None:
        """The tree of the job is gone; what follows must be what its judge says, and the policy."""
        verdict, stopped = judge(self.reasons.get(num), WELL, report), self.stopped
        self._forget(num)
        self.refused_since_an_end = False
        again = verdict.cause.value in self.policy.retry_on and self.tries[num] <= self.policy.max_retries
        if again and not stopped:
            self.waiting = sorted([*self.waiting, num])
            if verdict.cause is Cause.OOM:
                self.alone.add(num)
        self.retried = None
        if data is None:
            self._tell(Gone(num, WELL, report), None)
        else:
            self._step(Gone(num, WELL, report), data)
        if again and not stopped:
            assert self.retried == verdict
        else:
            assert self.outcomes[num] == verdict
            assert not (self.waiting and self.stopped)

    def _forget(self, num: int) -> None:
        """The try is over."""
        self.alive.remove(num)
        self.taken = {slot: holder for slot, holder in self.taken.items() if holder != num}
        self.ending.discard(num)
        self.returned.discard(num)
        for of_the_try in (self.interrupted, self.killed, self.reasons, self.started):
            of_the_try.pop(num, None)

    def _step(self, event: Event | None, data: strategies.DataObject) -> None:
        """Some time, then the event, then whatever is due: as in the loop, which may also be late."""
        until = self.schedule.deadline
        choices = [0.0, 0.25, *([] if until is None else [until - self.now, until - self.now + 100])]
        self.now += data.draw(strategies.sampled_from(choices), "seconds later")
        if event is not None:
            self._tell(event, data)
        self._carry_out(self.schedule.tick(self.now), data)

    def _tell(self, event: Event, data: strategies.DataObject | None) -> None:
        self._carry_out(self.schedule.handle(event, self.now), data)

    def _carry_out(self, commands: Sequence[Command], data: strategies.DataObject | None) -> None:
        answers: deque[Event] = deque()
        for command in commands:
            answer = self._do(command, lambda what: data is not None and data.draw(strategies.booleans(), what))
            if answer is not None:
                answers.append(answer)
        while answers:
            event = answers.popleft()
            if isinstance(event, StartRefused):
                self._undo_start(event.num)
            self._tell(event, data)

    def _do(self, command: Command, happens: Callable[[str], bool]) -> Event | None:
        match command:
            case Start(job, attempt, slots):
                self._check_start(job.num, attempt, slots)
                self.waiting.remove(job.num)
                self.taken.update(dict.fromkeys(slots, job.num))
                self.alive.add(job.num)
                self.started[job.num] = self.last_start = self.now
                self.tries[job.num] += 1
                return StartRefused(job.num, "EAGAIN", True) if happens(f"job {job.num} is refused") else None
            case Interrupt(num, why, _, cause):
                assert num in self.alive - self.ending
                assert num not in self.interrupted.keys() | self.killed.keys()
                if cause is Cause.TIMEOUT:
                    assert self.policy.timeout_s is not None
                    assert self.now >= self.started[num] + self.policy.timeout_s
                else:
                    assert self.stopped or num in self.cancelled
                    assert not self.stopped_hard
                self.interrupted[num] = self.now
                return self._signalled(num, Stopped(cause, why), happens)
            case Kill(num, why):
                assert num in self.alive - self.ending
                assert num not in self.killed
                assert self.stopped_hard or self.now >= self.interrupted[num] + self.policy.kill_grace_s
                self.killed[num] = self.now
                return self._signalled(num, Stopped(Cause.CANCELLED, why), happens)
            case Abandon(num):
                assert num in self.alive
                assert num in self.ending | self.killed.keys()
                report = DONE if num in self.returned else None
                self.retired |= {slot for slot, holder in self.taken.items() if holder == num}
                verdict = judge(self.reasons.get(num), None, report)
                self._forget(num)
                self.outcomes[num] = verdict  # until the schedule says it
                self.refused_since_an_end = False
                return Abandoned(num, report)
            case Retry(job, attempt, outcome):
                assert attempt == self.tries[job.num]
                self.retried = outcome
                return None
            case End(job, attempt, outcome):
                assert self.outcomes.get(job.num, outcome) == outcome
                assert job.num not in self.alive
                could_not_start = outcome.cause is Cause.LOST and job.num in self.waiting
                assert attempt == self.tries[job.num] or (could_not_start and attempt == self.tries[job.num] + 1)
                self.outcomes[job.num] = outcome
                self.stopped |= outcome.status is Status.FAILED and self.policy.fail_fast
                if job.num in self.waiting:
                    self.waiting.remove(job.num)
                    assert outcome.cause in {Cause.CANCELLED, Cause.LOST}
                return None
            case Look() | Scarce():
                raise AssertionError("nothing was asked for that needs a measurement")

    def _check_start(self, num: int, attempt: int, slots: tuple[Slot, ...]) -> None:
        assert not self.stopped
        assert not self.held
        assert self.now >= self.last_start + self.policy.stagger_s or self.last_start == self.now == 0
        assert attempt == self.tries[num] + 1
        assert attempt <= 1 + self.policy.max_retries
        assert not set(slots) & (self.taken.keys() | self.retired)
        chosen = {slot.device for slot in slots}
        assert len(chosen) == self.layout.devices_per_job
        if num in self.alone:
            assert num == next(n for n in self.waiting if n in self.alone)
            assert set(slots) == {s for s in self.layout.slots if s.device in chosen} - self.retired
            assert chosen == self._reserved() or self.for_memory
            return
        assert num == next(n for n in self.waiting if n not in self.alone)
        if self.for_memory:
            return
        room, load = self._room(), self._load()
        assert all(slot.number == room[slot.device] for slot in slots), "the lowest that is free"
        assert len(slots) == len(chosen)
        others = room.keys() - chosen
        assert not others or max((load[d], d) for d in chosen) < min((load[d], d) for d in others), "the least loaded"

    def _undo_start(self, num: int) -> None:
        self._forget(num)
        self.tries[num] -= 1
        self.waiting = sorted([*self.waiting, num])
        self.refused_since_an_end = True

    def _answer(self, data: strategies.DataObject | None) -> None:
        """What the driver says, where somebody has asked; plenty, where nobody draws it."""

    def _signalled(self, num: int, stopped: Stopped, happens: Callable[[str], bool]) -> Event | None:
        """The first signal finds the job's own outcome on disk, or not; a later one changes nothing about that."""
        if num not in self.reasons.keys() | self.returned:
            if happens(f"job {num} had ended by itself"):
                self.returned.add(num)
            else:
                self.reasons[num] = stopped
        return Returned(num) if num in self.returned else None

    def _reserved(self) -> set[int]:
        """The devices that will be wholly free soonest, where a job waits for such."""
        if not self.alone & set(self.waiting):
            return set()
        usable = {slot.device for slot in self.layout.slots if slot not in self.retired}
        lost, load = [Counter(slot.device for slot in slots) for slots in (self.retired, self.taken)]
        order = sorted(usable, key=lambda d: (lost[d], lost[d] + load[d], d))
        return set(order[: self.layout.devices_per_job]) if len(order) >= self.layout.devices_per_job else set()

    def _room(self) -> dict[int, int]:
        """The number of the lowest free slot by device, where no job waits for the whole of it."""
        reserved = self._reserved()
        free = [s for s in self.layout.slots if s not in self.taken.keys() | self.retired and s.device not in reserved]
        return {device: min(s.number for s in free if s.device == device) for device in {s.device for s in free}}

    def _load(self, devices: Collection[int] | None = None) -> Counter[int]:
        """By device: slots that are taken, or (of all devices) retired."""
        slots = self.taken.keys() if devices is not None else self.taken.keys() | self.retired
        return Counter(slot.device for slot in slots if devices is None or slot.device in devices)


def test_in_any_order_of_events_each_job_ends_once_no_slot_is_shared_or_idle_and_the_end_is_reached() -> None:
    run_state_machine_as_test(
        AnyWorld,
        settings=settings(
            max_examples=300, stateful_step_count=30, deadline=None, database=None, report_multiple_bugs=False
        ),
    )


# --- slots that other sweeps have ---


def taken(num: int, *slots: tuple[int, int]) -> Taken:
    return Taken(num, frozenset(Slot(*slot) for slot in slots))


def waits(pool: Schedule, now: float) -> list[tuple[int, int]]:
    """The slots that the schedule waits for."""
    return sorted((slot.device, slot.number) for slot in pool.waiting(now).slots)


def test_a_job_whose_slot_is_anothers_is_tried_on_the_others_in_its_turn() -> None:
    pool = schedule(devices=3)
    assert placed(pool.handle(submitted(0, 1), 0)) == {0: [(0, 0)], 1: [(1, 0)]}
    assert placed(pool.handle(taken(0, (0, 0)), 0)) == {0: [(2, 0)]}
    assert placed(pool.handle(taken(0, (2, 0)), 0)) == {}
    assert placed(pool.handle(taken(1, (1, 0)), 0)) == {}
    assert placed(pool.handle(Freed(), 5)) == {0: [(0, 0)], 1: [(1, 0)]}


def test_a_slot_of_ours_that_is_free_again_goes_to_the_job_that_waits() -> None:
    pool = schedule(devices=2)
    pool.handle(submitted(0, 1), 0)
    pool.handle(taken(1, (1, 0)), 0)
    assert placed(pool.handle(gone(0), 3)) == {1: [(0, 0)]}


def test_where_only_others_run_nothing_is_lost() -> None:
    pool = schedule()
    pool.handle(submitted(0, 1), 0)
    assert pool.handle(taken(0, (0, 0)), 0) == []
    assert not pool.idle
    assert waits(pool, 0) == [(0, 0)]


def test_a_job_of_one_slot_waits_for_what_others_have_and_a_job_of_several_for_what_is_free_too() -> None:
    one = schedule(devices=2)
    one.handle(submitted(0, 1), 0)
    one.handle(taken(1, (1, 0)), 0)
    assert waits(one, 0) == [(1, 0)]
    both = schedule(devices=2, per_job=2)
    both.handle(submitted(0), 0)
    both.handle(taken(0, (1, 0)), 0)
    assert waits(both, 0) == [(0, 0), (1, 0)]


def test_a_job_that_needs_whole_devices_waits_for_all_of_their_slots_and_takes_the_emptiest() -> None:
    pool = Schedule(layout(devices=2, slots=2), Policy(GRACE_S, max_retries=1, retry_on=frozenset({"oom"})))
    pool.handle(submitted(0), 0)
    assert placed(pool.handle(gone(0, FULL), 1)) == {0: [(0, 0), (0, 1)]}
    assert placed(pool.handle(taken(0, (0, 1)), 1)) == {0: [(1, 0), (1, 1)]}
    assert placed(pool.handle(taken(0, (1, 1)), 1)) == {}
    assert pool.waiting(1) == Waiting(alone=frozenset({0, 1})), "either may be the first to come free"
    assert placed(pool.handle(Freed(), 2)) == {0: [(1, 0), (1, 1)]}
    assert not pool.waiting(2)


def retries_alone(**policy: Any) -> Schedule:
    """A pool of two devices with two slots each, in which job 0 waits for device 0 as a whole, and 2 to 4 run."""
    policy = {"max_retries": 1, "retry_on": frozenset({"oom"}), **policy}
    pool = Schedule(layout(devices=2, slots=2), Policy(GRACE_S, **policy))
    assert placed(pool.handle(submitted(0, 1, 2, 3, 4, 5), 0)).keys() == {0, 1, 2, 3}
    assert placed(pool.handle(gone(1), 1)) == {4: [(1, 0)]}
    assert placed(pool.handle(gone(0, FULL), 1)) == {}
    assert pool.waiting(1) == Waiting(alone=frozenset({0}))
    return pool


def test_a_job_that_needs_whole_devices_waits_in_line_for_them_although_only_ours_are_there_and_others_start() -> None:
    pool = retries_alone()
    assert placed(pool.handle(gone(3), 2)) == {5: [(1, 1)]}
    assert pool.waiting(2) == Waiting(alone=frozenset({0}))
    assert pool.deadline is None, "nothing of others is waited for"
    assert placed(pool.handle(gone(2), 3)) == {0: [(0, 0), (0, 1)]}


def test_what_others_have_of_the_devices_that_a_job_needs_as_a_whole_is_waited_for_by_no_other_job() -> None:
    pool = retries_alone()
    pool.handle(gone(3), 2)
    pool.handle(taken(5, (1, 1)), 2)
    assert pool.waiting(2) == Waiting(frozenset({Slot(1, 1)}), alone=frozenset({0}))
    assert placed(pool.handle(gone(2), 3)) == {0: [(0, 0), (0, 1)]}
    pool.handle(taken(0, (0, 1)), 3)
    waiting = pool.waiting(3)
    assert (*waiting.slots, *waiting.alone) == (Slot(1, 1), 0)
    assert waiting.told == {Slot(0, 1), Slot(1, 1)}


def test_a_job_that_needs_whole_devices_is_in_nobodys_way_until_it_is_due_and_keeps_its_place_after_that() -> None:
    policy = Policy(GRACE_S, stagger_s=60, max_retries=1, retry_on=frozenset({"oom"}))
    pool = Schedule(layout(devices=2), policy)
    pool.handle(submitted(0, 1), 0)
    pool.handle(gone(0, FULL), 1)
    assert not pool.waiting(1)
    assert placed(pool.tick(60)) == {0: [(0, 0)]}
    assert placed(pool.handle(taken(0, (0, 0)), 60)) == {0: [(1, 0)]}
    assert placed(pool.handle(taken(0, (1, 0)), 60)) == {}
    assert pool.waiting(60).alone == {0, 1}
    assert placed(pool.handle(Freed(), 61)) == {0: [(0, 0)]}


def test_a_job_that_needs_whole_devices_keeps_its_place_while_another_start_makes_it_wait_for_its_due() -> None:
    policy = Policy(GRACE_S, stagger_s=60, max_retries=1, retry_on=frozenset({"oom"}))
    pool = Schedule(layout(devices=2, slots=2), policy)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(gone(0, FULL), 1)
    assert placed(pool.tick(60)) == {0: [(0, 0), (0, 1)]}
    assert placed(pool.handle(taken(0, (0, 0)), 60)) == {0: [(1, 0), (1, 1)]}
    assert placed(pool.handle(taken(0, (1, 0), (1, 1)), 60)) == {}
    assert pool.waiting(60).alone == {0}
    assert placed(pool.handle(Freed(), 61)) == {0: [(0, 0), (0, 1)]}
    assert placed(pool.handle(taken(0, (0, 0)), 61)) == {0: [(1, 0), (1, 1)]}
    assert placed(pool.handle(taken(0, (1, 0)), 61)) == {1: [(1, 1)]}
    assert placed(pool.handle(Freed(), 62)) == {}
    assert pool.waiting(62).alone == {0}


def test_a_job_that_needs_a_whole_device_waits_for_each_that_may_be_the_first_to_come_free() -> None:
    pool = Schedule(layout(devices=3), Policy(GRACE_S, max_retries=1, retry_on=frozenset({"oom"})))
    pool.handle(submitted(0), 0)
    pool.handle(gone(0, FULL), 1)
    pool.handle(taken(0, (0, 0), (1, 0), (2, 0)), 1)
    assert pool.waiting(1) == Waiting(alone=frozenset({0, 1, 2}))
    assert placed(pool.handle(Freed(), 2)) == {0: [(0, 0)]}
    assert placed(pool.handle(taken(0, (0, 0), (2, 0)), 2)) == {0: [(1, 0)]}


def test_a_device_of_which_a_slot_is_kept_free_already_is_not_given_up_for_one_that_is_no_emptier() -> None:
    pool = Schedule(layout(devices=2, slots=2), Policy(GRACE_S, max_retries=1, retry_on=frozenset({"oom"})))
    started = placed(pool.handle(submitted(0, 1, 2, 3, 4, 5), 0))
    assert started == {0: [(0, 0)], 1: [(1, 0)], 2: [(0, 1)], 3: [(1, 1)]}
    assert placed(pool.handle(gone(1, FULL), 2)) == {}, "a slot of device 1 is kept free"
    assert placed(pool.handle(gone(0), 6)) == {4: [(0, 0)]}, "and goes on to be"
    assert placed(pool.handle(gone(3), 8)) == {1: [(1, 0), (1, 1)]}


def test_a_device_that_comes_free_first_is_the_only_one_that_is_waited_for_as_a_whole() -> None:
    pool = Schedule(layout(devices=3, slots=2), Policy(GRACE_S, max_retries=1, retry_on=frozenset({"oom"})))
    pool.handle(submitted(0), 0)
    pool.handle(gone(0, FULL), 1)
    pool.handle(taken(0, *((device, slot) for device in range(3) for slot in range(2))), 1)
    assert pool.waiting(1) == Waiting(alone=frozenset({0, 1, 2}))
    pool.handle(Freed(), 2)
    pool.handle(taken(0, (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)), 2)
    assert pool.waiting(2).alone == {1}


def test_a_job_that_needs_whole_devices_and_is_cancelled_waits_for_them_no_longer() -> None:
    pool = retries_alone()
    pool.handle(Cancel(0, "by hand"), 2)
    assert not pool.waiting(2)


@pytest.mark.parametrize(
    "event", [CTRL_C, Cancel(0, "by hand"), Held()], ids=["stop", "cancel", "nothing can be recorded"]
)
def test_nothing_is_waited_for_where_no_job_could_start(event: Event) -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    pool.handle(taken(0, (0, 0)), 0)
    assert waits(pool, 0) == [(0, 0)]
    pool.handle(event, 1)
    assert waits(pool, 1) == []
    assert pool.deadline is None


def test_a_job_that_was_stopped_in_the_step_of_its_start_is_not_tried_again() -> None:
    pool = Schedule(layout(devices=2), Policy(GRACE_S, fail_fast=True))
    pool.handle(submitted(0, 1), 0)
    pool.handle(StartRefused(0, "no", for_now=False), 0)
    outcome = ended(pool.handle(taken(1, (1, 0)), 0))[1]
    assert outcome.cause is Cause.CANCELLED
    assert pool.idle


def test_others_slots_are_looked_at_again_soon_and_then_now_and_then() -> None:
    pool = schedule()
    pool.handle(submitted(0), 10)
    looks: list[float] = []
    for _ in range(3):
        pool.handle(taken(0, (0, 0)), pool.deadline or 10)
        pool.waiting(looks[-1] if looks else 10)
        assert pool.deadline is not None
        looks.append(pool.deadline)
        assert placed(pool.tick(pool.deadline)) == {0: [(0, 0)]}
    assert looks == [11, 41, 71]


def test_what_rings_does_not_put_off_the_next_look() -> None:
    pool = schedule()
    pool.handle(submitted(0), 0)
    for now in (0.0, 0.5, 0.9):
        pool.handle(Freed(), now)
        pool.handle(taken(0, (0, 0)), now)
        pool.waiting(now)
    assert pool.deadline == 1


def test_a_person_is_told_after_a_moment_of_what_others_have_and_not_of_what_is_free() -> None:
    pool = schedule(devices=2, per_job=2)
    pool.handle(submitted(0), 0)
    pool.handle(taken(0, (1, 0)), 0)
    assert pool.waiting(0).told == frozenset()
    pool.handle(Freed(), 0.9)
    pool.handle(taken(0, (1, 0)), 0.9)
    assert pool.waiting(0.9).told == frozenset()
    pool.tick(1)
    pool.handle(taken(0, (1, 0)), 1)
    assert pool.waiting(1).told == {Slot(1, 0)}


def test_a_start_that_others_prevent_does_not_count_for_the_stagger() -> None:
    pool = Schedule(layout(devices=2), Policy(GRACE_S, stagger_s=60))
    assert placed(pool.handle(submitted(0, 1), 0)) == {0: [(0, 0)]}
    assert placed(pool.handle(taken(0, (0, 0)), 0)) == {0: [(1, 0)]}
    assert waits(pool, 0) == [], "the next start is not to be yet"
    assert pool.deadline == 60
    pool.tick(60)
    assert waits(pool, 60) == [(0, 0)]


def test_where_the_system_refuses_processes_nothing_of_others_is_waited_for_until_a_job_ends() -> None:
    pool = schedule(devices=3)
    pool.handle(submitted(0, 1, 2), 0)
    pool.handle(taken(1, (1, 0)), 0)
    pool.handle(StartRefused(2, "no more", for_now=True), 0)
    assert waits(pool, 0) == []
    assert pool.handle(Freed(), 1) == []
    assert placed(pool.handle(gone(0), 2)) == {1: [(0, 0)], 2: [(1, 0)]}


def test_while_memory_is_looked_at_a_sweep_keeps_its_place_in_the_line_and_gives_it_up_where_memory_lacks() -> None:
    pool = Schedule(layout(), Policy(GRACE_S, min_free=10))
    pool.handle(submitted(0), 0)
    assert placed(pool.handle(Measured({0: 10}), 0)) == {0: [(0, 0)]}
    pool.handle(taken(0, (0, 0)), 0)
    assert waits(pool, 0) == [(0, 0)]
    assert [*map(type, pool.handle(Freed(), 5))] == [Look]
    assert waits(pool, 5) == [(0, 0)]
    pool.handle(Measured({0: 9}), 5)
    assert waits(pool, 5) == []
