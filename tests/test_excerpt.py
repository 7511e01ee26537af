"""Of a failed job's log, what tells why it failed; and jobs that failed alike."""

from __future__ import annotations

from typing import Any

import pytest
from test_view import end, queued, seen

from hydra_plugins.hydra_gpu_pool_launcher._alike import alike, named, runs
from hydra_plugins.hydra_gpu_pool_launcher._excerpt import excerpt
from hydra_plugins.hydra_gpu_pool_launcher._seen import JobView

OURS = "/env/hydra_plugins/hydra_gpu_pool_launcher"
WRAPPED = """\
The above exception was the direct cause of the following exception:

hydra_plugins.hydra_gpu_pool_launcher._model."""

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 34, in main
    fit(x)
    ^^^^^^
  File "/home/me/train.py", line 12, in fit
    raise ValueError("nan")
"""

DEEP = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 34, in main
    fit(x)
  File "/env/lib/python3.11/site-packages/torch/a.py", line 1, in a
    return b()
           ^^^
  File "/env/lib/python3.11/site-packages/torch/b.py", line 2, in b
    return c()
  File "/env/lib/python3.11/site-packages/torch/c.py", line 3, in c
    raise ValueError
"""

DUMP = f"""\
epoch 1
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 9 in wait
  File "/home/me/train.py", line 77 in watch

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/train.py", line 16 in crash
  File "/home/me/train.py", line 40 in main
  File "{OURS}/_leader.py", line 142 in call
  File "/env/lib/python3.11/site-packages/hydra/core/utils.py", line 189 in run_job
  File "/home/me/train.py", line 56 in <module>

Extension modules: numpy (total: 1)
gpu_pool: the group lost its rank 0, which was ended by SIGSEGV
"""


def failed(error_type: str | None, error_text: str = "", **facts: Any) -> JobView:
    return seen(end(0, 1.0, "FAILED", error_type=error_type, error_text=error_text, **facts)).jobs[0]


def of(log: str, error_type: str | None, error_text: str = "", most: int = 5) -> list[str]:
    return excerpt(log.split("\n"), failed(error_type, error_text), most).whole()


def test_of_a_traceback_the_last_frames_and_the_exception_are_shown_and_no_marks() -> None:
    log = f"epoch 1\n{TRACEBACK}ValueError: nan\n"
    whole = ["epoch 1", *(line for line in TRACEBACK.splitlines() if "^" not in line), "ValueError: nan"]
    assert of(log, "ValueError", most=5) == whole[2:]
    assert of(log, "ValueError", most=4) == ["epoch 1", *whole[4:]]
    assert of(log, "ValueError", most=40) == whole


def test_what_is_printed_at_exit_does_not_push_the_traceback_out() -> None:
    log = f"{TRACEBACK}ValueError: nan\n\n" + "wandb: syncing\n" * 50
    assert of(log, "ValueError")[-1] == "ValueError: nan"


def test_an_exception_that_was_handled_long_before_is_not_what_the_job_failed_of() -> None:
    log = f"{TRACEBACK}KeyError: 'x'\n\nepoch 2\nepoch 3\n"
    assert of(log, "JobTimeoutError", "was stopped", most=2) == ["epoch 2", "epoch 3"]
    assert of(log, "JobCrashedError", "was ended by SIGKILL", most=2) == ["epoch 2", "epoch 3"]
    assert of(f"{log}{TRACEBACK}mod.Odd: y\n", "mod.Odd")[-1] == "mod.Odd: y"


def test_the_users_own_last_frame_is_shown_where_a_library_has_raised_deep_down() -> None:
    found = excerpt(f"{DEEP}ValueError".split("\n"), failed("ValueError"), 5, without_error=True)
    assert list(found.lines) == [
        '  File "/home/me/train.py", line 34, in main',
        "    fit(x)",
        "    …",
        '  File "/env/lib/python3.11/site-packages/torch/c.py", line 3, in c',
        "    raise ValueError",
    ]
    assert found.error == ("ValueError",)
    assert found.place == "train.py:34 in main"


def test_frames_of_hydra_and_of_gpu_pool_are_left_out() -> None:
    frames = (
        f'  File "{OURS}/_leader.py", line 1, in call\n  File "/env/site-packages/hydra/core/utils.py", line 2, in f\n'
    )
    log = TRACEBACK.replace("\n", f"\n{frames}", 1) + "ValueError: nan"
    assert of(log, "ValueError", most=40) == of(f"{TRACEBACK}ValueError: nan", "ValueError", most=40)


@pytest.mark.parametrize(
    ("raised", "error_type", "why"),
    [
        ("SystemExit: 3", "JobCrashedError", "called sys.exit(3)"),
        ("KeyboardInterrupt", "JobError", "raised KeyboardInterrupt"),
    ],
)
def test_an_end_by_sys_exit_shows_where_it_was_and_not_what_we_made_of_it(
    raised: str, error_type: str, why: str
) -> None:
    log = f"no data\n{TRACEBACK}{raised}\n\n{WRAPPED}{error_type}: job 0 {why}\nat exit\n"
    found = excerpt(log.split("\n"), failed(error_type, why), 5, without_error=True)
    assert [line.strip() for line in found.lines] == [
        "no data",
        'File "/home/me/train.py", line 34, in main',
        "fit(x)",
        'File "/home/me/train.py", line 12, in fit',
        'raise ValueError("nan")',
    ]
    assert (found.error, found.place) == ((raised,), "train.py:12 in fit")


def test_an_error_of_ours_that_nothing_led_to_shows_what_was_printed_before_it() -> None:
    log = f"saved\n{WRAPPED.splitlines()[-1]}JobError: job 0 returned a value that cannot be sent\n"
    assert of(log, "JobError") == ["saved"]


def test_of_a_crash_the_top_of_the_dump_is_shown_down_to_the_task_function() -> None:
    found = excerpt(DUMP.split("\n"), failed("JobCrashedError", "was ended by SIGSEGV"), 5)
    top = [
        "Fatal Python error: Segmentation fault",
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
        '  File "/home/me/train.py", line 16 in crash',
        '  File "/home/me/train.py", line 40 in main',
    ]
    assert found.whole() == ["epoch 1", *top]
    assert found.place == "train.py:16 in crash"
    assert of(DUMP, "JobCrashedError", "was ended by SIGSEGV", most=3) == top[:3]
    assert of(DUMP, "JobCrashedError", "was ended by SIGKILL", most=1)[0].startswith("gpu_pool: ")


@pytest.mark.parametrize("most", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("log", ["", "\n\n", f"{DEEP}ValueError" + "\nmore" * 50, "Traceback (most recent call last):"])
def test_no_more_is_shown_than_was_asked_for(log: str, most: int) -> None:
    assert len(of(log, "ValueError", most=most)) <= most
    assert len(of(DUMP, "JobCrashedError", most=most)) <= most


# --- jobs that failed alike ---


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("nan at step 7", "nan at step 12", True),
        ("loss 1", "loss 1.5e-05", True),
        ("at 0x7f3a12", "at 0x55d0", True),
        ("Tried to allocate 20.00 MiB", "Tried to allocate 1.5 GiB", True),
        ("no such file a", "no such file b", False),
    ],
)
def test_jobs_are_alike_whose_errors_differ_in_numbers_alone(one: str, other: str, same: bool) -> None:
    assert (len(alike([failed("E", one), failed("E", other)])) == 1) is same


def test_jobs_are_not_alike_that_ended_with_different_exit_codes_wherever_an_object_was() -> None:
    texts = ["ended with exit code 7 and without a result", "ended with exit code 0 and without a result"]
    assert len(alike(failed("JobCrashedError", text) for text in (*texts, texts[0]))) == 2
    texts = [f"returned a value of type f (<f at 0x{address}>) that cannot be sent" for address in ("7f0a", "7f0b")]
    assert len(alike(failed("JobError", text) for text in texts)) == 1


def test_jobs_are_not_alike_whose_errors_have_another_type_or_cause() -> None:
    assert len(alike([failed("E", "x"), failed("F", "x"), failed("E", "x", cause="oom")])) == 3


def test_numbers_that_follow_on_each_other_are_said_as_one() -> None:
    assert runs([3, 7, 9, 10, 11, 12, 20, 21]) == ["3", "7", "9 to 12", "20, 21"]
    view = seen(*(queued(num) for num in (1, 2, 4, 6, 8)))
    assert named([view.jobs[1]], 9) == "job 1"
    assert named([view.jobs[1], view.jobs[2]], 9) == "jobs 1, 2"
    assert named(view.in_order(), 2) == "jobs 1, 2, 4, …"


STOPPED = f"""\
Traceback (most recent call last):
KeyError: 'x'
epoch 1:  40%|####      Thread 0x00007f01 (most recent call first):
  File "/home/me/train.py", line 77 in watch
  File "/usr/lib/python3.11/threading.py", line 5 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/train.py", line 12 in fit
  File "/home/me/train.py", line 34 in main
  File "{OURS}/_leader.py", line 142 in call
  File "/home/me/train.py", line 56 in <module>
"""


def timed_out() -> JobView:
    facts = {"cause": "timeout", "error_type": "JobTimeoutError", "error_text": "was stopped: it took too long"}
    return seen(end(0, 1.0, "FAILED", **facts)).jobs[0]


def test_of_what_took_too_long_the_stack_is_shown_down_to_the_task_function() -> None:
    found = excerpt(STOPPED.split("\n"), timed_out(), 4)
    assert found.whole() == [
        "epoch 1:  40%|####",
        '  File "/usr/lib/python3.11/queue.py", line 171 in get',
        '  File "/home/me/train.py", line 12 in fit',
        '  File "/home/me/train.py", line 34 in main',
    ]
    assert found.place == "train.py:12 in fit"
    assert excerpt(STOPPED.split("\n"), failed("JobCrashedError", "was ended by SIGTERM"), 5).place is None


def test_of_what_took_too_long_and_has_left_no_stack_the_last_lines_are_shown() -> None:
    assert excerpt(["one", "two", "", "three"], timed_out(), 2).whole() == ["two", "three"]
