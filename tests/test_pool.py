"""The loop and the schedule in a scripted world, whose future is written down: hours pass in microseconds."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._events import Ending, Freed, Measured, Start, Stop, Waiting
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._gauge import LOOK_S
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Exit, Job, Layout, Policy, Report, Slot, Status
from hydra_plugins.hydra_gpu_pool_launcher._pool import LOOK_AGAIN_S, Pool
from hydra_plugins.hydra_gpu_pool_launcher._requests import Close, Request
from hydra_plugins.hydra_gpu_pool_launcher._schedule import Schedule
from hydra_plugins.hydra_gpu_pool_launcher._system import Died, Happening
from hydra_plugins.hydra_gpu_pool_launcher._verdict import LOST_AFTER_S

GRACE_S = 30.0
WELL = Exit(code=0, signal=None, cpu_s=1.5, peak_mb=120.04)
KILLED = Exit(code=None, signal=signal.SIGKILL, cpu_s=0.5, peak_mb=60.0)
PATIENT = Policy(GRACE_S)
DONE = Report(Status.COMPLETED, None, None, 0.5, "sha")
CTRL_C = Stop("Ctrl-C", signal.SIGINT)


@dataclass
class Script:
    """A world with a written-down future, which keeps a list of all that is asked of it, in order.

    ``future``: what happens when, in order. ``reports``: what is on disk for a job, and since when. ``refusals``: how
    often the system refuses to start a job. ``taken``: what ``open`` says to a request. ``full``: from when
    to when, and why, nothing can be recorded. ``others``: the slots that another sweep has, from when to when;
    ``in_line``: those that the loop waits for. ``waiting``: the jobs that have finished and cannot save their results.
    ``memory``: of a device, from when on how much is free; a look is answered ``answers_after`` seconds later.
    ``peaks``: of GPU memory, by job.
    """

    future: list[tuple[float, Happening]]
    reports: Mapping[int, tuple[float, Report]] = field(default_factory=dict)
    refusals: dict[int, int] = field(default_factory=dict)
    taken: list[str | None] = field(default_factory=list)
    full: Sequence[tuple[float, float, str]] = ()
    others: dict[Slot, tuple[float, float]] = field(default_factory=dict)
    in_line: frozenset[Slot] = frozenset()
    waiting: Collection[int] = ()
    memory: Mapping[int, Sequence[tuple[float, int | None]]] = field(default_factory=dict)
    answers_after: float = 0.0
    peaks: Mapping[int, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)  # of the journal
    clock: float = 0.0

    def now(self) -> float:
        return self.clock

    def wait(self, deadline: float | None) -> Sequence[Happening]:
        self.calls.append("wait")
        assert self.future or deadline is not None, "the loop would wait for ever"
        assert self.calls.count("wait") < 100, "the loop spins"
        if deadline is not None and (not self.future or deadline < self.future[0][0]):
            self.clock = max(self.clock, deadline)
            return []
        self.clock = max(self.clock, self.future[0][0])
        happened = []
        while self.future and self.future[0][0] <= self.clock:
            happened.append(self.future.pop(0)[1])
        return happened

    def open(self, request: Request) -> None:
        why = self.taken.pop(0) if self.taken else None
        self.calls.append(f"open {request.files.sweep_dir}")
        if why is not None:
            raise ConfigurationError(why)

    def refuse(self, why: str) -> None:
        self.calls.append(f"refuse: {why}")

    def record(self, event: str, **facts: Any) -> None:
        self.calls.append(f"record {event}" + (f" {facts['job']}" if "job" in facts else ""))
        self.lines.append({"event": event, "at": self.clock, **facts})

    def blocked(self) -> str | None:
        return next((why for since, until, why in self.full if since <= self.clock < until), None)

    def warn(self, text: str) -> None:
        self.calls.append(f"warn: {text}")

    def leave(self) -> None:
        self.calls.append("leave")

    def ring(self) -> None:
        self.calls.append("ring")

    def lease(self, start: Start) -> frozenset[Slot]:
        taken = {slot for slot in start.slots if slot in self.others and self._is_anothers(slot)}
        if not taken and self.others:
            self.calls.append(f"lease {start.job.num}")
            self.in_line = frozenset()
        return frozenset(taken)

    def _is_anothers(self, slot: Slot) -> bool:
        since, until = self.others[slot]
        return since <= self.clock < until

    def release(self, num: int) -> None:
        if self.others:
            self.calls.append(f"release {num}")

    def wait_for(self, waiting: Waiting) -> bool:
        slots = waiting.slots
        new = bool(slots and not self.in_line)
        if slots != self.in_line:
            self.calls.append(f"wait for {sorted((slot.device, slot.number) for slot in slots)}")
        self.in_line = slots
        return new

    def holders(self, slots: Collection[Slot]) -> str:
        return f"{len(slots)} held by others"

    def start(self, start: Start) -> int:
        self.calls.append(f"start {start.job.num}")
        if self.refusals.get(start.job.num, 0):
            self.refusals[start.job.num] -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return 1000 + start.job.num

    def signal(self, num: int, signum: int) -> None:
        self.calls.append(f"signal {num} {signal.Signals(signum).name}")

    def saving(self, num: int) -> bool:
        return num in self.waiting

    def kill(self, num: int) -> None:
        self.calls.append(f"kill {num}")

    def abandon(self, num: int) -> None:
        self.calls.append(f"abandon {num}")

    def report(self, num: int) -> Report | None:
        since, report = self.reports.get(num, (float("inf"), None))
        return report if self.clock >= since else None

    def set_aside(self, num: int) -> None:
        self.calls.append(f"set_aside {num}")

    def look(self) -> None:
        self.calls.append("look")
        free = {device: gb for device, amounts in self.memory.items() for since, gb in amounts if since <= self.clock}
        self.future.insert(0, (self.clock + self.answers_after, Measured(free)))
        self.future.sort(key=lambda each: each[0])

    def scarcity(self, device: int) -> str:
        return f"device {device} is full"

    def gpu_mb(self, num: int) -> float | None:
        return self.peaks.get(num)

    def effects(self) -> list[str]:
        """What was asked for, without what is asked for in every step."""
        return [call for call in self.calls if call not in {"wait", "ring"}]

    def line(self, event: str, job: int) -> dict[str, Any]:
        """The one line of this event and job."""
        (line,) = [line for line in self.lines if line["event"] == event and line["job"] == job]
        return line


def request(*nums: int) -> Request:
    return Request(tuple(Job(num, (f"x={num}",)) for num in nums), SweepFiles("/sweep"), {}, "/", fresh=True)


def play(world: Script, slots: int = 1, devices: Sequence[str] = ("0",), policy: Policy = PATIENT) -> Script:
    """Serve until the end of the script, and give the world back."""
    layout = Layout(tuple(map(Device, devices)), slots)
    Pool(Schedule(layout, policy), world).serve()
    assert not world.future, "the loop has left something unheard"
    return world


# --- a sweep in which nothing goes wrong ---


def test_each_job_is_queued_started_and_ended_in_the_journal_and_done_comes_last() -> None:
    world = play(
        Script([(0, request(0, 1)), (5, Died(0, WELL)), (9, Died(1, WELL)), (9, Close())], {0: (4, DONE), 1: (8, DONE)})
    )
    assert world.effects() == [
        "open /sweep",
        "record queued 0",
        "record queued 1",
        "start 0",
        "record start 0",
        "record end 0",
        "start 1",
        "record start 1",
        "record end 1",
        "record done",
    ]


def test_a_start_line_says_try_pid_and_slots_in_the_words_of_the_layout() -> None:
    script = Script([(0, request(7)), (1, Died(7, WELL)), (1, Close())], {7: (1, DONE)})
    line = play(script, devices=["GPU-abc"]).line("start", 7)
    assert (line["attempt"], line["pid"], line["slots"]) == (1, 1007, ["GPU-abc.0"])


def test_an_end_line_says_all_that_main_and_the_reports_need() -> None:
    world = play(Script([(0, request(0)), (5, Died(0, WELL)), (5, Close())], {0: (4, DONE)}))
    assert world.line("end", 0) == {
        "event": "end",
        "at": 5,
        "job": 0,
        "attempt": 1,
        "status": "COMPLETED",
        "cause": "returned",
        "error_type": None,
        "error_text": None,
        "value": 0.5,
        "by_itself": True,
        "seconds": 5,
        "cpu_s": 1.5,
        "peak_mb": 120.0,
    }


def test_a_launch_without_jobs_is_done_at_once() -> None:
    assert play(Script([(0, request()), (1, Close())])).effects() == ["open /sweep", "record done"]


def test_each_launch_has_a_done_of_its_own() -> None:
    world = play(
        Script(
            [(0, request(0)), (1, Died(0, WELL)), (2, request(1)), (3, Died(1, WELL)), (4, Close())],
            {0: (1, DONE), 1: (3, DONE)},
        )
    )
    assert [line["at"] for line in world.lines if line["event"] == "done"] == [1, 3]
    assert {line["stopped"] for line in world.lines if line["event"] == "done"} == {None}


def test_the_done_of_a_launch_that_was_stopped_says_why() -> None:
    stop = Stop("Ctrl-C", signal.SIGINT)
    world = play(Script([(0, request(0)), (1, stop), (2, Died(0, Exit(None, 2, 0.0, 0.0))), (3, Close())], {}))
    assert [line["stopped"] for line in world.lines if line["event"] == "done"] == ["Ctrl-C"]


def test_main_is_told_once_in_every_step_after_all_that_the_step_did() -> None:
    world = play(Script([(0, request(0, 1)), (5, Died(0, WELL)), (9, Died(1, WELL)), (10, Close())]))
    steps = " ".join(world.calls).split("wait")[1:]
    assert len(steps) == 4
    assert all(step.count("ring") == 1 and step.rstrip().endswith("ring") for step in steps)


def test_the_seconds_of_a_job_end_with_its_process_not_with_what_it_left_behind() -> None:
    world = play(Script([(2, request(0)), (5, Ending(0)), (11, Died(0, WELL)), (11, Close())], {0: (4, DONE)}))
    assert world.line("end", 0)["at"] == 11
    assert world.line("end", 0)["seconds"] == 3


def test_the_seconds_of_a_job_begin_with_its_own_start() -> None:
    world = play(Script([(0, request(0, 1)), (5, Died(0, WELL)), (7, Died(1, WELL)), (7, Close())]))
    assert [world.line("end", num)["seconds"] for num in (0, 1)] == [5, 2]


# --- the end of serving ---


def test_a_loop_that_is_closed_and_idle_waits_no_more() -> None:
    assert play(Script([(3, Close())])).calls == ["wait", "ring"]


def test_a_loop_that_is_closed_waits_for_the_jobs_that_run_and_for_those_in_the_queue() -> None:
    world = play(
        Script([(0, request(0, 1)), (1, Close()), (5, Died(0, WELL)), (9, Died(1, WELL))], {0: (4, DONE), 1: (8, DONE)})
    )
    assert [line["status"] for line in world.lines if line["event"] == "end"] == ["COMPLETED", "COMPLETED"]


def test_a_stop_and_close_in_one_step_end_what_runs_before_the_loop_ends() -> None:
    world = play(Script([(0, request(0, 1)), (1, CTRL_C), (1, Close()), (5, Died(0, WELL))]))
    assert world.effects()[5:] == [
        "record end 1",
        "record stop 0",
        "signal 0 SIGINT",
        "set_aside 0",
        "record end 0",
        "record done",
    ]


# --- requests that cannot be had ---


def test_a_refused_request_is_answered_with_the_sentence_and_the_next_one_is_served() -> None:
    world = play(
        Script(
            [(0, request(0)), (1, request(1)), (2, Died(1, WELL)), (3, Close())],
            {1: (2, DONE)},
            taken=["the directory is in use", None],
        )
    )
    assert world.effects() == [
        "open /sweep",
        "refuse: the directory is in use",
        "open /sweep",
        "record queued 1",
        "start 1",
        "record start 1",
        "record end 1",
        "record done",
    ]


# --- starts that the system refuses ---


def test_a_refused_start_is_tried_again_in_front_of_the_others_when_a_job_ends() -> None:
    world = play(
        Script(
            [(0, request(0, 1, 2)), (5, Died(0, WELL)), (8, Died(1, WELL)), (9, Died(2, WELL)), (9, Close())],
            refusals={1: 1},
        ),
        slots=2,
    )
    assert [call for call in world.calls if call.startswith("start")] == ["start 0", "start 1", "start 1", "start 2"]
    assert world.line("start", 1)["at"] == 5, "the refused try is no start"
    assert world.line("end", 1)["seconds"] == 3, "nor does it count"


def test_starts_refused_in_one_step_are_tried_again_in_their_order() -> None:
    world = play(
        Script(
            [(0, request(0, 1, 2)), (5, Died(2, WELL)), (8, Died(0, WELL)), (9, Died(1, WELL)), (9, Close())],
            refusals={0: 1, 1: 1},
        ),
        slots=3,
    )
    assert [call for call in world.calls if call.startswith("start")] == [f"start {n}" for n in (0, 1, 2, 0, 1)]


def test_where_the_system_refuses_every_start_each_job_is_lost_with_its_reason_and_the_loop_goes_on() -> None:
    world = play(Script([(0, request(0, 1, 2)), (1, Close())], refusals={0: 99, 1: 99, 2: 99}), slots=3)
    ends = [line for line in world.lines if line["event"] == "end"]
    assert sorted(line["job"] for line in ends) == [0, 1, 2]
    assert all(line["error_type"] == "JobLostError" for line in ends)
    assert all(os.strerror(errno.EAGAIN) in line["error_text"] for line in ends)
    assert all("seconds" not in line for line in ends)
    assert world.effects()[-1] == "record done"


# --- stops ---


def test_the_decision_to_stop_is_on_record_before_the_first_signal() -> None:
    world = play(
        Script([(0, request(0, 1)), (1, CTRL_C), (2, Died(0, WELL)), (2, Died(1, WELL)), (3, Close())]), slots=2
    )
    assert world.effects()[7:11] == ["record stop 0", "signal 0 SIGINT", "record stop 1", "signal 1 SIGINT"]
    assert world.line("stop", 0)["why"] == "Ctrl-C"


def test_the_decision_to_kill_at_once_is_on_record_before_the_kill() -> None:
    world = play(Script([(0, request(0)), (1, Stop("enough", signal.SIGKILL)), (2, Died(0, KILLED)), (3, Close())]))
    assert world.effects()[4:6] == ["record stop 0", "kill 0"]
    assert world.line("end", 0)["error_text"] == "was cancelled: enough"


def test_a_job_whose_outcome_was_on_disk_before_the_signal_was_not_stopped_and_keeps_it() -> None:
    world = play(Script([(0, request(0)), (5, CTRL_C), (6, Died(0, WELL)), (7, Close())], {0: (4, DONE)}))
    assert world.effects()[4:] == ["signal 0 SIGINT", "record end 0", "record done"]
    assert (world.line("end", 0)["status"], world.line("end", 0)["by_itself"]) == ("COMPLETED", True)


def test_what_a_job_saves_after_it_was_told_to_stop_does_not_count_and_is_set_aside() -> None:
    world = play(Script([(0, request(0)), (5, CTRL_C), (6, Died(0, WELL)), (7, Close())], {0: (5.5, DONE)}))
    assert world.effects()[4:] == ["record stop 0", "signal 0 SIGINT", "set_aside 0", "record end 0", "record done"]
    assert world.line("end", 0)["status"] == "CANCELLED"


def test_what_a_job_saves_during_its_grace_does_not_count_either_when_it_is_killed_after_it() -> None:
    world = play(
        Script([(0, request(0)), (5, CTRL_C), (35.5, Died(0, KILLED)), (36, Close())], {0: (6, DONE)}),
    )
    assert world.effects()[4:] == [
        "record stop 0",
        "signal 0 SIGINT",
        "kill 0",
        "set_aside 0",
        "record end 0",
        "record done",
    ]
    assert world.line("end", 0)["error_text"] == "was cancelled: Ctrl-C"


def test_a_job_that_had_ended_by_itself_and_is_killed_in_its_exit_keeps_its_outcome() -> None:
    world = play(Script([(0, request(0)), (5, CTRL_C), (35.5, Died(0, KILLED)), (36, Close())], {0: (4, DONE)}))
    assert world.effects()[4:] == ["signal 0 SIGINT", "kill 0", "record end 0", "record done"]
    assert world.line("end", 0)["status"] == "COMPLETED"


def test_a_grace_of_thirty_seconds_is_over_after_thirty_seconds_and_is_journalled_once() -> None:
    class Watched(Script):
        killed_at: float | None = None

        def kill(self, num: int) -> None:
            super().kill(num)
            self.killed_at = self.clock

    world = Watched([(0, request(0)), (5, CTRL_C), (36, Died(0, KILLED)), (36, Close())])
    play(world)
    assert world.killed_at == 5 + GRACE_S
    assert world.effects()[4:8] == ["record stop 0", "signal 0 SIGINT", "kill 0", "set_aside 0"]


def test_a_second_stop_with_sigkill_kills_before_the_grace_is_over() -> None:
    again = Stop("again", signal.SIGKILL)
    world = play(Script([(0, request(0)), (5, CTRL_C), (6, again), (7, Died(0, KILLED)), (7, Close())]))
    assert world.effects()[4:7] == ["record stop 0", "signal 0 SIGINT", "kill 0"]
    assert world.line("end", 0)["at"] == 7
    assert world.line("end", 0)["error_text"] == "was cancelled: Ctrl-C"


# --- what is set aside ---


@pytest.mark.parametrize(
    ("exit_", "report"),
    [
        (WELL, DONE),
        (WELL, Report(Status.FAILED, "ValueError", "no", None, "sha")),
        (KILLED, DONE),
        (KILLED, None),  # nothing seems to be there, and if that was a fault of the reading, it must not be lost
        (WELL, None),
    ],
)
def test_nothing_of_a_job_that_was_not_stopped_is_taken_out_of_the_place_of_results(
    exit_: Exit, report: Report | None
) -> None:
    reports = {} if report is None else {0: (4.0, report)}
    world = play(Script([(0, request(0)), (5, Died(0, exit_)), (5, Close())], reports))
    assert "set_aside 0" not in world.calls


def test_a_job_that_never_started_has_nothing_that_could_be_set_aside() -> None:
    world = play(Script([(0, request(0, 1)), (1, CTRL_C), (2, Died(0, WELL)), (2, Close())]))
    assert "set_aside 1" not in world.calls
    assert "seconds" not in world.line("end", 1)


# --- what cannot be ended ---


def test_remnants_that_do_not_die_are_given_up_and_the_job_keeps_what_it_said() -> None:
    world = play(Script([(0, request(0)), (5, Ending(0)), (99, Close())], {0: (4, DONE)}))
    assert world.effects()[4:] == ["abandon 0", "record end 0", "record done"]
    end = world.line("end", 0)
    assert (end["at"], end["seconds"], end["status"]) == (5 + LOST_AFTER_S, 5, "COMPLETED")
    assert "cpu_s" not in end, "the kernel never told"


def test_a_job_that_does_not_die_of_sigkill_ends_as_lost_and_with_the_last_slot_so_does_the_rest() -> None:
    world = play(Script([(0, request(0, 1)), (5, Ending(0)), (99, Close())]))
    assert world.effects()[5:] == ["abandon 0", "record end 0", "record end 1", "record done"]
    assert [world.line("end", num)["error_type"] for num in (0, 1)] == ["JobLostError", "JobLostError"]


def test_a_start_that_was_refused_has_another_try_when_the_only_other_job_is_given_up() -> None:
    world = play(
        Script([(0, request(0, 1)), (5, Ending(0)), (20, Died(1, WELL)), (20, Close())], {1: (19, DONE)}, {1: 1}),
        slots=2,
    )
    assert world.line("start", 1)["at"] == 5 + LOST_AFTER_S
    assert world.line("end", 1)["status"] == "COMPLETED"


# --- while nothing can be recorded ---

FULL = "the sweep's files cannot be written (/sweep: No space left on device)"


def test_nothing_is_started_while_nothing_can_be_recorded_and_a_person_is_told_once() -> None:
    world = play(
        Script(
            [(0, request(0, 1, 2)), (5, Died(0, WELL)), (9, Died(1, WELL)), (30, Died(2, WELL)), (30, Close())],
            {0: (4, DONE), 1: (8, DONE), 2: (29, DONE)},
            full=[(3, 20.5, FULL)],
        ),
        slots=2,
    )
    told = [call for call in world.calls if call.startswith("warn")]
    assert told == [
        f"warn: {FULL}: no job is started until that is mended; those that run go on",
        "warn: the sweep's files can be written again: the sweep goes on",
    ]
    assert 20.5 <= world.line("start", 2)["at"] <= 20.5 + LOOK_AGAIN_S
    assert [line["at"] for line in world.lines if line["event"] == "end"] == [5, 9, 30]


def test_a_start_that_the_disk_refuses_is_put_off_and_not_given_up() -> None:
    class Quota(Script):
        def start(self, start: Start) -> int:
            if self.clock < 3:
                self.calls.append("refused")
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/sweep/jobs/0")
            return super().start(start)

    world = Quota([(0, request(0)), (9, Died(0, WELL)), (9, Close())], {0: (8, DONE)})
    play(world)
    assert world.calls.count("refused") >= 2
    assert len([call for call in world.calls if "Disk quota exceeded: '/sweep/jobs/0'" in call]) == 1
    assert world.line("start", 0)["at"] == 3
    assert world.line("end", 0)["status"] == "COMPLETED"


def test_whoever_stops_a_sweep_that_cannot_be_recorded_does_not_wait_for_the_disk() -> None:
    world = play(Script([(0, request(0)), (1, CTRL_C), (2, Close())], full=[(0, 100, FULL)]))
    assert world.effects()[-3:] == ["record end 0", "record done", "leave"]


def test_a_launch_that_ends_by_itself_is_over_only_when_that_is_recorded() -> None:
    world = play(Script([(0, request(0)), (5, Died(0, WELL)), (6, Close())], {0: (4, DONE)}, full=[(1, 100, FULL)]))
    assert "leave" not in world.calls


# --- retries, timeouts ---


def test_a_try_that_is_followed_by_another_is_recorded_as_such_with_all_that_an_end_says() -> None:
    policy = Policy(GRACE_S, max_retries=1, retry_on=frozenset({"crash"}))
    world = play(
        Script([(0, request(0)), (5, Died(0, KILLED)), (9, Died(0, WELL)), (9, Close())], {0: (8, DONE)}), policy=policy
    )
    assert world.effects()[2:] == [
        "start 0",
        "record start 0",
        "record retry 0",
        "start 0",
        "record start 0",
        "record end 0",
        "record done",
    ]
    retry, end = world.line("retry", 0), world.line("end", 0)
    assert (retry["attempt"], retry["cause"], retry["seconds"], retry["cpu_s"]) == (1, "crash", 5, 0.5)
    assert (end["attempt"], end["status"], end["seconds"]) == (2, "COMPLETED", 4)


def test_a_timeout_is_on_record_as_one_before_the_signal_and_what_is_returned_later_is_set_aside() -> None:
    policy = Policy(GRACE_S, timeout_s=60)
    world = play(Script([(0, request(0)), (70, Died(0, WELL)), (70, Close())], {0: (65, DONE)}), policy=policy)
    assert world.effects()[4:] == ["record stop 0", "signal 0 SIGTERM", "set_aside 0", "record end 0", "record done"]
    assert (world.line("stop", 0)["at"], world.line("stop", 0)["cause"]) == (60, "timeout")


def test_what_a_timed_out_try_returned_too_late_is_set_aside_before_the_next_try() -> None:
    policy = Policy(GRACE_S, timeout_s=60, max_retries=1, retry_on=frozenset({"timeout"}))
    world = play(
        Script([(0, request(0)), (70, Died(0, WELL)), (80, Died(0, WELL)), (80, Close())], {0: (65, DONE)}),
        policy=policy,
    )
    assert world.effects()[6:9] == ["set_aside 0", "record retry 0", "start 0"]


def test_a_job_whose_start_was_refused_in_the_step_in_which_another_failed_is_not_signalled() -> None:
    class Refuses(Script):
        def start(self, start: Start) -> int:
            raise OSError(errno.ELOOP if start.job.num == 0 else errno.EAGAIN, "refused")

    world = play(Refuses([(0, request(0, 1)), (1, Close())]), slots=2, policy=Policy(GRACE_S, fail_fast=True))
    assert [line["status"] for line in world.lines if line["event"] == "end"] == ["FAILED", "CANCELLED"]
    assert not [call for call in world.calls if call.startswith(("record stop", "signal"))]


def test_no_time_limit_ends_a_job_that_waits_to_save_its_result() -> None:
    policy = Policy(GRACE_S, timeout_s=60)
    script = Script([(0, request(0)), (500, Died(0, WELL)), (500, Close())], {0: (499, DONE)}, waiting=[0])
    world = play(script, policy=policy)
    assert world.effects()[4:] == ["record end 0", "record done"]
    assert world.line("end", 0)["status"] == "COMPLETED"


def test_whoever_stops_a_job_that_waits_to_save_its_result_is_told_what_is_lost() -> None:
    world = play(Script([(0, request(0)), (5, CTRL_C), (6, Died(0, KILLED)), (6, Close())], waiting=[0]))
    assert world.effects()[4:6] == ["record stop 0", "signal 0 SIGINT"]
    why = "was cancelled: Ctrl-C; it had finished, but its result could not be saved"
    assert world.line("end", 0)["error_text"] == why


# --- memory ---


def test_a_neighbour_that_comes_and_goes_delays_a_start_by_as_long_as_it_stays_and_is_on_record_once() -> None:
    world = play(
        Script(
            [(0, request(0, 1)), (50, Died(0, WELL)), (120, Died(1, WELL)), (120, Close())],
            memory={0: [(0, 30), (40, 3), (60.5, 80)]},
            answers_after=0.1,
        ),
        policy=Policy(GRACE_S, min_free=20),
    )
    assert world.line("start", 0)["at"] == pytest.approx(0.1)
    assert 60.5 < world.line("start", 1)["at"] < 60.5 + LOOK_S + 0.2
    waiting = [line for line in world.lines if line["event"] == "waiting"]
    assert waiting == [{"event": "waiting", "at": 50.1, "device": "0", "why": "device 0 is full"}]


def test_memory_that_comes_back_slowly_delays_the_next_start_until_it_is_back_or_rises_no_more() -> None:
    rising: list[tuple[float, int | None]] = [(0, 80), (10, 5), (50.2, 20), (50.4, 40), (50.7, 60)]
    world = play(
        Script([(0, request(0, 1)), (50, Died(0, WELL)), (120, Died(1, WELL)), (120, Close())], memory={0: rising}),
        policy=Policy(GRACE_S, settle_s=10.0),
    )
    assert world.line("start", 0)["at"] == 0
    assert world.line("start", 1)["at"] == 51.0, "after the first look in which no more is free than in the one before"


def test_without_a_limit_and_with_nothing_to_come_back_nobody_looks() -> None:
    world = play(
        Script([(0, request(0, 1)), (50, Died(0, WELL)), (60, Died(1, WELL)), (60, Close())]), devices=["0", "1"]
    )
    assert "look" not in world.calls


@pytest.mark.parametrize("attempts", [1, 2])
def test_the_peak_of_a_try_is_in_the_line_of_its_end_or_of_its_retry(attempts: int) -> None:
    future: list[tuple[float, Happening]] = [(at, Died(0, KILLED)) for at in range(1, attempts + 1)]
    world = play(
        Script([(0, request(0)), *future, (9, Close())], peaks={0: 1234.56}),
        policy=Policy(GRACE_S, max_retries=attempts - 1, retry_on=frozenset({"crash"})),
    )
    ends = [line["gpu_mb"] for line in world.lines if line["event"] in {"end", "retry"}]
    assert ends == [1234.6] * attempts


# --- slots that other sweeps have ---

NEIGHBOUR = Slot(0, 0)


def test_a_job_whose_slot_is_anothers_waits_in_line_and_starts_when_that_is_free() -> None:
    world = play(
        Script([(0, request(0)), (7, Freed()), (9, Died(0, WELL)), (9, Close())], others={NEIGHBOUR: (0, 7)}),
    )
    starting = [call for call in world.effects() if not call.startswith("record queued")]
    assert starting == [
        "open /sweep",
        "wait for [(0, 0)]",
        "record waiting",
        "lease 0",
        "start 0",
        "record start 0",
        "release 0",
        "record end 0",
        "record done",
    ]
    assert world.line("start", 0)["at"] == 7


def test_what_is_let_go_of_before_the_job_was_in_line_is_found_without_being_told_of() -> None:
    class Late(Script):
        def wait_for(self, waiting: Waiting) -> bool:
            self.others = dict.fromkeys(self.others, (0, 0))
            return super().wait_for(waiting)

    world = play(Late([(0, request(0)), (9, Died(0, WELL)), (9, Close())], others={NEIGHBOUR: (0, 99)}))
    assert world.line("start", 0)["at"] == 0


def test_a_thousand_slots_that_others_have_end_no_supervisor() -> None:
    others = {Slot(0, number): (0.0, 7.0) for number in range(1000)}
    script: list[tuple[float, Happening]] = [(0, request(0)), (7, Freed()), (9, Died(0, WELL)), (9, Close())]
    world = play(Script(script, others=others), slots=1000)
    assert world.line("start", 0)["at"] == 7


def test_who_holds_a_gpu_is_said_once_in_a_launch_and_not_for_a_moment() -> None:
    at: list[tuple[float, Happening]] = [
        (2.0, Freed()),
        (40.0, Freed()),
        (50.0, Died(0, WELL)),
        (60.0, Freed()),
        (70.0, Died(1, WELL)),
    ]
    world = Script([(0, request(0, 1)), *at, (70, Close())], others={NEIGHBOUR: (0, 40)})
    waits = [line for line in play(world).lines if line["event"] == "waiting"]
    assert [(line["at"], line["device"]) for line in waits] == [(1.0, "0")]
    assert waits[0]["why"] == "a job waits for a slot on GPU 0, which 1 held by others"
    short = play(
        Script([(0, request(0)), (0.9, Freed()), (9, Died(0, WELL)), (9, Close())], others={NEIGHBOUR: (0, 0.9)})
    )
    assert [line for line in short.lines if line["event"] == "waiting"] == []


def test_a_launch_that_waits_is_told_of_although_the_one_before_has_waited() -> None:
    class Again(Script):
        def release(self, num: int) -> None:
            super().release(num)
            self.others = {NEIGHBOUR: (6, 20)}

    first: list[tuple[float, Happening]] = [(0, request(0)), (5, Freed()), (6, Died(0, WELL))]
    second: list[tuple[float, Happening]] = [(7, request(1)), (20, Freed()), (21, Died(1, WELL)), (21, Close())]
    world = play(Again([*first, *second], others={NEIGHBOUR: (0, 5)}))
    assert [line["at"] for line in world.lines if line["event"] == "waiting"] == [1.0, 8.0]


def test_a_lease_is_let_go_of_where_the_system_refuses_the_start() -> None:
    world = play(
        Script([(0, request(0)), (1, Close())], refusals={0: 1}, others={Slot(9, 9): (0, 0)}),
    )
    assert world.effects()[2:5] == ["lease 0", "start 0", "release 0"]


def test_a_lease_is_held_until_the_tree_of_its_job_is_gone_and_for_ever_where_that_cannot_be_ended() -> None:
    script: list[tuple[float, Happening]] = [(0.0, request(0, 1)), (1.0, Ending(0)), (5.0, Died(0, WELL))]
    world = play(Script([*script, (6.0, CTRL_C), (6.0, Close())], others={Slot(9, 9): (0, 0)}))
    assert world.calls[: world.calls.index("release 0")].count("wait") == 3, "after the third event"
    assert "abandon 1" in world.calls
    assert "release 1" not in world.calls


def test_a_sweep_that_is_stopped_while_it_waits_leaves_the_line() -> None:
    world = play(Script([(0, request(0)), (5, CTRL_C), (5, Close())], others={NEIGHBOUR: (0, 99)}))
    assert world.effects()[-3:] == ["record end 0", "wait for []", "record done"]
