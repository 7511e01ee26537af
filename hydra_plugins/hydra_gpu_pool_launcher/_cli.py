"""The command ``gpu-pool``: a sweep looked at from outside. What was typed, to who does it.

Exit codes: 0 for what was done or told, whatever became of the jobs; 1 for a job that was to be cancelled and was not;
2 for what cannot be done or told, with one sentence on stderr; 128 + n as ended by signal n, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from ._errors import GpuPoolError
from ._files import SweepFiles
from ._outside import Refused, Standing, WatchedSweep, find, shown
from ._tail import one_line

_DIRECTORY = "the sweep's directory"

_EPILOG = """\
Exit codes: 0, it was done or told, whatever became of the jobs; 1, the job was not cancelled; 2, it cannot be done or
told, and a sentence on stderr says why."""


def main() -> NoReturn:
    """What the console script runs: ends this process."""
    # As with any command of a pipeline: nobody reads any more, so it ends, and says nothing.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    code = run(sys.argv[1:])
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # which was said
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter tries once more when it ends, and would complain
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and print it; the exit code. For wrong ones, argparse exits."""
    given = _parser().parse_args(arguments)
    if sys.stdout is None:
        return _refuse("there is no stdout to write to")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # half a character, in a file's name say, would be a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = given.do(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except GpuPoolError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or 'what there is to say cannot be written'}: {error.strerror or error}")
    return code


def _refuse(why: str) -> int:
    with contextlib.suppress(OSError, AttributeError):  # what was told before comes before, if it can be told
        sys.stdout.flush()
    print(f"gpu-pool: {one_line(why)}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} ({self.prog} --help says more)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpu-pool", description="Look at a sweep of gpu_pool from outside, by its directory.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"gpu_pool {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    status = commands.add_parser("status", help="how far it is, what runs, how jobs ended")
    status.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    status.add_argument("--watch", action="store_true", help="until it is over; it may begin later")
    status.add_argument(
        "--json", action="store_true", help="one JSON object; with --watch, one for each change, a line each"
    )
    status.add_argument(
        "--all", action="store_true", help="on a terminal, too, all jobs that have ended, fit they or not"
    )
    status.set_defaults(do=_status)

    logs = commands.add_parser("logs", help="what a job has printed")
    logs.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    logs.add_argument("num", metavar="NUM", type=_number, help="the job's number")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job is over")
    logs.add_argument("--rank", metavar="R", type=_number, help="with mode: ddp, of this rank")
    logs.set_defaults(do=_logs)

    cancel = commands.add_parser("cancel", help="stop one job, running or queued; the sweep goes on")
    cancel.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    cancel.add_argument("num", metavar="NUM", type=_number, help="the job's number")
    cancel.set_defaults(do=_cancel)

    report = commands.add_parser("report", help="write results.csv and sweep.html again, from the journal")
    report.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    report.set_defaults(do=_report)

    gpus = commands.add_parser("gpus", help="which GPUs there are, and what the ids of the key gpus mean here")
    gpus.add_argument("--json", action="store_true", help="one JSON object")
    gpus.set_defaults(do=_gpus)
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a job or rank")
    return int(text)


def _status(given: argparse.Namespace) -> int:
    from . import _watch

    show = _watch.watch if given.watch else _watch.once
    show(find(given.directory), json_wanted=given.json, everything=given.all)
    return 0


def _logs(given: argparse.Namespace) -> int:
    from . import _logs

    _logs.show(find(given.directory), given.num, given.rank, given.follow, _logs.sink())
    return 0


def _cancel(given: argparse.Namespace) -> int:
    from . import _cancel

    answer = _cancel.cancel(find(given.directory), given.num)
    print(answer.text)
    return 0 if answer.cancelled else 1


def _report(given: argparse.Namespace) -> int:
    from . import _report

    with contextlib.closing(WatchedSweep(find(given.directory))) as sweep:
        if sweep.files.name != SweepFiles(sweep.files.sweep_dir).name:
            raise Refused(f"{shown(sweep.files.root)} was moved aside, and the reports are those of the sweep after it")
        over = sweep.standing in {Standing.FINISHED, Standing.KILLED}
        _report.write_results(sweep.files, sweep.view, over=over)
        _report.write_page(sweep.files, sweep.view, over=over)
        print(f"written: {shown(sweep.files.results)} and {shown(sweep.files.page)}")
    return 0


def _gpus(given: argparse.Namespace) -> int:
    from . import _gpus, _status

    gpus = _gpus.ask(os.environ)
    print(_status.dumps(_gpus.as_json(gpus)) if given.json else "\n".join(_gpus.lines(gpus)))
    return 0
