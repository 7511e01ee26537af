"""A sweep as its journal tells it."""

from __future__ import annotations

from typing import Any

import pytest

from hydra_plugins.hydra_gpu_pool_launcher._model import Cause, Job
from hydra_plugins.hydra_gpu_pool_launcher._seen import State
from hydra_plugins.hydra_gpu_pool_launcher._view import View, columns, differing_overrides


def launch(**facts: Any) -> dict[str, Any]:
    whole = {"main": 1, "supervisor": 2, "started": 3, "host": "box", "boot": "b", "command": ["python"], "cwd": "/"}
    return {"event": "launch", "time": 0.0, **whole, "slots": ["0.0", "1.0"], **facts}


def queued(num: int, *overrides: str) -> dict[str, Any]:
    return {"event": "queued", "time": 0.0, "job": num, "overrides": list(overrides)}


def start(num: int, at: float, *slots: str, attempt: int = 1) -> dict[str, Any]:
    return {"event": "start", "time": at, "job": num, "attempt": attempt, "pid": 100 + num, "slots": list(slots)}


def stop(num: int, at: float) -> dict[str, Any]:
    return {"event": "stop", "time": at, "job": num, "cause": "timeout", "why": "took longer"}


def end(num: int, at: float, status: str = "COMPLETED", event: str = "end", **facts: Any) -> dict[str, Any]:
    cause = {"COMPLETED": "returned", "FAILED": "error", "CANCELLED": "cancelled"}[status]
    default = {"attempt": 1, "status": status, "cause": cause, "error_type": None, "error_text": None, "value": None}
    return {"event": event, "time": at, "job": num, "by_itself": True, **default, **facts}


def seen(*events: dict[str, Any]) -> View:
    view = View()
    view.take(events)
    return view


def test_a_job_is_queued_runs_and_is_over() -> None:
    view = View()
    states = []
    for event in (queued(0, "x=1"), start(0, 1.0, "0.0"), stop(0, 2.0), end(0, 3.0, "FAILED", error_type="E")):
        view.take([event])
        states.append(view.jobs[0].state)
    assert states == [State.QUEUED, State.RUNNING, State.STOPPING, State.FAILED]
    job = view.jobs[0]
    assert (job.job, job.error_type, job.cause) == (Job(0, ("x=1",)), "E", Cause.ERROR)
    assert job.tries[0].seconds(now=99.0) == 2.0
    assert job.running is None


def test_a_job_that_is_tried_again_waits_and_keeps_what_its_tries_were() -> None:
    view = seen(queued(0), start(0, 1.0, "0.0"), end(0, 2.0, "FAILED", event="retry", error_type="JobCrashedError"))
    assert view.jobs[0].state is State.QUEUED
    view.take([start(0, 3.0, "1.0", attempt=2)])
    assert view.jobs[0].running is view.jobs[0].tries[1]
    view.take([end(0, 5.0, attempt=2, value=7, seconds=2.0)])
    assert [(t.attempt, t.slots, t.state) for t in view.jobs[0].tries] == [
        (1, ("0.0",), State.FAILED),
        (2, ("1.0",), State.COMPLETED),
    ]
    assert (view.jobs[0].value, view.jobs[0].seconds) == (7, 2.0)


def test_what_a_resume_has_taken_over_has_a_result_and_no_try() -> None:
    view = seen(queued(0), end(0, 0.0, attempt=0, cause="resumed", value=1, seconds=9.0))
    assert (view.jobs[0].state, view.jobs[0].tries, view.jobs[0].seconds) == (State.COMPLETED, [], 9.0)


def test_the_jobs_of_a_sweep_that_is_resumed_begin_anew() -> None:
    view = seen(launch(), queued(0), start(0, 1.0, "0.0"), launch(supervisor=5), queued(0), start(0, 8.0, "0.0"))
    assert len(view.jobs[0].tries) == 1
    assert view.launch is not None
    assert view.launch.supervisor == 5


def test_events_that_are_not_known_change_nothing() -> None:
    view = seen(queued(0), {"event": "moved_aside", "time": 5.0, "to": ".gpu_pool.1"}, {"event": "of the future"})
    assert view.count() == {State.QUEUED: 1}
    assert view.at == 0.0


def test_a_sweep_is_done_until_the_next_launch() -> None:
    view = seen(launch(), queued(0), end(0, 1.0), {"event": "done", "time": 1.0})
    assert view.done
    view.take([{"event": "done", "time": 1.0, "stopped": "Ctrl-C"}])
    assert view.stopped == "Ctrl-C"
    view.take([launch(time=2.0)])
    assert view.stopped is None
    assert not view.done


def test_the_slots_are_those_of_the_launch_and_whatever_was_used_besides() -> None:
    view = seen(launch(slots=["0.0", "0.1"]), queued(0), start(0, 1.0, "3.0"))
    assert view.slots() == ("0.0", "0.1", "3.0")


def test_how_busy_the_slots_were_counts_idle_ones() -> None:
    view = seen(launch(), *map(queued, range(3)), start(0, 0.0, "0.0"), start(1, 0.0, "1.0"), end(0, 10.0), end(1, 5.0))
    assert view.busy(now=10.0) == pytest.approx(0.75)
    assert seen(launch()).busy(now=1.0) is None


def test_the_time_left_is_that_of_jobs_like_those_that_have_ended() -> None:
    view = seen(launch(), *map(queued, range(5)), start(0, 0.0, "0.0"), start(1, 0.0, "1.0"))
    assert view.left_s(now=5.0) is None
    view.take([end(0, 10.0), start(2, 10.0, "0.0")])
    # Of ten seconds each: nothing is left of job 1, half of job 2, and two are queued, on two slots.
    assert view.left_s(now=15.0) == pytest.approx((0 + 5 + 20) / 2)


@pytest.mark.parametrize(
    ("queued_jobs", "left"),
    [
        (0, None),  # the last one takes longer than any before: nobody knows how long
        (1, 10.0 / 2),
    ],
)
def test_a_job_that_takes_longer_than_any_before_is_not_said_to_end_now(queued_jobs: int, left: float | None) -> None:
    view = seen(launch(), *map(queued, range(2 + queued_jobs)), start(0, 0.0, "0.0"), end(0, 10.0))
    view.take([start(1, 10.0, "1.0")])
    assert view.left_s(now=20.5) == left


def test_a_job_that_runs_is_like_those_that_took_longer_than_it_has_so_far() -> None:
    view = seen(launch(), *map(queued, range(3)), start(0, 0.0, "0.0"), start(1, 0.0, "1.0"), end(0, 10.0))
    view.take([end(1, 100.0), start(2, 100.0, "0.0")])
    assert view.left_s(now=105.0) == pytest.approx(55.0 - 5.0)
    assert view.left_s(now=111.0) == pytest.approx(100.0 - 11.0)


def test_jobs_that_failed_tell_how_long_jobs_take_only_where_none_completed() -> None:
    view = seen(launch(), *map(queued, range(4)), start(0, 0.0, "0.0"), end(0, 1.0, "FAILED"), start(3, 1.0, "0.0"))
    assert view.left_s(now=1.0) == pytest.approx((1 + 2 * 1) / 2)
    view.take([start(1, 1.0, "1.0"), end(1, 11.0)])
    assert view.left_s(now=11.0 - 5.0) == pytest.approx((5 + 10) / 2)


def test_the_time_between_a_sweep_and_its_resume_is_not_its_own_and_that_between_two_batches_is() -> None:
    done = {"event": "done", "time": 10.0}
    first = [launch(), queued(0), start(0, 1.0, "0.0"), end(0, 9.0), done]
    assert seen(*first).took_s(now=500.0) == 10.0
    assert seen(*first, launch(time=30.0)).took_s(now=31.0) == 31.0
    assert seen(*first, launch(time=1000.0, main=7)).took_s(now=1004.0) == 14.0
    assert seen(*first[:-1], launch(time=1000.0, boot="c")).took_s(now=1004.0) == 13.0


def test_how_busy_the_slots_were_does_not_count_the_time_in_which_nobody_ran_the_sweep() -> None:
    ran = [launch(), queued(0), queued(1), start(0, 0.0, "0.0"), end(0, 10.0), {"event": "done", "time": 10.0}]
    again = [launch(time=1000.0, main=7), queued(1), start(1, 1000.0, "0.0"), end(1, 1010.0)]
    assert seen(*ran, *again).busy(now=1010.0) == pytest.approx(0.5)
    assert seen(*ran, launch(time=1000.0), *again[1:]).busy(now=1010.0) == pytest.approx(20 / 1010 / 2)


def test_how_long_a_try_took_is_what_the_supervisor_measured_and_not_the_time_between_two_lines() -> None:
    view = seen(queued(0), start(0, 1.0, "0.0"), end(0, 2.0, "FAILED", event="retry", seconds=0.9))
    assert view.jobs[0].tries[0].seconds(now=99.0) == 0.9
    view.take([start(0, 3.0, "0.0", attempt=2), end(0, 5.0, attempt=2, seconds=1.95)])
    assert view.jobs[0].tries[1].seconds(now=99.0) == view.jobs[0].seconds == 1.95


def test_a_launch_that_goes_on_with_a_sweep_knows_where_what_it_takes_over_ran_and_nothing_else() -> None:
    kept = [queued(0, "x=1"), end(0, 9.0, attempt=0, cause="resumed", seconds=2.0)]
    for earlier in (
        seen(queued(0, "x=1"), start(0, 1.0, "1.0"), end(0, 3.0)),
        seen(queued(0, "x=1"), start(0, 1.0, "1.0"), end(0, 3.0), *kept),  # whoever reads it may be late
        seen(queued(0, "x=1"), start(0, 1.0, "1.0"), end(0, 3.0), *kept[:1]),
    ):
        view = earlier.resumed()
        assert (view.jobs, view.began) == ({}, None)
        view.take(kept)
        assert [one.slots for one in view.jobs[0].known_tries] == [("1.0",)]
        assert view.taken_over() == 1


def test_of_a_job_that_was_taken_over_it_is_known_where_it_ran() -> None:
    ran = [launch(), queued(0, "x=1"), start(0, 1.0, "0.0"), end(0, 2.0, event="retry", status="FAILED")]
    ran += [start(0, 2.0, "1.0", attempt=2), end(0, 4.0)]
    kept = [launch(main=7), queued(0, "x=1"), end(0, 9.0, attempt=0, cause="resumed", seconds=2.0)]
    for events in (
        [*ran, *kept],
        [*ran, *kept, *kept],
        [*ran, launch(), queued(0, "x=2"), start(0, 8.0, "0.0"), *kept],
    ):
        job = seen(*events).jobs[0]
        assert (len(job.known_tries), job.known_tries[-1].slots, job.known_tries[-1].ended) == (2, ("1.0",), 4.0)
        assert not job.tries
    assert not seen(*ran, launch(), queued(0, "x=2"), *kept[2:]).jobs[0].known_tries


def test_a_resume_that_has_fewer_jobs_than_before_has_no_others_and_their_results_come_back_with_them() -> None:
    first = [launch(), queued(0, "x=1"), queued(1, "x=2"), start(0, 0.0, "0.0"), end(0, 1.0), start(1, 1.0, "1.0")]
    first += [end(1, 2.0)]
    fewer = [launch(main=7), queued(0, "x=1"), end(0, 9.0, attempt=0, cause="resumed")]
    assert [*seen(*first, *fewer).jobs] == [0]
    batches = [launch(), queued(0, "x=1"), end(0, 1.0), launch(), queued(1, "x=2")]
    assert [*seen(*batches).jobs] == [0, 1]
    more = [launch(main=8), *fewer[1:], queued(1, "x=2"), end(1, 9.0, attempt=0, cause="resumed")]
    assert [one.slots for one in seen(*first, *fewer, *more).jobs[1].known_tries] == [("1.0",)]


def test_the_last_of_the_jobs_is_waited_for() -> None:
    view = seen(launch(), queued(0), queued(1), start(0, 0.0, "0.0"), end(0, 10.0), start(1, 10.0, "1.0"))
    assert view.left_s(now=12.0) == pytest.approx(8.0)


JOBS = [
    Job(0, ("model=mlp", "lr=1", "+seed=0")),
    Job(1, ("model=mlp", "lr=2", "++seed=1")),
    Job(2, ("model=mlp", "~lr")),
]


def test_only_overrides_that_differ_make_columns_and_a_key_is_one_however_it_is_set() -> None:
    assert columns(JOBS) == (["lr", "seed"], [{"lr": "1", "seed": "0"}, {"lr": "2", "seed": "1"}, {"lr": ""}])


def test_all_overrides_of_a_single_job_are_shown() -> None:
    assert differing_overrides(JOBS[:1]) == [["model=mlp", "lr=1", "+seed=0"]]
    assert columns([]) == ([], [])


def test_what_a_try_holds_of_its_gpus_is_known_while_it_runs_and_the_most_of_it_once_it_has_ended() -> None:
    view = seen(queued(0), start(0, 1.0, "0.0"), {"event": "memory", "time": 2.0, "job": 0, "gpu_mb": 1500.0})
    assert view.jobs[0].tries[0].gpu_mb == 1500.0
    view.take([end(0, 3.0, "FAILED", event="retry", gpu_mb=2000.0), start(0, 4.0, "0.0", attempt=2)])
    assert [one.gpu_mb for one in view.jobs[0].tries] == [2000.0, None]
    view.take([end(0, 5.0, attempt=2, gpu_mb=300.0), {"event": "memory", "time": 6.0, "job": 0, "gpu_mb": 7.0}])
    assert view.jobs[0].gpu_mb == view.jobs[0].tries[1].gpu_mb == 300.0
