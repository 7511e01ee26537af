"""Leases and the line for them, with real locks: of several openings in one process, and of killed processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _inotify, _lease_directory, _line, _process
from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._events import Waiting
from hydra_plugins.hydra_gpu_pool_launcher._lease_directory import open_files
from hydra_plugins.hydra_gpu_pool_launcher._lease_files import Holder
from hydra_plugins.hydra_gpu_pool_launcher._leases import Leases
from hydra_plugins.hydra_gpu_pool_launcher._model import Device, Layout, Slot

A, B = Slot(0, 0), Slot(1, 0)
ONE, TWO = Layout((Device("0"),), 1), Layout((Device("0"), Device("1")), 1, 2)
NOTHING: frozenset[Slot] = frozenset()
ME, YOU = Holder(11, "/mine"), Holder(22, "/yours")


def waits(*slots: Slot) -> Waiting:
    return Waiting(frozenset(slots))


Sweep = Callable[..., Leases]


TWICE = Layout((Device("0"),), 2)
WHOLE = Waiting(alone=frozenset({0}))
"""In the line for device 0 as a whole."""


@pytest.fixture
def sweep(leases: Path) -> Iterator[Sweep]:
    """Makes what a supervisor has of the leases; each has opened its files by itself."""
    made: list[Leases] = []

    def make(layout: Layout = ONE) -> Leases:
        made.append(Leases(open_files(str(leases), layout), layout))
        return made[-1]

    yield make
    for each in made:
        for fd in each.descriptors():
            os.close(fd)


def rings(sweep: Leases) -> bool:
    """Whether something was let go of since the last time; it is silent afterwards."""
    assert sweep.bell is not None
    rung = bool(_descriptors.wait_readable([sweep.bell], 0))
    sweep.heard()
    return rung


@contextlib.contextmanager
def process(main: Callable[[], object]) -> Iterator[int]:
    """A fork that has done this, and does nothing more until it is killed."""
    read, write = os.pipe()

    def be_it(_: frozenset[int]) -> int:
        main()
        os.write(write, b"!")
        while True:
            signal.pause()

    pid = _process.fork(be_it)
    try:
        assert _descriptors.wait_readable([read], LIMIT_S), "it does not come to its end"
        yield pid
    finally:
        kill(pid)
        os.close(read)
        os.close(write)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- leases ---


def test_a_slot_is_one_sweeps_until_it_lets_go_of_it_and_who_has_it_can_be_told(sweep: Sweep) -> None:
    mine, yours = sweep(), sweep()
    assert yours.take(5, [A], YOU) == NOTHING
    assert mine.take(0, [A], ME) == {A}
    assert mine.holders([A]) == "is held by the sweep in /yours (process 22)"
    yours.release(5)
    assert mine.take(0, [A], ME) == NOTHING


def test_the_same_device_has_one_name_in_every_sweep_whatever_its_place_in_their_lists(sweep: Sweep) -> None:
    mine, yours = sweep(TWO), sweep(Layout((Device("1"),), 2))
    assert yours.take(0, [Slot(0, 0)], YOU) == NOTHING
    assert mine.take(0, [B], ME) == {B}
    assert mine.take(0, [A], ME) == NOTHING


def test_a_job_that_does_not_get_all_of_its_slots_keeps_none(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWO)
    assert yours.take(0, [B], YOU) == NOTHING
    assert mine.take(0, [A, B], ME) == {B}
    assert third.take(0, [A], ME) == NOTHING


def test_a_lease_outlives_the_supervisor_for_as_long_as_its_guard_is_there(sweep: Sweep, leases: Path) -> None:
    mine = sweep()
    of_the_guard = open_files(str(leases), ONE)
    with process(lambda: Leases(of_the_guard, ONE).take(0, [A], YOU)) as supervisor:
        kill(supervisor)
        assert mine.take(0, [A], ME) == {A}
        assert mine.wait_for(waits(A), ME)
        for fd in of_the_guard.descriptors():  # as when the guard ends
            os.close(fd)
        assert rings(mine)
        assert mine.take(0, [A], ME) == NOTHING


def test_a_lease_of_a_sweep_that_is_killed_is_free_and_rings(sweep: Sweep, leases: Path) -> None:
    mine = sweep()
    with process(lambda: Leases(open_files(str(leases), ONE), ONE).take(0, [A], YOU)) as pid:
        assert mine.take(0, [A], ME) == {A}
        assert mine.wait_for(waits(A), ME)
        assert not rings(mine)
        kill(pid)
        assert rings(mine)
    assert mine.take(0, [A], ME) == NOTHING


def test_a_lease_that_is_let_go_of_is_free_although_a_fork_still_has_its_descriptors(sweep: Sweep) -> None:
    mine, yours = sweep(), sweep()
    yours.take(0, [A], YOU)
    yours.wait_for(waits(A), YOU)
    with process(lambda: None):
        mine.wait_for(waits(A), ME)
        yours.wait_for(Waiting(), YOU)
        yours.release(0)
        assert rings(mine)
        assert mine.take(0, [A], ME) == NOTHING


# --- a device as a whole ---


def test_who_needs_a_device_alone_gets_it_when_no_other_sweep_has_a_slot_there_however_many_those_have(
    sweep: Sweep,
) -> None:
    mine, yours = sweep(ONE), sweep(TWICE)
    assert yours.take(0, [Slot(0, 1)], YOU) == NOTHING
    assert mine.take(0, [A], ME, alone=True) == {A}
    assert mine.holders([A]) == "is held by the sweep in /yours (process 22)"
    mine.wait_for(WHOLE, ME)
    assert yours.take(1, [Slot(0, 0)], YOU) == {Slot(0, 0), Slot(0, 1)}
    assert yours.holders([Slot(0, 0)]) == "the sweep in /mine (process 11) has waited longer for"
    yours.release(0)
    assert rings(mine)
    assert mine.take(0, [A], ME, alone=True) == NOTHING


def test_who_has_a_device_alone_keeps_others_from_it_until_it_lets_go_and_then_tells_them(sweep: Sweep) -> None:
    mine, yours = sweep(ONE), sweep(TWICE)
    yours.wait_for(waits(Slot(0, 1)), YOU)
    yours.wait_for(Waiting(), YOU)
    assert mine.take(0, [A], ME, alone=True) == NOTHING
    for _ in range(2):
        assert yours.take(0, [Slot(0, 1)], YOU) == {Slot(0, 0), Slot(0, 1)}
        assert yours.holders([Slot(0, 1)]) == "is held by the sweep in /mine (process 11)"
        yours.wait_for(waits(Slot(0, 1)), YOU)
    rings(yours)
    mine.release(0)
    assert rings(yours)
    assert yours.take(0, [Slot(0, 1)], YOU) == NOTHING


def test_a_place_in_the_line_from_before_is_none_on_a_device_that_another_sweep_has_alone(sweep: Sweep) -> None:
    mine, yours = sweep(ONE), sweep(Layout((Device("0"), Device("1")), 2))
    yours.wait_for(waits(B), YOU)
    assert mine.take(0, [A], ME, alone=True) == NOTHING
    yours.wait_for(waits(Slot(0, 1), B), YOU)
    assert yours.take(0, [Slot(0, 1)], YOU) == {Slot(0, 0), Slot(0, 1)}


def test_other_starts_of_a_sweep_do_not_cost_the_job_that_needs_a_device_alone_its_place(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWICE)
    third.take(0, [Slot(0, 1)], ME)
    assert mine.take(0, [A], ME, alone=True) == {A}
    mine.wait_for(WHOLE, ME)
    yours.wait_for(waits(A), YOU)
    for num in range(3):
        assert mine.take(num, [B], ME) == NOTHING
        mine.wait_for(Waiting(frozenset({B}), alone=frozenset({0})), ME)
        mine.release(num)
    assert yours.take(0, [A], YOU) == {A, B}
    third.release(0)
    assert mine.take(9, [A], ME, alone=True) == NOTHING


def test_a_place_for_a_device_alone_is_not_in_the_way_of_its_own_sweep(sweep: Sweep) -> None:
    mine = sweep(TWO)
    mine.wait_for(WHOLE, ME)
    assert mine.take(0, [A, B], ME) == NOTHING
    mine.release(0)
    assert mine.take(0, [A], ME, alone=True) == NOTHING
    assert mine.take(1, [B], ME) == NOTHING


def test_two_that_each_need_a_device_alone_have_it_one_after_the_other_and_do_not_wake_each_other(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWICE), sweep(TWICE), sweep(Layout((Device("0"),), 3))
    third.take(0, [Slot(0, 2)], ME)
    both = [Slot(0, 0), Slot(0, 1)]
    for each, holder in ((mine, ME), (yours, YOU)):
        each.take(0, both, holder, alone=True)
        each.wait_for(WHOLE, holder)
    for _ in range(3):
        rings(mine)
        rings(yours)
        assert mine.take(0, both, ME, alone=True)
        assert yours.take(0, both, YOU, alone=True)
        mine.wait_for(WHOLE, ME)
        yours.wait_for(WHOLE, YOU)
    assert not rings(mine)
    assert not rings(yours)
    third.release(0)
    assert yours.take(0, both, YOU, alone=True)
    assert mine.take(0, both, ME, alone=True) == NOTHING
    assert yours.take(0, both, YOU, alone=True)
    mine.release(0)
    assert yours.take(0, both, YOU, alone=True) == NOTHING


@pytest.mark.parametrize("alone_first", [True, False])
def test_two_that_take_a_device_at_the_same_time_do_not_pass_each_other_by(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, alone_first: bool
) -> None:
    one, other = (sweep(ONE), sweep(TWICE)) if alone_first else (sweep(TWICE), sweep(ONE))
    lock, second = Leases._lock, [Slot(0, 1)]

    def meanwhile(self: Leases, names: Collection[str], holder: Holder) -> dict[str, str]:
        monkeypatch.setattr(Leases, "_lock", lock)
        assert other.take(0, second if alone_first else [A], YOU, alone=not alone_first) == NOTHING
        return lock(self, names, holder)

    monkeypatch.setattr(Leases, "_lock", meanwhile)
    wanted = [A] if alone_first else second
    assert one.take(0, wanted, ME, alone=alone_first) >= {*wanted}
    other.release(0)
    assert one.take(0, wanted, ME, alone=alone_first) == NOTHING


def test_a_job_that_has_a_device_alone_leaves_it_to_others_when_its_sweep_is_killed(sweep: Sweep, leases: Path) -> None:
    yours = sweep(TWICE)
    with process(lambda: Leases(open_files(str(leases), ONE), ONE).take(0, [A], ME, alone=True)) as pid:
        assert yours.take(0, [Slot(0, 1)], YOU)
        kill(pid)
        assert yours.take(0, [Slot(0, 1)], YOU) == NOTHING
    assert not list(leases.glob("wait.*"))


def test_who_waits_for_the_memory_of_a_device_keeps_others_from_starting_anything_there(sweep: Sweep) -> None:
    mine, yours = sweep(ONE), sweep(Layout((Device("0"), Device("1")), 2))
    mine.wait_for(Waiting(drained=frozenset({0})), ME)
    assert yours.take(0, [Slot(0, 1)], YOU) == {Slot(0, 0), Slot(0, 1)}
    assert yours.take(0, [B], YOU) == NOTHING
    assert mine.take(0, [A], ME) == NOTHING
    assert yours.take(1, [Slot(0, 1)], YOU) == NOTHING


def test_which_devices_others_have_slots_of_can_be_told_and_ours_are_none_of_them(sweep: Sweep) -> None:
    mine, yours = sweep(TWO), sweep(Layout((Device("1"), Device("0")), 2))
    mine.take(0, [A], ME)
    assert mine.of_others() == frozenset()
    yours.take(0, [Slot(1, 1)], YOU)
    assert mine.of_others() == {0}
    yours.take(1, [Slot(0, 0)], YOU)
    assert mine.of_others() == {0, 1}
    assert yours.of_others() == {1}
    yours.release(0)
    assert mine.of_others() == {1}


def test_who_needs_a_device_alone_learns_which_of_its_slots_there_others_have_or_that_they_have_other_ones(
    sweep: Sweep,
) -> None:
    mine, yours = sweep(TWICE), sweep(Layout((Device("0"),), 3))
    both = [Slot(0, 0), Slot(0, 1)]
    assert yours.take(0, [Slot(0, 2)], YOU) == NOTHING
    assert mine.take(0, both, ME, alone=True) == {*both}
    assert yours.take(1, [Slot(0, 1)], YOU) == NOTHING
    assert mine.take(0, both, ME, alone=True) == {Slot(0, 1)}


def test_who_is_refused_one_slot_learns_at_once_of_all_others_that_cannot_be_had(sweep: Sweep) -> None:
    mine, yours, third = (
        sweep(Layout((Device("0"),), 5)),
        sweep(Layout((Device("0"),), 5)),
        sweep(Layout((Device("0"),), 5)),
    )
    for number in (0, 2):
        yours.take(number, [Slot(0, number)], YOU)
    third.wait_for(waits(Slot(0, 3)), ME)
    assert mine.take(0, [Slot(0, 0)], ME) == {Slot(0, number) for number in (0, 2, 3)}
    assert mine.holders([Slot(0, 2)]) == "is held by the sweep in /yours (process 22)"
    assert mine.take(0, [Slot(0, 1)], ME) == NOTHING


# --- the line ---


def test_who_waits_is_told_of_what_is_let_go_of_and_of_nothing_else(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWO)
    yours.take(0, [A], YOU)
    assert mine.take(0, [A], ME) == {A}
    assert mine.wait_for(waits(A), ME), "what was let go of before it waited rang for nobody"
    assert not mine.wait_for(waits(A), ME)
    assert third.take(0, [B], ME) == NOTHING
    assert not rings(mine)
    yours.release(0)
    assert rings(mine)
    assert mine.take(0, [A], ME) == NOTHING
    assert mine.bell is None


def test_who_came_first_goes_first_and_then_stands_behind_the_others(sweep: Sweep) -> None:
    first, second, third = sweep(), sweep(), sweep()
    third.take(0, [A], ME)
    for waiting in (first, second):
        assert waiting.take(0, [A], ME) == {A}
        assert waiting.wait_for(waits(A), ME)
    third.release(0)
    assert third.take(0, [A], ME) == {A}, "it has just had it"
    third.wait_for(waits(A), ME)
    order = []
    for _ in range(4):
        for name, each in {"second": second, "third": third, "first": first}.items():
            if each.take(1, [A], ME) == NOTHING:
                order.append(name)
                each.release(1)
                each.take(1, [A], ME)
                each.wait_for(waits(A), ME)
                break
    assert order == ["first", "second", "third", "first"]


def test_a_ticket_keeps_others_from_the_slots_that_it_is_for_alone_and_says_whose_it_is(sweep: Sweep) -> None:
    mine, yours = sweep(TWO), sweep(TWO)
    yours.wait_for(waits(A), YOU)
    assert mine.take(0, [A, B], ME) == {A}
    assert mine.holders([A, B]) == "the sweep in /yours (process 22) has waited longer for"
    assert mine.take(0, [B], ME) == NOTHING


def test_a_ticket_for_fewer_slots_than_before_lets_others_know(sweep: Sweep) -> None:
    mine, yours = sweep(TWO), sweep(TWO)
    yours.wait_for(waits(A, B), YOU)
    assert mine.take(0, [B], ME) == {A, B}
    mine.wait_for(waits(B), ME)
    yours.wait_for(waits(A), YOU)
    assert rings(mine)
    assert mine.take(0, [B], ME) == NOTHING


def test_who_waits_no_longer_lets_the_others_know(sweep: Sweep) -> None:
    mine, yours = sweep(), sweep()
    yours.wait_for(waits(A), YOU)
    assert mine.take(0, [A], ME) == {A}
    mine.wait_for(waits(A), ME)
    assert not yours.wait_for(Waiting(), YOU)
    assert rings(mine)
    assert mine.take(0, [A], ME) == NOTHING


def test_the_place_of_a_sweep_that_is_killed_is_given_up_and_its_ticket_taken_away(sweep: Sweep, leases: Path) -> None:
    mine = sweep()
    with process(lambda: Leases(open_files(str(leases), ONE), ONE).wait_for(waits(A), YOU)) as pid:
        assert mine.take(0, [A], ME) == {A}
        mine.wait_for(waits(A), ME)
        kill(pid)
        assert rings(mine)
    assert mine.take(0, [A], ME) == NOTHING
    assert not list(leases.glob("wait.*"))


def test_those_that_wait_do_not_wake_each_other_by_looking(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWO)
    third.take(0, [B], ME)
    for waiting in (mine, yours):
        waiting.take(0, [A, B], ME)
        waiting.wait_for(waits(A, B), ME)
    for _ in range(3):
        rings(mine)
        rings(yours)
        assert mine.take(0, [A, B], ME) == {B}
        assert yours.take(0, [A, B], ME) == {A, B}
    assert not rings(mine)
    assert not rings(yours)


def test_two_that_need_the_same_two_slots_both_get_them_one_after_the_other(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWO)
    third.take(0, [A], ME)
    third.take(1, [B], ME)
    assert mine.take(0, [A, B], ME)
    mine.wait_for(waits(A, B), ME)
    assert yours.take(0, [B, A], ME)
    yours.wait_for(waits(A, B), ME)
    third.release(0)
    assert mine.take(0, [A, B], ME) == {B}
    assert yours.take(0, [B, A], ME) == {A, B}
    third.release(1)
    assert yours.take(0, [B, A], ME) == {A, B}, "the other one was there before"
    assert mine.take(0, [A, B], ME) == NOTHING
    mine.release(0)
    assert yours.take(0, [B, A], ME) == NOTHING


def test_a_ticket_that_cannot_be_written_anew_stays_as_it_is(
    sweep: Sweep, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, yours = sweep(TWO), sweep(TWO)
    yours.wait_for(waits(A), YOU)

    def full(_fd: int, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_line, "overwrite", full)
    yours.wait_for(waits(A, B), YOU)
    assert mine.take(0, [A], ME) == {A}
    assert mine.take(0, [B], ME) == NOTHING
    assert len(list(leases.glob("wait.*"))) == 1
    assert not list(leases.glob("new.*"))


def test_a_ticket_that_is_written_anew_is_not_taken_for_that_of_a_dead_sweep(
    sweep: Sweep, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, yours = sweep(TWO), sweep(TWO)
    yours.wait_for(waits(A, B), YOU)
    flock = fcntl.flock

    def meanwhile(fd: int, how: int) -> None:  # right after we have opened the file, it becomes another one
        monkeypatch.setattr(fcntl, "flock", flock)
        yours.wait_for(waits(A), YOU)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    mine.take(0, [A], ME)
    assert len(list(leases.glob("wait.*"))) == 1
    assert mine.take(1, [A], ME) == {A} or mine.holders([A]) == ""


def test_a_line_that_cannot_be_read_keeps_nobody_from_a_slot(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, yours = sweep(), sweep()
    yours.wait_for(waits(A), YOU)

    def out_of_descriptors(_path: int) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", out_of_descriptors)
    assert mine.take(0, [A], ME) == NOTHING
    assert mine.of_others() == frozenset()


def test_a_ticket_that_is_just_being_written_is_for_any_slot(sweep: Sweep, leases: Path) -> None:
    mine = sweep()
    path = leases / f"wait.{0:020}.7"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert mine.take(0, [A], ME) == {A}
    assert mine.holders([A]) == "another sweep has waited longer for"
    os.close(fd)
    assert mine.take(0, [A], ME) == NOTHING


@pytest.mark.parametrize(
    ("when", "kept"), [(-1, True), (-120 * 10**9, False), (3600 * 10**9, False)], ids=["now", "long ago", "other boot"]
)
def test_a_ticket_whose_sweep_was_killed_while_it_wrote_it_is_taken_away(
    sweep: Sweep, leases: Path, when: int, *, kept: bool
) -> None:
    path = leases / f"new.{max(0, time.monotonic_ns() + when):020}.7"
    path.touch()
    assert sweep().take(0, [A], ME) == NOTHING
    assert path.exists() == kept


def test_how_long_a_sweep_has_waited_counts_only_for_what_it_has_waited_for(sweep: Sweep) -> None:
    mine, yours, third = sweep(TWO), sweep(TWO), sweep(TWO)
    mine.wait_for(waits(A), ME)
    yours.wait_for(waits(B), YOU)
    assert third.take(0, [A], ME)
    assert mine.take(0, [B], ME) == {B}
    assert mine.take(0, [A], ME) == NOTHING


def test_where_nothing_can_be_watched_a_sweep_that_waits_knows_that_it_is_deaf(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = sweep()
    assert not mine.deaf
    mine.wait_for(waits(A), ME)
    assert not mine.deaf
    mine.wait_for(Waiting(), ME)
    monkeypatch.setattr(_inotify._libc, "inotify_init1", lambda _: -1)
    mine.wait_for(waits(A), ME)
    assert mine.deaf
    assert mine.bell is None
    mine.wait_for(Waiting(), ME)
    assert not mine.deaf


@pytest.mark.parametrize(
    "content", [b"", b'{"pid": Infinity, "dir": "/d", "slots": 7}', b"[" * 100_000, b'{"pid": 1}', b"\xff", b"[]"]
)
def test_whatever_stands_in_the_directory_harms_no_sweep(sweep: Sweep, leases: Path, content: bytes) -> None:
    mine = sweep(TWICE)
    for name in ("0.1", "0.7", f"wait.{0:020}.1"):
        fd = os.open(leases / name, os.O_RDWR | os.O_CREAT)
        os.write(fd, content)
        fcntl.flock(fd, fcntl.LOCK_EX)
    os.mkfifo(leases / "0.8")
    os.mkfifo(leases / f"wait.{1:020}.1")
    os.symlink("0.1", leases / "0.00")
    os.mkdir(leases / "0.9")
    mine.take(0, [Slot(0, 1)], ME)
    mine.of_others()
    mine.wait_for(waits(Slot(0, 1)), ME)
    _lease_directory.holders(str(leases))
    for fd in {int(name) for name in os.listdir("/proc/self/fd")}:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{leases}/") and fd not in mine.descriptors():
                os.close(fd)


def test_files_are_not_opened_where_none_would_be_left_for_the_sweep(leases: Path) -> None:
    def tight() -> None:
        open_now = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, open_now + 20))
        with pytest.raises(OSError, match="Too many open files"):
            open_files(str(leases), TWO)

    with process(tight):
        pass


def test_without_a_ticket_a_sweep_waits_all_the_same(
    sweep: Sweep, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, yours = sweep(), sweep()
    yours.take(0, [A], YOU)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_line, "overwrite", full)
    assert mine.wait_for(waits(A), ME)
    assert not mine.wait_for(waits(A), ME)
    assert [path.name for path in leases.iterdir() if path.name != "0.0"] == []
    yours.release(0)
    assert rings(mine)


# --- what is refused, and what is not leased ---


def test_the_directory_is_made_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new"
    before = os.umask(0)
    try:
        assert _lease_directory.require(str(path), "share") is None
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o700


def _readable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def _link(path: Path) -> None:
    (path.parent / "private").mkdir(0o700)
    path.symlink_to(path.parent / "private")


def _file(path: Path) -> None:
    path.touch(0o600)


def _foreign(path: Path) -> None:
    path.mkdir(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("make", [_readable, _link, _file, _foreign, lambda path: path.parent.rmdir()])
def test_a_directory_that_could_be_somebody_elses_is_refused_with_the_remedy(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/leases"
    make(path)
    with pytest.raises(ConfigurationError, match=r"^hydra\.launcher\.share=true: .*/in/leases \(.*share=false") as info:
        _lease_directory.require(str(path), "hydra.launcher.share")
    assert "\n" not in str(info.value)


def test_a_link_in_place_of_a_lease_is_not_followed(leases: Path, tmp_path: Path) -> None:
    (leases / "0.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"0\.0"):
        open_files(str(leases), ONE)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_told_of_and_then_everything_can_be_had(
    sweep: Sweep, leases: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    mine, yours = sweep(), sweep()
    assert yours.take(0, [A], YOU) == NOTHING

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = _lease_directory.require(str(leases), "share")
    assert said is not None
    assert os.strerror(code) in said
    assert mine.take(0, [A], ME) == NOTHING
    assert mine.fault is not None
    assert not mine.wait_for(waits(A), ME)
    mine.release(0)


@pytest.mark.parametrize("what", ["directory", "directory, and another one came", "file", "file, and another one came"])
def test_leases_whose_files_were_removed_are_told_of_once_and_then_everything_can_be_had(
    sweep: Sweep, leases: Path, what: str
) -> None:
    mine = sweep()
    mine.wait_for(waits(A), ME)
    removed, _, new = what.partition(", ")
    for path in [*leases.iterdir()]:
        path.unlink()
    if removed == "directory":
        leases.rmdir()
    if new:
        other = Leases(open_files(str(leases), ONE), ONE)
        other.take(0, [A], YOU)
    assert mine.fault is None
    assert mine.take(0, [A], ME) == NOTHING
    assert mine.fault is not None
    assert mine.fault == (
        "slots are not leased any more, and other sweeps may use the same ones, for they were leased in "
        f"{leases}, and {'it was' if removed == 'directory' else 'files in it were'} removed or replaced"
    )
    assert not mine.wait_for(waits(A), ME)
    assert mine.bell is None
    if new:
        for fd in other.descriptors():
            os.close(fd)


def test_a_gpu_that_goes_by_its_number_has_one_name_however_that_is_written() -> None:
    assert [Device(entry).key for entry in ("0", "00", "007", "GPU-0a", "MIG-1/2")] == [
        "0",
        "0",
        "7",
        "GPU-0a",
        "MIG-1/2",
    ]


@pytest.mark.parametrize(
    ("devices", "environ", "place"),
    [
        (("0",), {"GPU_POOL_LEASES": "/there/"}, "/there"),
        (("0",), {}, f"/tmp/gpu_pool-{os.geteuid()}"),
        (("0",), {"GPU_POOL_LEASES": ""}, f"/tmp/gpu_pool-{os.geteuid()}"),
        (("",), {}, None),
        (("0",), {"GPU_POOL_GPUS": "0"}, None),
        (("0",), {"GPU_POOL_GPUS": ""}, f"/tmp/gpu_pool-{os.geteuid()}"),
    ],
)
def test_slots_of_gpus_are_leased_unless_they_are_those_of_a_job_of_another_sweep(
    devices: tuple[str, ...], environ: dict[str, str], place: str | None
) -> None:
    assert _lease_directory.place_for(Layout(tuple(map(Device, devices)), 1), environ) == place


# --- from outside ---


def test_who_has_what_can_be_read_from_the_directory_and_the_dead_have_nothing(sweep: Sweep, leases: Path) -> None:
    mig = Device("MIG-GPU-1/2/3")
    mine = sweep(Layout((Device("0"), mig), 2))
    assert _lease_directory.holders(str(leases)) == {}
    mine.take(0, [Slot(1, 1)], ME)
    mine.take(1, [Slot(0, 0)], ME)
    mine.release(1)
    with process(lambda: Leases(open_files(str(leases), ONE), ONE).take(0, [A], YOU)) as pid:
        mine.wait_for(waits(Slot(0, 0)), ME)
        assert _lease_directory.holders(str(leases)) == {"0.0": YOU, f"{_lease_directory.file_name(mig.key)}.1": ME}
        kill(pid)
    assert _lease_directory.holders(str(leases)) == {f"{_lease_directory.file_name(mig.key)}.1": ME}


def test_where_nobody_has_leased_anything_there_is_nothing_to_read_and_nothing_is_made(tmp_path: Path) -> None:
    assert _lease_directory.holders(str(tmp_path / "none")) == {}
    assert not (tmp_path / "none").exists()
