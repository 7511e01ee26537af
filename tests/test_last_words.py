"""What is said once more when main exits."""

from __future__ import annotations

import signal

from support import RunApp

AT_EXIT = "import os, signal, sys\nfrom hydra_plugins.hydra_gpu_pool_launcher._last_words import at_exit\n"


def test_of_several_launches_the_last_one_has_the_last_words_and_says_them_once(run_app: RunApp) -> None:
    app = "at_exit(['first'], print)\nat_exit([], print)\nat_exit(['second', 'third'], print)\nprint('Traceback')"
    assert run_app(AT_EXIT + app).stdout.splitlines() == ["Traceback", "second", "third"]


def test_a_launch_in_which_all_went_well_has_none(run_app: RunApp) -> None:
    assert run_app(f"{AT_EXIT}at_exit(['first'], print)\nat_exit([], print)").stdout == ""


def test_they_come_after_the_traceback_of_an_error_and_of_an_interrupt(run_app: RunApp) -> None:
    for error in ("ValueError", "KeyboardInterrupt"):
        app = f"{AT_EXIT}at_exit(['last'], lambda text: print(text, file=sys.stderr))\nraise {error}"
        assert run_app(app).stderr.splitlines()[-2:] == [error, "last"]


def test_a_fork_of_main_and_a_main_that_a_signal_ends_say_nothing(run_app: RunApp) -> None:
    app = f"{AT_EXIT}at_exit(['last'], print)\nif os.fork() == 0:\n    sys.exit()\nos.wait()\n"
    done = run_app(f"{app}os.kill(os.getpid(), signal.SIGTERM)")
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM)


def test_where_they_cannot_be_said_the_exit_goes_on(run_app: RunApp) -> None:
    done = run_app(f"{AT_EXIT}at_exit(['a', 'b'], lambda text: print(text, file=None if text == 'b' else 7))")
    assert (done.stdout, done.stderr, done.returncode) == ("b\n", "", 0)
