"""While the sweep's files cannot be written, no result is lost, nothing starts unrecorded, and a person is told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from running import App, StartApp
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _files, _journal, _returns
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._journal import Journal

GOES_ON = "the sweep's files can be written again: the sweep goes on\n"


# --- a disk that is full ---


def small_disk(kilobytes: int) -> tuple[str, ...]:
    """The command before an app that gives it a file system of that size in ``sweep``, for itself and its forks."""
    mount = f'mount -t tmpfs -o size={kilobytes}k none sweep && exec "$@"'
    prefix = (shutil.which("unshare") or "unshare", "--mount", "sh", "-c", f"mkdir -p sweep && {mount}", "sh")
    with tempfile.TemporaryDirectory() as somewhere:
        found = subprocess.run([*prefix, "true"], capture_output=True, check=False, cwd=somewhere)
    if found.returncode:
        pytest.skip("no file system can be mounted here")
    return prefix


def seen_from_outside(app: App, path: str) -> Path:
    return Path(f"/proc/{app.process.pid}/root{app.directory}/sweep/{path}")


def fill(app: App, leave: int) -> None:
    """Leave so many bytes free, or fewer, where the sweep writes something meanwhile."""
    found = os.statvfs(seen_from_outside(app, ""))
    # Without a buffer, a write that finds less room than there was a moment ago is only a shorter one.
    with open(seen_from_outside(app, "filler"), "wb", buffering=0) as file:
        file.write(bytes(found.f_bavail * found.f_frsize - leave))


def wait_for_line(app: App, text: str) -> str:
    assert app.process.stderr is not None
    for line in app.process.stderr:
        if text in line:
            return line
    pytest.fail(f"the sweep ended without a line with {text!r}")


WAITING = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
def job(x):
    report()
    if x in PAUSES: signal.sigwait([signal.SIGUSR2])
    return x, bytes(SIZE)
def run(**config):
    outcomes = GpuPool(dir='sweep', gpus=[], cpu_slots=1, **config).map(job, [{'x': x} for x in range(3)])
    print([o.value and (o.value[0], len(o.value[1])) for o in outcomes])
"""


def test_a_result_that_finds_no_room_waits_for_it_and_a_person_is_told(start_app: StartApp) -> None:
    app = start_app("PAUSES, SIZE = {1}, 300_000\nrun()", before=WAITING, prefix=small_disk(4000))
    app.report()  # of the first job, which may have ended by now
    (pid,) = app.wait_for_jobs(1)
    fill(app, leave=100_000)
    os.kill(pid, signal.SIGUSR2)
    line = wait_for_line(app, "a job cannot save its result in ")
    assert line.endswith("/sweep, and waits until it can: free some space there\n")
    assert not _descriptors.wait_readable(app.pidfds[:1], 0), "it has not given up"
    seen_from_outside(app, "filler").unlink()
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[(0, 300000), (1, 300000), (2, 300000)]\n"
    app.assert_nothing_is_left()


def test_nothing_starts_on_a_full_disk_and_all_goes_on_when_there_is_room(start_app: StartApp) -> None:
    app = start_app("PAUSES, SIZE = {0}, 3\nrun()", before=WAITING, prefix=small_disk(4000))
    (pid,) = app.wait_for_jobs(1)
    fill(app, leave=500_000)
    os.kill(pid, signal.SIGUSR2)
    line = wait_for_line(app, "cannot be written")
    assert line.startswith("the sweep's files cannot be written (")
    assert "/sweep/.gpu_pool: No space left on device): no job is started until that is mended" in line
    assert not _descriptors.wait_readable([app.lifeline], 0), "a job was started"
    seen_from_outside(app, "filler").unlink()
    wait_for_line(app, GOES_ON)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[(0, 3), (1, 3), (2, 3)]\n"


def test_waiting_for_the_disk_is_not_the_jobs_own_time(start_app: StartApp) -> None:
    app = start_app("PAUSES, SIZE = {0}, 300_000\nrun(timeout_min=5 / 60)", before=WAITING, prefix=small_disk(4000))
    (pid,) = app.wait_for_jobs(1)
    fill(app, leave=100_000)
    os.kill(pid, signal.SIGUSR2)
    wait_for_line(app, "a job cannot save its result in ")
    assert not _descriptors.wait_readable(app.pidfds[:1], 6), "it was stopped for its time"
    seen_from_outside(app, "filler").unlink()
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[(0, 300000), (1, 300000), (2, 300000)]\n"


def test_a_job_that_has_saved_its_result_at_last_is_called_what_it_was_before(start_app: StartApp) -> None:
    """Its name tells the supervisor that it waits; its exit is in its time again."""
    app = start_app(
        "PAUSES, SIZE = {0}, 300_000\n"
        "import atexit\n"
        "name = lambda: open('/proc/self/comm').read().strip()\n"
        "def named(x):\n"
        "    first = name()\n"
        "    atexit.register(lambda: report(name() == first))\n"
        "    return job(x)\n"
        "GpuPool(dir='sweep', gpus=[], cpu_slots=1).map(named, [{'x': 0}])",
        before=WAITING,
        prefix=small_disk(4000),
    )
    (pid,) = [int(app.report())]
    fill(app, leave=100_000)
    os.kill(pid, signal.SIGUSR2)
    wait_for_line(app, "a job cannot save its result in ")
    assert Path(f"/proc/{pid}/comm").read_text() == "gpu_pool saves\n"
    seen_from_outside(app, "filler").unlink()
    assert app.report().split()[1] == "True"
    app.process.communicate(timeout=LIMIT_S)
    app.assert_nothing_is_left()


def test_a_disk_that_is_full_from_the_start_is_told(start_app: StartApp) -> None:
    """The line comes along with the first answer, and must not be lost behind it."""
    fill_first = "head -c 3300000 /dev/zero > sweep/filler"
    prefix = small_disk(4000)
    app = start_app(
        "PAUSES, SIZE = {}, 3\nrun()", before=WAITING, prefix=(*prefix, "sh", "-c", f'{fill_first} && exec "$@"', "sh")
    )
    wait_for_line(app, "no job is started until that is mended")
    seen_from_outside(app, "filler").unlink()
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[(0, 3), (1, 3), (2, 3)]\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_on_a_full_disk_can_be_stopped(start_app: StartApp, signum: signal.Signals) -> None:
    app = start_app("PAUSES, SIZE = {0, 1}, 300_000\nrun(kill_grace_s=0.2)", before=WAITING, prefix=small_disk(4000))
    (pid,) = app.wait_for_jobs(1)
    fill(app, leave=0)
    os.kill(pid, signal.SIGUSR2)
    wait_for_line(app, "a job cannot save its result")
    app.process.send_signal(signum)
    app.process.communicate(timeout=LIMIT_S)
    assert app.process.returncode == -signum
    app.assert_nothing_is_left()


# --- a journal that cannot be written ---

BROKEN = """
import errno
from {package} import _journal
write = os.write
def broken(fd, data):
    if data.startswith(b'{{"event"') and os.path.exists('broken'):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return write(fd, data)
_journal.os = type(os)('os')
vars(_journal.os).update(vars(os), write=broken)
def job(x):
    report()
    if x == 0: signal.sigwait([signal.SIGUSR2])
    return x, os.path.exists('broken')
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
""".format(package="hydra_plugins.hydra_gpu_pool_launcher")


def test_nothing_starts_while_the_journal_has_an_input_output_error_and_no_line_of_it_is_lost(
    start_app: StartApp,
) -> None:
    app = start_app(
        "pool = GpuPool(dir='sweep', gpus=[], cpu_slots=1)\n"
        "print([o.value for o in pool.map(job, [{'x': x} for x in range(3)])])",
        before=BROKEN,
    )
    (pid,) = app.wait_for_jobs(1)
    app.wait_for_start_on_record(0)
    (app.directory / "broken").touch()
    os.kill(pid, signal.SIGUSR2)
    assert "sweep/.gpu_pool: Input/output error): no job is started" in wait_for_line(app, "cannot be written")
    (app.directory / "broken").unlink()
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[(0, True), (1, False), (2, False)]\n"
    events = [(e["event"], e.get("job")) for e in app.journal()]
    assert events[4:] == [
        ("start", 0),
        ("end", 0),
        ("start", 1),
        ("end", 1),
        ("start", 2),
        ("end", 2),
        ("done", None),
    ]


def test_a_sweep_whose_journal_cannot_be_written_can_be_stopped_and_what_had_ended_is_on_disk(
    start_app: StartApp,
) -> None:
    app = start_app("GpuPool(dir='sweep', gpus=[], cpu_slots=1).map(job, [{'x': x} for x in range(3)])", before=BROKEN)
    (pid,) = app.wait_for_jobs(1)
    app.wait_for_start_on_record(0)
    (app.directory / "broken").touch()
    os.kill(pid, signal.SIGUSR2)
    wait_for_line(app, "cannot be written")
    app.process.send_signal(signal.SIGINT)
    app.process.communicate(timeout=LIMIT_S)
    assert app.process.returncode == -signal.SIGINT
    assert _returns.load_return(SweepFiles(str(app.directory / "sweep")), 0) == (0, True)
    app.assert_nothing_is_left()


def test_a_line_that_was_half_written_is_completed_before_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(_files.open_to_append(str(tmp_path / "journal")))
    write, room = os.write, [10]

    def little_room(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", little_room)
    journal.append("first")
    journal.append("second")
    with pytest.raises(OSError, match="full"):
        journal.pay()
    room[0] = 10**6
    journal.append("third")
    os.close(journal.fd)
    reader = _journal.JournalReader(str(tmp_path / "journal"))
    assert [event["event"] for event in reader.new()] == ["first", "second", "third"]
    reader.close()


# --- a directory that is not there any more ---


def test_a_directory_that_was_moved_away_holds_the_sweep_until_it_is_back(start_app: StartApp) -> None:
    app = start_app(
        "pool = GpuPool(dir='sweep', gpus=[], cpu_slots=1)\n"
        "print([o.value for o in pool.map(job, [{'x': x} for x in range(3)])])",
        before="def job(x):\n    report()\n    if x == 0: signal.pause()\n    return x\n",
    )
    (pid,) = app.wait_for_jobs(1)
    (app.directory / "sweep").rename(app.directory / "elsewhere")
    os.kill(pid, signal.SIGKILL)
    assert "sweep/.gpu_pool: No such file or directory): no job is started" in wait_for_line(app, "cannot be written")
    (app.directory / "elsewhere").rename(app.directory / "sweep")
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[None, 1, 2]\n"


def test_a_disk_that_refuses_a_job_its_log_delays_the_job(start_app: StartApp) -> None:
    app = start_app(
        "pool = GpuPool(dir='sweep', gpus=[], cpu_slots=1)\n"
        "print([o.value for o in pool.map(job, [{'x': x} for x in range(3)])])",
        before="from {package} import _files\n".format(package="hydra_plugins.hydra_gpu_pool_launcher")
        + "import errno\nreal = _files.open_to_append\n"
        "def open_to_append(path):\n"
        "    if 'jobs/1/' in path and os.path.exists('quota'):\n"
        "        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)\n"
        "    return real(path)\n"
        "_files.open_to_append = open_to_append\n"
        "def job(x): return x\n"
        "open('quota', 'w').close()",
    )
    line = wait_for_line(app, "cannot be written")
    assert "Disk quota exceeded" in line
    (app.directory / "quota").unlink()
    wait_for_line(app, GOES_ON)
    assert app.process.communicate(timeout=LIMIT_S)[0] == "[0, 1, 2]\n"
