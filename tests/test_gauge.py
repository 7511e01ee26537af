"""Free memory and starts: the schedule with its gauge, against memory that is written down. No process, no driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from test_schedule import AnyWorld

from hydra_plugins.hydra_gpu_pool_launcher._events import (
    Abandoned,
    Cancel,
    Command,
    End,
    Ending,
    Event,
    Gone,
    Held,
    Look,
    Measured,
    Released,
    Scarce,
    Start,
    StartRefused,
    Stop,
    Submitted,
    Waiting,
)
from hydra_plugins.hydra_gpu_pool_launcher._gauge import IN_VAIN_S, LOOK_S, RETURN_LOOK_S, YOUNG_S
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Exit, Job, Layout, Policy, Report, Slot, Status
from hydra_plugins.hydra_gpu_pool_launcher._schedule import Schedule
from hydra_plugins.hydra_gpu_pool_launcher._verdict import LOST_AFTER_S

GB = 10**9
CARD = 80 * GB
SETTLE_S = 10.0
WELL = Exit(code=0, signal=None, cpu_s=1.0, peak_mb=1.0)
DONE = Report(Status.COMPLETED, None, None, 0.5, "sha")
FULL = Report(Status.FAILED, "torch.OutOfMemoryError", "CUDA out of memory", None, "sha", out_of_memory=True)


def pool(devices: int = 1, slots: int = 1, per_job: int = 1, **policy: Any) -> Schedule:
    layout = Layout(tuple(Device(str(d), total_bytes=CARD) for d in range(devices)), slots, per_job)
    return Schedule(layout, Policy(30.0, **policy))


def careful(devices: int = 1, slots: int = 1, per_job: int = 1, gb: int = 20, **policy: Any) -> Schedule:
    """A pool with ``min_free``, in which an ended job's memory is back at once."""
    return pool(devices, slots, per_job, min_free=gb * GB, **policy)


def patient(devices: int = 1, slots: int = 1, per_job: int = 1, **policy: Any) -> Schedule:
    """A pool that gives memory time to come back, and needs no certain amount."""
    return pool(devices, slots, per_job, settle_s=SETTLE_S, **policy)


def submitted(*nums: int) -> Submitted:
    return Submitted(tuple(Job(num, ()) for num in nums))


def gone(num: int, report: Report = DONE) -> Gone:
    return Gone(num, WELL, report)


def measured(*free_gb: float | None, used: Mapping[tuple[int, int], float] | None = None) -> Measured:
    """GB that are free on device 0, 1, …, and those that a job holds of a device."""
    free = {device: None if gb is None else round(gb * GB) for device, gb in enumerate(free_gb)}
    return Measured(free, {key: round(gb * GB) for key, gb in (used or {}).items()})


def told(schedule: Schedule, event: Event, at: float) -> list[str]:
    """What follows, in words: "look", "scarce 0", and of each job that starts its number and devices, "1 on 0,2"."""
    return words(schedule.handle(event, at))


def ticked(schedule: Schedule, at: float) -> list[str]:
    """What is due then, which is what the schedule had said."""
    assert schedule.deadline == at
    return words(schedule.tick(at))


def words(commands: Sequence[Command]) -> list[str]:
    said = []
    for command in commands:
        match command:
            case Start(job, _, slots):
                said.append(f"{job.num} on {','.join(str(slot.device) for slot in slots)}")
            case Look():
                said.append("look")
            case Scarce(device, free):
                said.append(
                    f"scarce {device}: {None if free is None else free / GB:g}" if free is not None else "unknown"
                )
            case End():
                pass
            case _:
                said.append(type(command).__name__)
    return said


# --- without a driver, and without a need for it ---


def test_where_nothing_is_asked_for_nobody_looks_and_a_slot_is_given_on_at_once() -> None:
    schedule = pool()
    assert told(schedule, submitted(0, 1), 0) == ["0 on 0"]
    assert told(schedule, gone(0), 5) == ["1 on 0"]


def test_first_starts_wait_for_no_look() -> None:
    assert told(patient(devices=2), submitted(0, 1, 2), 0) == ["0 on 0", "1 on 1"]


# --- min_free ---


def test_a_job_starts_in_the_step_in_which_enough_is_free_and_not_before_anybody_has_looked() -> None:
    schedule = careful()
    assert told(schedule, submitted(0), 0) == ["look"]
    assert schedule.deadline is None, "the answer comes by itself"
    assert told(schedule, measured(20), 0.1) == ["0 on 0"]


def test_what_was_measured_for_one_start_does_not_count_for_the_next_step() -> None:
    schedule = careful()
    told(schedule, submitted(0), 0)
    told(schedule, measured(80), 0.1)
    assert told(schedule, submitted(1), 0.1) == []
    assert told(schedule, gone(0), 99) == ["look"]
    assert told(schedule, measured(19.9), 99) == ["scarce 0: 19.9"]


def test_where_too_little_is_free_it_is_looked_again_each_second_and_told_once() -> None:
    schedule = careful()
    told(schedule, submitted(0), 0)
    assert told(schedule, measured(5), 0.25) == ["scarce 0: 5"]
    assert ticked(schedule, 0.25 + LOOK_S) == ["look"]
    assert told(schedule, measured(6), 2) == []
    assert ticked(schedule, 2 + LOOK_S) == ["look"]
    assert told(schedule, measured(50), 3) == ["0 on 0"]
    assert schedule.deadline is None


def test_a_neighbour_that_comes_again_is_told_of_again() -> None:
    schedule = careful()
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, measured(5), 0) == ["scarce 0: 5"]
    schedule.tick(1)
    assert told(schedule, measured(50), 1) == ["0 on 0"]
    told(schedule, gone(0), 100)
    assert told(schedule, measured(5), 100) == ["scarce 0: 5"]


def test_while_a_neighbour_fills_one_gpu_its_slots_wait_and_the_others_go_on() -> None:
    schedule = careful(devices=2)
    told(schedule, submitted(*range(4)), 0)
    assert told(schedule, measured(3, 80), 0) == ["0 on 1", "scarce 0: 3"]
    for num in range(2):
        assert told(schedule, gone(num), 100 + num) == ["look"]
        assert told(schedule, measured(3, 80), 100 + num) == [f"{num + 1} on 1"]
    assert ticked(schedule, 101 + LOOK_S) == ["look"]
    assert told(schedule, measured(80, 10), 102) == ["3 on 0"]


def test_an_end_is_a_reason_to_look_at_once() -> None:
    schedule = careful(devices=2)
    told(schedule, submitted(0, 1, 2), 0)
    told(schedule, measured(80, 0), 0)
    assert told(schedule, gone(0), 0.5) == ["look"]
    assert schedule.deadline is None


def test_nobody_is_asked_twice_at_once() -> None:
    schedule = careful()
    assert told(schedule, submitted(0), 0) == ["look"]
    assert told(schedule, submitted(1), 0) == []


def test_a_device_of_which_nothing_is_known_takes_no_job_and_is_told_of_once() -> None:
    schedule = careful(devices=2)
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, measured(None, 80), 0) == ["0 on 1", "unknown"]
    told(schedule, gone(0), 90)
    assert told(schedule, Measured({}), 90) == ["unknown"], "the other one, too"
    schedule.tick(91)
    assert told(schedule, measured(80, None), 91) == ["1 on 0"]


def test_several_jobs_in_one_step_each_count_for_the_next_although_none_has_taken_anything_yet() -> None:
    schedule = careful(slots=4, gb=20)
    told(schedule, submitted(*range(5)), 0)
    assert told(schedule, measured(65), 0) == ["0 on 0", "1 on 0", "2 on 0"]


def test_a_young_job_counts_as_if_it_held_what_a_start_needs_and_an_old_one_counts_with_what_it_holds() -> None:
    schedule = careful(slots=2, gb=20)
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, measured(39), 0) == ["0 on 0"], "19 are left for another, when this one has its 20"
    assert ticked(schedule, LOOK_S) == ["look"]
    assert told(schedule, measured(39), YOUNG_S - 0.1) == []
    schedule.tick(100)
    assert told(schedule, measured(39), YOUNG_S) == ["1 on 0"], "it has had its time, and has taken nothing"


@pytest.mark.parametrize(("used", "free", "starts"), [(0, 40, True), (15, 25, True), (15, 24.9, False), (30, 20, True)])
def test_what_a_young_job_is_known_to_have_taken_is_not_counted_twice(used: float, free: float, starts: bool) -> None:
    schedule = careful(slots=2, gb=20)
    told(schedule, submitted(0), 0)
    told(schedule, measured(80), 0)
    told(schedule, submitted(1), 5)
    assert told(schedule, measured(free, used={(0, 0): used}), 5) == (["1 on 0"] if starts else [])


def test_a_job_with_several_devices_needs_the_memory_on_each() -> None:
    schedule = careful(devices=3, per_job=2)
    told(schedule, submitted(0), 0)
    assert told(schedule, measured(80, 5, 5), 0) == ["scarce 1: 5", "scarce 2: 5"]
    schedule.tick(1)
    assert told(schedule, measured(80, 5, 30), 1) == ["0 on 0,2"]


def test_a_job_that_needs_a_gpu_alone_takes_one_that_has_the_memory() -> None:
    schedule = careful(devices=2, max_retries=1, retry_on=frozenset({"oom"}))
    told(schedule, submitted(0), 0)
    told(schedule, measured(80, 80), 0)
    told(schedule, gone(0, FULL), 1)
    assert told(schedule, measured(5, 80), 1) == ["0 on 1"]


def test_a_start_that_the_system_refuses_leaves_nothing_that_counts() -> None:
    schedule = careful(slots=3, gb=30)
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, measured(80), 0) == ["0 on 0", "1 on 0"]
    schedule.handle(StartRefused(1, "EAGAIN", True), 0)
    told(schedule, gone(0), 1)
    assert told(schedule, measured(40), 1) == ["1 on 0"]


def test_stagger_keeps_its_distance_and_what_is_free_is_asked_when_it_is_over() -> None:
    schedule = careful(devices=2, stagger_s=5.0)
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, measured(80, 80), 1) == ["0 on 0"]
    assert ticked(schedule, 6) == ["look"]
    assert told(schedule, measured(80, 80), 6.5) == ["1 on 1"]


def test_a_stop_and_a_cancel_end_what_waits_for_memory() -> None:
    schedule = careful()
    told(schedule, submitted(0, 1), 0)
    told(schedule, measured(0), 0)
    assert told(schedule, Cancel(0, "by hand"), 0.5) == ["look"]
    assert told(schedule, Stop("Ctrl-C", 2), 0.6) == []
    assert schedule.idle
    assert told(schedule, measured(80), 0.7) == []
    assert schedule.deadline is None


def test_what_is_measured_while_nothing_can_be_recorded_starts_nothing_and_is_asked_again() -> None:
    schedule = careful()
    told(schedule, submitted(0), 0)
    told(schedule, Held(), 0)
    assert told(schedule, measured(80), 0) == []
    assert told(schedule, Released(), 50) == ["look"]


def test_where_memory_is_all_that_lacks_no_job_is_lost_although_none_runs() -> None:
    schedule = careful()
    told(schedule, submitted(0), 0)
    assert schedule.handle(measured(0), 0) == [Scarce(0, 0)]
    assert not schedule.idle
    assert schedule.deadline == LOOK_S


# --- memory that comes back ---


def after_a_job(schedule: Schedule, *before_gb: float) -> Schedule:
    """Device 0 has had a job, before which so much was free, and a second one waits for its slot, at 100 seconds."""
    told(schedule, submitted(0), 0)
    assert told(schedule, gone(0), 50) == []
    assert told(schedule, submitted(1, 2), 50) == ["look"]
    assert told(schedule, measured(*before_gb), 50) == []
    assert told(schedule, measured(*before_gb), 50) == []
    assert ticked(schedule, 50 + RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(*before_gb), 51) == ["1 on 0"]
    assert told(schedule, gone(1), 100) == ["look"]
    return schedule


@pytest.mark.parametrize("free", [80, 76, 79])
def test_the_next_job_starts_at_once_where_as_much_is_free_as_before_the_last_one(free: float) -> None:
    assert told(after_a_job(patient(), 80), measured(free), 100) == ["2 on 0"]


def test_memory_that_comes_back_slowly_is_waited_for_until_it_is_what_it_was() -> None:
    schedule = after_a_job(patient(), 80)
    for step, free in enumerate([10, 20, 40, 70]):
        assert told(schedule, measured(free), 100 + step * RETURN_LOOK_S) == []
        assert ticked(schedule, 100 + (step + 1) * RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(77), 101) == ["2 on 0"]


def test_memory_that_rises_no_more_is_waited_for_no_longer() -> None:
    schedule = after_a_job(patient(), 80)
    assert told(schedule, measured(10), 100) == []
    ticked(schedule, 100 + RETURN_LOOK_S)
    assert told(schedule, measured(30), 100.3) == []
    ticked(schedule, 100.3 + RETURN_LOOK_S)
    assert told(schedule, measured(30), 100.6) == ["2 on 0"], "somebody else has the rest"


def test_memory_that_never_stops_rising_is_waited_for_so_long_and_no_longer() -> None:
    schedule = after_a_job(patient(), 80)
    at, free = 100.0, 1.0
    while (at := at + RETURN_LOOK_S) < 100 + SETTLE_S:
        assert told(schedule, measured(free := free + 0.1), at - RETURN_LOOK_S) == []
        assert ticked(schedule, at) == ["look"]
    assert told(schedule, measured(free + 0.1), 100 + SETTLE_S) == ["2 on 0"]


def test_a_look_that_was_asked_for_before_the_job_had_ended_says_nothing_of_its_memory() -> None:
    schedule = patient(devices=2)
    told(schedule, submitted(0, 1), 0)
    told(schedule, gone(0), 10)
    assert told(schedule, submitted(2, 3), 10) == ["look"]
    assert told(schedule, gone(1), 10.1) == []
    assert told(schedule, measured(80, 30), 10.2) == []
    assert ticked(schedule, 10.2 + RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(80, 30), 10.5) == ["2 on 0"], "the second look at device 0, the first at device 1"
    assert ticked(schedule, 10.5 + RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(0, 30), 11) == ["3 on 1"]


def test_two_looks_right_after_each_other_do_not_show_that_memory_rises_no_more() -> None:
    schedule = patient(devices=2)
    told(schedule, submitted(0, 1), 0)
    told(schedule, gone(0), 10)
    told(schedule, submitted(2), 10)
    assert told(schedule, measured(30, 30), 10.01) == []
    assert told(schedule, gone(1), 10.02) == ["look"]
    assert told(schedule, measured(30, 30), 10.03) == []


def test_a_device_whose_memory_is_still_to_come_back_keeps_no_job_from_another_one() -> None:
    schedule = patient(devices=2)
    told(schedule, submitted(0), 0)
    told(schedule, gone(0), 10)
    assert told(schedule, submitted(1), 10) == ["1 on 1"]


def test_what_was_free_before_a_job_says_nothing_where_another_one_of_ours_was_there_then() -> None:
    schedule = patient(slots=2)
    told(schedule, submitted(0, 1), 0)
    told(schedule, gone(0), 10)
    told(schedule, submitted(2), 10)
    told(schedule, measured(60), 10)
    ticked(schedule, 10 + RETURN_LOOK_S)
    assert told(schedule, measured(60), 11) == ["2 on 0"]
    told(schedule, gone(1), 15)
    told(schedule, gone(2), 20)
    told(schedule, submitted(3), 20)
    assert told(schedule, measured(70), 20) == [], "80 are free when the memory of both is back"


def test_what_was_free_before_a_job_says_nothing_where_another_one_of_ours_is_there_now() -> None:
    schedule = patient(slots=2)
    told(schedule, submitted(0), 0)
    told(schedule, gone(0), 10)
    told(schedule, submitted(1), 10)
    told(schedule, measured(60), 10)
    ticked(schedule, 10 + RETURN_LOOK_S)
    assert told(schedule, measured(60), 11) == ["1 on 0"]
    assert told(schedule, submitted(2), 12) == ["2 on 0"]
    told(schedule, gone(1), 20)
    told(schedule, submitted(3), 20)
    assert told(schedule, measured(70), 20) == [], "a neighbour has left, and what job 2 holds says nothing"


def test_where_nobody_can_say_what_is_free_nothing_is_waited_for() -> None:
    schedule = patient()
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, gone(0), 10) == ["look"]
    assert told(schedule, Measured({}), 10) == ["1 on 0"]


def test_a_driver_that_is_silent_keeps_nobody_from_a_start_for_longer_than_memory_takes_to_come_back() -> None:
    schedule = patient()
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, gone(0), 10) == ["look"]
    assert ticked(schedule, 10 + SETTLE_S) == ["1 on 0"]
    assert schedule.deadline is None
    assert told(schedule, measured(80), 30) == []


def test_long_after_a_job_nobody_looks_for_its_memory() -> None:
    schedule = patient()
    told(schedule, submitted(0), 0)
    told(schedule, gone(0), 10)
    assert told(schedule, submitted(1), 10 + SETTLE_S) == ["1 on 0"]


def test_what_is_stuck_and_given_up_keeps_no_other_slot_of_its_device_waiting() -> None:
    schedule = patient(slots=2)
    told(schedule, submitted(0, 1, 2), 0)
    told(schedule, Ending(0), 10)
    assert ticked(schedule, 10 + LOST_AFTER_S) == ["Abandon"]
    told(schedule, Abandoned(0, None), 20)
    assert told(schedule, gone(1), 30) == ["look"]


def test_an_ended_jobs_memory_is_awaited_also_where_enough_is_free_and_is_no_scarcity_meanwhile() -> None:
    schedule = pool(min_free=20 * GB, settle_s=SETTLE_S)
    told(schedule, submitted(0, 1), 0)
    told(schedule, measured(80), 0)
    assert told(schedule, gone(0), 100) == ["look"]
    assert told(schedule, measured(10), 100) == []
    assert ticked(schedule, 100 + RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(30), 101) == []
    assert ticked(schedule, 101 + RETURN_LOOK_S) == ["look"]
    assert told(schedule, measured(80), 102) == ["1 on 0"]


# --- other sweeps ---


def seen(free: float, *of_others: int) -> Measured:
    """So much is free of the one device; and the devices of which other sweeps have a slot."""
    return Measured({0: int(free * GB)}, {}, frozenset(of_others))


def test_a_sweep_is_in_line_for_a_gpu_whose_memory_jobs_of_others_hold_until_they_have_left_and_it_is_back() -> None:
    schedule = pool(min_free=20 * GB, settle_s=SETTLE_S)
    told(schedule, submitted(0), 0)
    assert not schedule.waiting(0)
    assert told(schedule, seen(5, 0), 0) == ["scarce 0: 5"]
    assert schedule.waiting(0) == Waiting(drained=frozenset({0}))
    assert ticked(schedule, LOOK_S) == ["look"]
    assert schedule.waiting(LOOK_S) == Waiting(drained=frozenset({0}))
    assert told(schedule, seen(5), LOOK_S) == []
    assert schedule.waiting(LOOK_S) == Waiting(drained=frozenset({0})), "they have left just now"
    assert ticked(schedule, LOOK_S + RETURN_LOOK_S) == ["look"]
    assert told(schedule, seen(30), LOOK_S + RETURN_LOOK_S) == []
    assert ticked(schedule, LOOK_S + 2 * RETURN_LOOK_S) == ["look"]
    assert told(schedule, seen(30), LOOK_S + 2 * RETURN_LOOK_S) == ["0 on 0"]
    assert not schedule.waiting(2)


def in_vain(now: float = 0) -> Schedule:
    """A pool that waited for the memory of others, who have left GPU 0 with 5 GB free all the same."""
    schedule = pool(min_free=20 * GB, settle_s=SETTLE_S)
    told(schedule, submitted(0), now)
    told(schedule, seen(2, 0), now)
    assert schedule.waiting(now) == Waiting(drained=frozenset({0}))
    for at in (now + 1, now + 1 + RETURN_LOOK_S):
        assert schedule.waiting(at)
        ticked(schedule, at)
        told(schedule, seen(5), at)
    return schedule


def test_a_sweep_is_in_nobodys_way_where_what_holds_the_memory_is_no_sweep() -> None:
    schedule = pool(min_free=20 * GB, settle_s=SETTLE_S)
    told(schedule, submitted(0), 0)
    told(schedule, seen(5), 0)
    assert not schedule.waiting(0)
    assert not in_vain().waiting(3), "the other sweep has left, and its memory does not come back"


@pytest.mark.parametrize(
    ("free", "at", "stands"),
    [(5, 10, False), (2, 10, False), (8, 10, False), (12, 10, True), (2, 2 + IN_VAIN_S, True)],
    ids=["as much", "less", "hardly more", "more than without them", "long after"],
)
def test_a_turn_in_vain_is_not_asked_for_again_before_there_is_more_memory_or_a_long_time_has_passed(
    free: float, at: float, stands: bool
) -> None:
    schedule = in_vain()
    told(schedule, seen(free, 0), at)
    assert bool(schedule.waiting(at)) is stands


@pytest.mark.parametrize("measured", [Measured({}), Measured({0: None})])
def test_where_nobody_can_say_any_more_what_is_free_a_sweep_is_in_nobodys_way_and_a_person_is_told(
    measured: Measured,
) -> None:
    schedule = pool(min_free=20 * GB, settle_s=SETTLE_S)
    told(schedule, submitted(0), 0)
    assert told(schedule, seen(2, 0), 0) == ["scarce 0: 2"]
    assert schedule.waiting(0)
    ticked(schedule, 1)
    assert told(schedule, measured, 1) == ["unknown"]
    assert not schedule.waiting(1)
    ticked(schedule, 2)
    assert told(schedule, measured, 2) == []
    ticked(schedule, 3)
    assert told(schedule, seen(2, 0), 3) == ["scarce 0: 2"]
    assert schedule.waiting(3)


@pytest.mark.parametrize("measured", [seen(5), Measured({})], ids=["no sweep has it", "nobody can say"])
def test_a_job_that_needs_a_gpu_alone_is_in_nobodys_way_where_others_leaving_would_not_help_it(
    measured: Measured,
) -> None:
    schedule = pool(min_free=20 * GB, max_retries=1, retry_on=frozenset({"oom"}))
    told(schedule, submitted(0), 0)
    told(schedule, seen(80), 0)
    assert told(schedule, Gone(0, WELL, FULL), 10)
    assert schedule.waiting(10) == Waiting(alone=frozenset({0}))
    told(schedule, measured, 10)
    assert not schedule.waiting(10)
    ticked(schedule, 11)
    told(schedule, seen(60), 11)
    assert schedule._running, "it has started"


def test_a_sweep_is_in_nobodys_way_where_a_job_of_its_own_holds_the_memory_too() -> None:
    schedule = careful(slots=2)
    told(schedule, submitted(0, 1), 0)
    assert told(schedule, seen(25, 0), 0) == ["0 on 0"]
    assert not schedule.waiting(0)
    assert told(schedule, gone(0), 100) == ["look"]
    told(schedule, seen(5, 0), 100)
    assert schedule.waiting(100) == Waiting(drained=frozenset({0}))


# --- in any order ---


class AnyMemory(AnyWorld):
    """The same world, with memory that falls and rises, and a driver that takes its time to answer."""

    for_memory = True

    def _policy(self, data: strategies.DataObject) -> Policy:
        self.measured: dict[int, int | None] = {}  # in this step
        self.used: dict[tuple[int, int], int] = {}
        return replace(
            super()._policy(data),
            min_free=data.draw(strategies.sampled_from([None, 20]), "min_free"),
            settle_s=data.draw(strategies.sampled_from([0.0, SETTLE_S]), "settle"),
        )

    @precondition(lambda self: self.looking)
    @rule(data=strategies.data())
    def the_driver_answers(self, data: strategies.DataObject) -> None:
        self._answer(data)

    def _answer(self, data: strategies.DataObject | None) -> None:
        self.looking = False
        for device in range(len(self.layout.devices)):
            some = strategies.one_of(strategies.none(), strategies.integers(0, 100))
            self.measured[device] = 10**6 if data is None else data.draw(some, f"free on {device}")
        young = sorted({(num, slot.device) for slot, num in self.taken.items()})
        self.used = {} if data is None else {key: data.draw(strategies.integers(0, 30), f"{key}") for key in young}
        others = set() if data is None else data.draw(strategies.sets(strategies.integers(0, 3)), "of others")
        self._tell(Measured(self.measured, self.used, frozenset(others)), data)
        self.measured, self.used = {}, {}

    def _do(self, command: Command, happens: Callable[[str], bool]) -> Event | None:
        if isinstance(command, Look):
            assert not self.looking, "the driver was asked already"
            assert self.waiting
            assert not self.held
            assert not self.stopped
            self.looking = True
            return None
        if isinstance(command, Scarce):
            assert self.policy.min_free is not None
            assert command.free == self.measured[command.device]
            assert command.free is None or command.free < self.policy.min_free
            return None
        return super()._do(command, happens)

    def _check_start(self, num: int, attempt: int, slots: tuple[Slot, ...]) -> None:
        super()._check_start(num, attempt, slots)
        least = self.policy.min_free
        for device in {slot.device for slot in slots} if least is not None else ():
            free = self.measured.get(device)
            assert free is not None
            assert least is not None
            jobs = {self.taken[slot] for slot in self.taken if slot.device == device}
            young = [other for other in jobs if self.now < self.started[other] + YOUNG_S]
            assert free - sum(max(0, least - self.used.get((other, device), 0)) for other in young) >= least


def test_in_any_order_of_events_and_figures_no_job_starts_without_its_memory_and_the_end_is_reached() -> None:
    run_state_machine_as_test(
        AnyMemory,
        settings=settings(
            max_examples=200, stateful_step_count=30, deadline=None, database=None, report_multiple_bugs=False
        ),
    )
