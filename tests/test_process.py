"""The process room, with real forks: how a family's members are started, found again and ended."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, sleeper

from hydra_plugins.hydra_gpu_pool_launcher import (
    ConfigurationError,
    _descriptors,
    _family,
    _inotify,
    _pidfd,
    _process,
    _streams,
)
from hydra_plugins.hydra_gpu_pool_launcher._family import Family
from hydra_plugins.hydra_gpu_pool_launcher._model import Exit


class Gate:
    """A pipe on which forks wait for each other: ``wait`` blocks until somebody has called ``open``."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def open(self) -> None:
        os.write(self.write, b"x")

    def wait(self) -> None:
        assert os.read(self.read, 1) == b"x"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    os.close(gate.read)
    os.close(gate.write)


@pytest.fixture
def family() -> Iterator[Family]:
    """A family whose members, whatever a test did to them, are ended afterwards."""
    family = Family()
    yield family
    _family.end_all_children(10)


def leader(job: Callable[[], int]) -> Callable[[frozenset[int]], int]:
    def main(mask: frozenset[int]) -> int:
        os.setsid()
        _process.become_subreaper()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return job()

    return main


def until_gone(family: Family, *keys: int) -> dict[int, Exit]:
    """Wait until these keys' trees are gone; how their leaders ended."""
    gone: dict[int, Exit] = {}
    while not gone.keys() >= set(keys):
        steps, _ = family.wait(None)
        gone |= {key: exit_ for key, exit_ in steps.items() if exit_ is not None}
    return gone


def pause() -> int:
    signal.pause()
    return 0


def daemonize(*, ready: Gate) -> None:
    """Leave a process behind that has another session, group and parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ready.open()
            pause()
        os._exit(0)


@pytest.mark.parametrize("how", ["of Python", "by ctypes"])
def test_a_pidfd_is_readable_when_the_process_has_ended(monkeypatch: pytest.MonkeyPatch, how: str, gate: Gate) -> None:
    if how == "by ctypes":
        monkeypatch.delattr(os, "pidfd_open", raising=False)

    def child(_: frozenset[int]) -> int:
        gate.wait()
        return 0

    pid = _process.fork(child)
    pidfd = _pidfd.pidfd_open(pid)
    assert _descriptors.wait_readable([pidfd], 0) == []
    assert not os.get_inheritable(pidfd)
    gate.open()
    assert _descriptors.wait_readable([pidfd]) == [pidfd]
    os.waitpid(pid, 0)
    os.close(pidfd)


def test_a_pidfd_of_nobody_is_an_error_by_ctypes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with pytest.raises(ProcessLookupError):
        _pidfd.pidfd_open(2**22 + 1)


def test_a_system_without_pidfd_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_pidfd, "pidfd_open", refuse)
    with pytest.raises(ConfigurationError, match=r"pidfd_open.*Operation not permitted.*seccomp"):
        _pidfd.require_pidfd()


def test_the_exit_code_and_the_signal_of_a_leader_are_told(family: Family) -> None:
    family.start(0, leader(lambda: 7))
    family.start(1, leader(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0))  # type: ignore[func-returns-value]
    gone = until_gone(family, 0, 1)
    assert (gone[0].code, gone[0].signal) == (7, None)
    assert (gone[1].code, gone[1].signal) == (None, signal.SIGKILL)
    assert gone[0].peak_mb > 1


def test_an_exception_in_a_child_ends_the_child_and_not_more(family: Family, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise RuntimeError("in the child")

    family.start(0, leader(broken))
    assert until_gone(family, 0)[0].code == 70
    assert "RuntimeError: in the child" in capfd.readouterr().err


def test_a_signal_sent_right_after_the_fork_is_not_lost(family: Family) -> None:
    old = signal.signal(signal.SIGTERM, lambda *_: None)  # as in a parent that handles it in Python
    try:
        for key in range(20):

            def main(mask: frozenset[int]) -> int:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return pause()

            family.start(key, main)
            family.signal(key, signal.SIGTERM)
        gone = until_gone(family, *range(20))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert {exit_.signal for exit_ in gone.values()} == {signal.SIGTERM}


def test_waiting_ends_at_the_timeout_and_when_a_watched_descriptor_is_readable(family: Family, gate: Gate) -> None:
    family.start(0, leader(pause))
    assert family.wait(0, [gate.read]) == ({}, [])
    gate.open()
    assert family.wait(None, [gate.read]) == ({}, [gate.read])
    family.kill(0)
    until_gone(family, 0)


def test_timeouts_beyond_what_poll_takes_are_no_error(family: Family, gate: Gate) -> None:
    gate.open()
    assert family.wait(1e12, [gate.read]) == ({}, [gate.read])


def test_one_leaders_end_is_no_news_of_another(family: Family) -> None:
    family.start(0, leader(pause))
    family.start(1, leader(lambda: 0))
    assert set(until_gone(family, 1)) == {1}
    family.kill(0)
    assert until_gone(family, 0)[0].signal == signal.SIGKILL


def test_a_daemon_of_a_running_leader_is_left_alone_when_another_ends(family: Family, gate: Gate) -> None:
    checked = Gate()

    def with_daemon() -> int:
        daemonize(ready=gate)
        checked.wait()
        return len(_family.children())  # the daemon hangs on its leader, and lives

    family.start(0, leader(with_daemon))
    gate.wait()
    family.start(1, leader(lambda: 0))
    until_gone(family, 1)
    checked.open()
    gone = until_gone(family, 0)
    os.close(checked.read)
    os.close(checked.write)
    assert gone[0].code in {1, 2}, "the daemon, and perhaps the zombie of its parent"


def test_a_leader_is_gone_only_when_its_daemons_are(family: Family, gate: Gate) -> None:
    def with_daemons() -> int:
        for _ in range(3):
            daemonize(ready=gate)
        return 5

    family.start(0, leader(with_daemons))
    steps: list[dict[int, Exit | None]] = []
    while not steps or steps[-1].get(0) is None:
        steps.append(family.wait(None)[0])
    assert steps[-1][0] is not None
    assert steps[-1][0].code == 5
    assert _family.children() == set()


def test_a_group_inside_a_daemon_is_ended_whole(family: Family, gate: Gate) -> None:
    def with_group() -> int:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                gate.open()
                pause()
            pause()
        gate.wait()
        return 0

    family.start(0, leader(with_group))
    until_gone(family, 0)
    assert _family.children() == set()


def test_killing_a_leader_ends_its_tree(family: Family, gate: Gate) -> None:
    def with_all() -> int:
        daemonize(ready=gate)
        if os.fork() == 0:
            pause()
        gate.open()
        return pause()

    family.start(0, leader(with_all))
    gate.wait()
    gate.wait()
    family.kill(0)
    assert until_gone(family, 0)[0].signal == signal.SIGKILL
    assert _family.children() == set()


def test_a_leader_that_is_killed_before_it_has_a_session_dies(family: Family, gate: Gate) -> None:
    def main(_: frozenset[int]) -> int:
        gate.wait()
        return 0

    family.start(0, main)
    family.kill(0)
    assert until_gone(family, 0)[0].signal == signal.SIGKILL


def test_an_abandoned_leader_is_waited_for_no_longer_and_holds_up_no_other(family: Family) -> None:
    family.start(0, leader(pause))
    family.start(1, leader(lambda: 0))
    family.abandon(0)
    assert set(until_gone(family, 1)) == {1}
    assert family.wait(0) == ({}, [])


def test_what_cannot_be_killed_holds_up_its_own_leader_and_no_other(
    family: Family, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_daemon() -> int:
        daemonize(ready=gate)
        os.wait()  # for the process between us and the daemon
        return 0

    family.start(0, leader(with_daemon))
    with monkeypatch.context() as patch:
        patch.setattr(_family, "_kill", lambda _: None)  # a daemon that SIGKILL does not end: it sleeps in the kernel
        assert family.wait(None)[0] == {0: None}
        family.start(1, leader(lambda: 0))
        assert set(until_gone(family, 1)) == {1}
        assert family.wait(0) == ({}, [])
        family.abandon(0)
        family.start(2, leader(lambda: 0))
        assert set(until_gone(family, 2)) == {2}


def test_a_leader_that_a_debugger_holds_holds_up_no_other(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer must reap a process before its parent can: waiting for that would stop everything."""
    traced = family.start(0, leader(lambda: 5))
    with monkeypatch.context() as patch:
        waitid = os.waitid
        patch.setattr(os, "waitid", lambda kind, pid, flags: None if pid == traced else waitid(kind, pid, flags))
        assert family.wait(None)[0] == {0: None}
        family.start(1, leader(lambda: 0))
        assert set(until_gone(family, 1)) == {1}
    assert family.wait(0)[0][0] is not None, "when the tracer has let go"


def test_more_remnants_than_descriptors_are_ended_all_the_same(family: Family, gate: Gate) -> None:
    def with_daemons() -> int:
        for _ in range(60):
            daemonize(ready=gate)
        return 5

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1]))
    try:
        family.start(0, leader(with_daemons))
        assert until_gone(family, 0)[0].code == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert _family.children() == set()


def test_no_process_is_started_that_could_not_be_waited_for(family: Family, gate: Gate) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            family.start(0, leader(lambda: gate.open() or 0))  # type: ignore[func-returns-value]
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert _family.children() == set()
    assert _descriptors.wait_readable([gate.read], 0) == []


def test_a_proc_of_another_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    with pytest.raises(ConfigurationError, match="another PID namespace"):
        _pidfd.require_pidfd()


def test_children_are_found_without_the_kernels_list_of_them(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_list(path: str, *args: object, **kwargs: object) -> object:
        if path.endswith("/children"):
            raise FileNotFoundError(path)
        return open(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(_family, "open", no_list, raising=False)
    pids = {family.start(key, leader(pause)) for key in range(3)}
    assert _family.children() == pids
    for key in range(3):
        family.kill(key)
    until_gone(family, 0, 1, 2)
    assert _family.children() == set()


def test_a_child_dies_with_its_parent(gate: Gate) -> None:
    def parent(_: frozenset[int]) -> int:
        me = os.getpid()

        def child(_: frozenset[int]) -> int:
            _process.die_with_parent(me)
            gate.open()
            return pause()

        _process.fork(child)
        gate.wait()
        return 0

    pid = _process.fork(parent)
    os.waitpid(pid, 0)
    orphan = os.wait()[0]  # this process is the subreaper that it fell to
    assert orphan != pid


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    def child(_: frozenset[int]) -> int:
        _process.die_with_parent(os.getpid())  # not its parent's pid
        return 0

    assert os.WTERMSIG(os.waitpid(_process.fork(child), 0)[1]) == signal.SIGKILL


def test_no_descriptor_is_left_of_a_family_that_is_over(family: Family, gate: Gate) -> None:
    def open_fds() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before = open_fds()
    for key in range(5):
        family.start(key, leader(lambda: daemonize(ready=gate) or 0))  # type: ignore[func-returns-value]
    until_gone(family, *range(5))
    assert family.descriptors() == []
    assert open_fds() == before


def test_ending_all_children_ends_what_falls_to_us_meanwhile(gate: Gate) -> None:
    def parent(_: frozenset[int]) -> int:
        if os.fork() == 0:
            os.setsid()
            gate.open()
            pause()
        return pause()

    _process.fork(parent)
    gate.wait()
    _family.end_all_children(10)
    assert _family.children() == set()


def test_the_oom_score_is_raised_as_far_as_it_goes(family: Family) -> None:
    def main() -> int:
        _process.raise_oom_score(300)
        _process.raise_oom_score(3000)
        return int(Path("/proc/self/oom_score_adj").read_text()) == 1000

    family.start(0, leader(main))
    assert until_gone(family, 0)[0].code == 1


@pytest.mark.parametrize("memfd", [True, False])
def test_an_unnamed_file_is_read_from_its_start_by_everybody_who_opens_it_anew(
    monkeypatch: pytest.MonkeyPatch, memfd: bool
) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as in conda's Python
    fd = _descriptors.unnamed_file(b"content")
    try:
        assert fd > 2
        assert not os.get_inheritable(fd)
        for _ in range(2):
            assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"content"
    finally:
        os.close(fd)


def test_a_fork_answers_a_question_and_is_gone() -> None:
    main = os.getpid()
    assert _process.answer_of_fork(lambda: os.getpid() != main)
    assert not _process.answer_of_fork(lambda: os.getpid() == main)


def test_a_process_that_lets_an_interrupt_out_ends_by_its_signal_as_any_interpreter() -> None:
    def main(mask: frozenset[int]) -> int:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise KeyboardInterrupt

    _, status = os.waitpid(_process.fork(main), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT


def test_a_process_is_found_by_its_pid_and_start_and_not_once_it_has_ended() -> None:
    with sleeper() as child:
        started = _pidfd.start_time(child.pid)
        assert started is not None
        pidfd = _pidfd.find(child.pid, started)
        assert pidfd is not None
        os.close(pidfd)
        assert _pidfd.find(child.pid, started + 1) is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert _pidfd.find(child.pid, started) is None
    assert _pidfd.find(child.pid, started) is None


@pytest.mark.parametrize("by_python", [True, False])
def test_a_signal_by_pidfd_reaches_the_process_and_none_after_it(
    by_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_python:
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    with sleeper() as child:
        pidfd = _pidfd.pidfd_open(child.pid)
        _pidfd.send_to(pidfd, signal.SIGUSR2)
        assert child.wait(LIMIT_S) == -signal.SIGUSR2
    with pytest.raises(ProcessLookupError):
        _pidfd.send_to(pidfd, signal.SIGUSR2)
    os.close(pidfd)


def test_a_file_that_grows_comes_or_is_renamed_wakes_who_waits_for_its_directory(tmp_path: Path) -> None:
    with _inotify.Changes() as changes:
        changes.watch(str(tmp_path / "not there"))
        for _ in range(2):
            changes.watch(str(tmp_path))
        assert _descriptors.wait_readable([changes.fd], 0) == []
        file = tmp_path / "file"
        for change in (file.touch, lambda: file.write_text("text"), lambda: file.rename(tmp_path / "renamed")):
            change()
            assert _descriptors.wait_readable([changes.fd], LIMIT_S), "nobody was woken"
            assert changes.wait(LIMIT_S) == []
            assert _descriptors.wait_readable([changes.fd], 0) == []


def test_a_pipe_is_told_from_a_file_and_its_reader_is_missed() -> None:
    read, write = os.pipe()
    with open(os.devnull) as null:
        assert (_descriptors.pipe_behind(null.fileno()), _descriptors.pipe_behind(write)) == (None, write)
    assert _descriptors.wait_readable([write], 0) == []
    os.close(read)
    assert _descriptors.wait_readable([write], LIMIT_S) == [write]
    os.close(write)


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("broken", [Full(), None, "closed"])
def test_a_line_for_a_log_that_takes_none_is_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    stream = io.StringIO() if broken == "closed" else broken
    if broken == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    _streams.note("a line")
