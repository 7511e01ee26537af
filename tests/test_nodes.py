"""What the machines of one job tell each other: several nodes, a dictionary that plays the store, a clock of its own.

Each node runs a script in a thread, one thread at a time: a pause lets whoever wakes next go on, and the clock jumps
there. So minutes of silence take milliseconds, and always the same course.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from hydra_plugins.hydra_gpu_pool_launcher._nodes import (
    BEAT_S,
    SILENT_AFTER_FAILURE_S,
    SILENT_S,
    NodeError,
    Nodes,
    Verdict,
)

END_OF_TIME_S = 10_000.0
"""Nobody waits for so long in these tests: who does would wait for ever."""

LONGEST_ENTRY = 8 << 20
"""Of torch's store."""


class KilledError(Exception):
    """The process of a node's job is killed: it does nothing any more."""


class ToldError(Exception):
    """A signal to it: as what the real pause raises."""


class HangError(Exception):
    """A node would wait for ever."""


@dataclass
class World:
    """So many nodes, their store, which lives as long as node 0, and the clock.

    ``killed``, ``told``: when, by node.
    """

    count: int = 2
    timeout_s: float = 60.0
    killed: Mapping[int, float] = field(default_factory=dict)
    told: Mapping[int, float] = field(default_factory=dict)
    now: float = 0.0
    entries: dict[str, bytes] = field(default_factory=dict)
    store_is_gone: bool = False
    ended: dict[int, float] = field(default_factory=dict)
    _asleep: dict[int, float] = field(default_factory=dict)  # until when
    _turns: dict[int, threading.Semaphore] = field(default_factory=dict)
    _over: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _due: dict[int, dict[type[Exception], float]] = field(default_factory=dict)

    def play(self, *scripts: Callable[[Nodes], Any], ranks: tuple[int, ...] = ()) -> list[Any]:
        """What each node's script has returned, or raised. ``ranks``: of the nodes, where not 0, 1, …"""
        results: list[Any] = [None] * len(scripts)

        def run(number: int, node: int) -> None:
            try:
                self._sleep(number, 0.0)
                nodes = Nodes(
                    Store(self), node, self.count, self.timeout_s, functools.partial(self._pause, number), self._clock
                )
                results[number] = scripts[number](nodes)
            except (Exception, pytest.fail.Exception) as error:
                results[number] = error
            self.ended[number] = self.now
            self.store_is_gone = self.store_is_gone or node == 0
            self._over.release()

        threads = []
        for number, node in enumerate(ranks or range(len(scripts))):
            self._turns[number] = threading.Semaphore(0)
            self._due[number] = {KilledError: self.killed.get(number, END_OF_TIME_S)}
            self._due[number][ToldError] = self.told.get(number, END_OF_TIME_S)
            threads.append(threading.Thread(target=run, args=(number, node)))
            threads[-1].start()
            self._over.acquire()
        while self._asleep:
            number = min(self._asleep, key=lambda number: (self._asleep[number], number))
            self.now = max(self.now, self._asleep.pop(number))
            self._turns[number].release()
            self._over.acquire()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, (AssertionError, HangError)):
                raise result
        return results

    def _clock(self) -> float:
        return self.now

    def _sleep(self, number: int, until: float) -> None:
        self._asleep[number] = until
        self._over.release()
        self._turns[number].acquire()

    def _pause(self, number: int, seconds: float) -> None:
        due = self._due[number]
        self._sleep(number, max(self.now, min(self.now + seconds, *due.values())))
        for error, at in list(due.items()):
            if self.now >= at:
                due[error] = END_OF_TIME_S
                raise error if at < END_OF_TIME_S else HangError


@dataclass
class Store:
    """torch's, as ``Nodes`` uses it."""

    world: World

    def _ask(self) -> dict[str, bytes]:
        if self.world.store_is_gone:
            raise RuntimeError("Connection reset by peer")
        return self.world.entries

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write an entry."""
        content = value.encode() if isinstance(value, str) else value
        assert len(content) <= LONGEST_ENTRY, "torch's store would close the connection"
        self._ask()[key] = content

    def get(self, key: str, /) -> bytes:
        """Read one that is there."""
        entries = self._ask()
        assert key in entries, "torch's store would block"
        return entries[key]

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""
        return all(key in self._ask() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write an entry where none is there."""
        assert expected == ""
        return self._ask().setdefault(key, desired.encode())


def meet(nodes: Nodes, start: int = 0) -> dict[int, dict[str, Any]]:
    return nodes.meet(start, {"of": nodes.node})


def run_ranks(nodes: Nodes, seconds: float, start: int = 0) -> bool:
    """As the process of a job does while its ranks run; False: they are to end."""
    until = nodes.clock() + seconds
    while nodes.clock() < until:
        if nodes.look(start):
            return False
        nodes.pause(BEAT_S)
    return True


def verdict(nodes: Nodes, at: float, why: str = "rank 3 raised ValueError: x", *, final: bool = False) -> Verdict:
    return Verdict(nodes.node, at, why, final)


def late(seconds: float, then: Callable[[Nodes], Any]) -> Callable[[Nodes], Any]:
    def script(nodes: Nodes) -> Any:
        nodes.pause(seconds)
        return then(nodes)

    return script


def why(result: Any) -> str:
    assert isinstance(result, NodeError), result
    return result.why


# --- to meet ---


@pytest.mark.parametrize("count", [2, 3, 8])
def test_nodes_that_come_at_different_times_all_learn_what_each_has_said(count: int) -> None:
    def come(nodes: Nodes) -> Any:
        nodes.pause(5.0 * nodes.node)
        said = meet(nodes)
        nodes.pause(1)  # the store lives as long as node 0 does
        return said

    said = World(count).play(*[come] * count)
    assert said == [{node: {"of": node} for node in range(count)}] * count


def test_nodes_that_do_not_come_are_named_when_the_time_is_up() -> None:
    world = World(4, timeout_s=20)
    first, second = world.play(meet, late(5, meet), ranks=(0, 2))
    assert why(first) == "waited 20 s for nodes 1, 3 to join, in vain"
    assert first.final
    assert 20 <= world.ended[0] <= 22
    assert why(second) == "was ended by node 0, where it waited 20 s for nodes 1, 3 to join, in vain"
    assert second.final


def test_the_time_to_meet_is_kept_to_the_second_however_short_it_is() -> None:
    world = World(timeout_s=0.5)
    assert why(world.play(meet)[0]) == "waited 0.5 s for node 1 to join, in vain"
    assert world.ended[0] == 0.5


def test_two_machines_with_one_node_rank_are_told_apart_and_the_first_one_goes_on() -> None:
    def other(nodes: Nodes) -> Any:
        return nodes.meet(0, {"of": "another machine"})

    said = World().play(meet, meet, other, ranks=(0, 1, 1))
    assert said[:2] == [{0: {"of": 0}, 1: {"of": 1}}] * 2
    assert why(said[2]) == "met another machine with ddp.node_rank=1: give each its own"
    assert said[2].final


def test_who_gives_up_while_others_wait_for_a_third_ends_them_at_once() -> None:
    def cancelled(nodes: Nodes) -> Any:
        with pytest.raises(ToldError):
            meet(nodes)
        nodes.give_up(0, "it was cancelled")

    world = World(3, timeout_s=600, told={1: 10.0})
    waiting, _ = world.play(meet, cancelled)
    assert why(waiting) == "was ended by node 1, where it was cancelled"
    assert waiting.final
    assert world.ended[0] <= 10 + 2 * BEAT_S

    world = World(3, timeout_s=600, told={0: 10.0})
    _, waiting = world.play(cancelled, meet)
    assert why(waiting) == "was ended by node 0, where it was cancelled"
    assert world.ended[0] <= 10 + 2 * BEAT_S


def test_all_who_wait_hear_of_one_that_gives_up_though_node_0_hears_of_it_first() -> None:
    def gives_up(nodes: Nodes) -> None:
        with pytest.raises(ToldError):
            meet(nodes)
        nodes.give_up(0, "it was cancelled")

    results = World(5, told={1: 10.0}).play(meet, gives_up, late(0.3, meet), late(0.7, meet))
    assert [why(results[node]) for node in (0, 2, 3)] == ["was ended by node 1, where it was cancelled"] * 3


def test_node_0_does_not_wait_for_one_that_came_and_never_gave_a_sign_of_life() -> None:
    def gives_up(nodes: Nodes) -> None:
        with pytest.raises(ToldError):
            meet(nodes)
        nodes.give_up(0, "it was cancelled")

    world = World(4, told={1: 10.0}, entries={"gpu_pool/0/here/2": b"{}"})
    assert why(world.play(meet, gives_up)[0]) == "was ended by node 1, where it was cancelled"
    assert world.ended[0] <= 10 + SILENT_AFTER_FAILURE_S + 3 * BEAT_S


def test_node_0_that_gives_up_does_not_wait_for_who_never_came_or_hears_nothing() -> None:
    def cancelled(nodes: Nodes) -> Any:
        with pytest.raises(ToldError):
            meet(nodes)
        nodes.give_up(0, "it was cancelled")

    world = World(3, told={0: 10.0})
    world.play(cancelled)
    assert world.ended[0] == 10

    world = World(3, told={0: 10.0}, killed={1: 5.0})
    world.play(cancelled, meet)
    assert world.ended[0] <= 12.5


def test_a_node_that_came_and_died_is_missed_before_the_time_to_meet_is_over() -> None:
    world = World(3, timeout_s=600, killed={1: 5.0})
    waiting, killed = world.play(meet, meet)
    assert isinstance(killed, KilledError)
    assert why(waiting) == "lost node 1, not heard of for 30 s"
    assert SILENT_S <= world.ended[0] <= 5 + SILENT_S + 2 * BEAT_S


# --- signs of life ---


def after_meeting(then: Callable[[Nodes], Any]) -> Callable[[Nodes], Any]:
    def script(nodes: Nodes) -> Any:
        meet(nodes)
        return then(nodes)

    return script


def test_nodes_that_look_regularly_do_not_lose_each_other() -> None:
    script = after_meeting(lambda nodes: run_ranks(nodes, 1000))
    assert World(3).play(script, script, script)[0] is True


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_lost(silent: int) -> None:
    scripts = [after_meeting(lambda nodes: run_ranks(nodes, 100)) for _ in range(2)]
    scripts[silent] = after_meeting(lambda nodes: nodes.pause(100))
    world = World()
    lost = world.play(*scripts)[1 - silent]
    assert why(lost) == f"lost node {silent}, not heard of for 30 s"
    assert lost.final
    assert SILENT_S < world.ended[1 - silent] <= SILENT_S + 3 * BEAT_S


def test_after_a_failure_a_silent_node_is_lost_sooner() -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0))

    world = World(killed={1: 0.0})
    lost = world.play(after_meeting(failed), after_meeting(lambda nodes: run_ranks(nodes, 100)))[0]
    assert why(lost) == "lost node 1, not heard of for 5 s"
    assert SILENT_AFTER_FAILURE_S < world.ended[0] <= SILENT_AFTER_FAILURE_S + 3 * BEAT_S


def test_silence_before_the_failure_does_not_count_after_it() -> None:
    def failed(nodes: Nodes) -> Any:
        run_ranks(nodes, 4)
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0))

    def busy(nodes: Nodes) -> Any:
        nodes.pause(8)
        return nodes.settle(0, None)

    causes = World().play(after_meeting(failed), after_meeting(busy))
    assert [cause.node for cause in causes] == [0, 0]


def test_the_end_of_node_0_is_the_loss_of_it_wherever_another_node_is() -> None:
    def failing(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, None)

    for then in (lambda nodes: run_ranks(nodes, 100), failing, lambda nodes: nodes.finish(0, None)):
        lost = World().play(after_meeting(lambda _: None), after_meeting(then))[1]
        assert why(lost) == "lost node 0, which holds the store"
        assert lost.final


@pytest.mark.parametrize("error", [RuntimeError("Socket Timeout"), BrokenPipeError(32, "Broken pipe")])
def test_a_store_that_has_not_answered_once_is_never_asked_again(error: Exception) -> None:
    asked = []

    class Hanging(Store):
        def check(self, keys: list[str], /) -> bool:
            asked.append(keys)
            raise error

    nodes = Nodes(Hanging(World()), 1, 2, 60, pause=lambda _: None)
    for _ in range(2):
        with pytest.raises(NodeError, match="lost node 0, which holds the store"):
            nodes.look(0)
    nodes.give_up(0, "it was cancelled")
    assert len(asked) == 1


# --- failures ---


def test_who_runs_ranks_hears_of_a_failure_within_a_beat() -> None:
    def failed(nodes: Nodes) -> None:
        nodes.pause(7.5)
        nodes.fail(0)
        nodes.pause(10)

    world = World()
    assert world.play(after_meeting(failed), after_meeting(lambda nodes: run_ranks(nodes, 100)))[1] is False
    assert world.ended[1] <= 7.5 + BEAT_S + 0.5


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_earliest_verdict_is_the_cause_on_all_nodes(first: int) -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        nodes.pause(nodes.node)  # their ranks end one after the other
        return nodes.settle(0, verdict(nodes, at=5.0 - 2 * (nodes.node == first)))

    causes = World(3).play(*[after_meeting(failed)] * 3)
    assert causes == [Verdict(first, 3.0, "rank 3 raised ValueError: x", final=False)] * 3


def test_a_node_that_has_only_followed_has_no_verdict() -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0, final=True))

    def followed(nodes: Nodes) -> Any:
        assert not run_ranks(nodes, 100)
        return nodes.settle(0, None)

    assert (
        World().play(after_meeting(followed), after_meeting(failed))
        == [Verdict(1, 1.0, "rank 3 raised ValueError: x", final=True)] * 2
    )


def test_where_nobody_has_a_verdict_there_is_none() -> None:
    script = after_meeting(lambda nodes: nodes.settle(0, None))
    assert World().play(script, script) == [None, None]


def test_who_takes_its_time_to_end_its_ranks_is_waited_for_as_long_as_it_lives() -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0))

    def slow(nodes: Nodes) -> Any:
        until = nodes.clock() + 100  # its kill_grace_s
        while nodes.clock() < until:
            nodes.look(0)
            nodes.pause(BEAT_S)
        return nodes.settle(0, None)

    causes = World(3).play(after_meeting(failed), after_meeting(slow), after_meeting(failed))
    assert [cause.node for cause in causes] == [0, 0, 0]


def test_who_has_given_its_verdict_may_be_gone_while_others_are_waited_for() -> None:
    def gone(nodes: Nodes) -> None:
        nodes.give_up(0, "it was cancelled")

    def slow(nodes: Nodes) -> Any:
        until = nodes.clock() + 2 * SILENT_S
        while nodes.clock() < until:
            nodes.look(0)
            nodes.pause(BEAT_S)
        return nodes.settle(0, None)

    causes = World(3).play(
        after_meeting(lambda nodes: nodes.settle(0, None)),
        late(0.5, after_meeting(gone)),
        late(0.5, after_meeting(slow)),
    )
    assert causes[0] == causes[2] == Verdict(1, 0.0, "it was cancelled", final=True)


def test_an_exception_of_any_length_has_room_in_the_store() -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0, why="é" * (4 * LONGEST_ENTRY)))

    cause = World().play(after_meeting(failed), after_meeting(lambda nodes: nodes.settle(0, None)))[1]
    assert cause.why.startswith("éééé")


@pytest.mark.parametrize("told", [0, 1])
def test_who_gives_up_is_the_cause_for_the_others_whatever_they_say_themselves(told: int) -> None:
    def cancelled(nodes: Nodes) -> None:
        nodes.pause(3)
        nodes.give_up(0, "it was cancelled")

    def goes_on(nodes: Nodes) -> Any:
        assert not run_ranks(nodes, 100)
        return nodes.settle(0, verdict(nodes, 0.5))

    scripts = [after_meeting(goes_on)] * 2
    scripts[told] = after_meeting(cancelled)
    world = World()
    cause = world.play(*scripts)[1 - told]
    assert cause == Verdict(told, 0.0, "it was cancelled", final=True)
    assert cause.elsewhere == f"was ended by node {told}, where it was cancelled"
    assert world.ended[1 - told] <= 3 + 3 * BEAT_S


# --- the value ---


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 20_000_000])
def test_the_value_of_node_0_comes_whole_to_all_whatever_its_size(size: int) -> None:
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    values = World(3).play(*[after_meeting(lambda nodes: nodes.finish(0, value if nodes.node == 0 else None))] * 3)
    assert values == [value] * 3


def test_nobody_has_the_value_before_the_ranks_of_all_nodes_have_ended() -> None:
    def finish(nodes: Nodes) -> Any:
        nodes.pause(4.0 * nodes.node)
        nodes.finish(0, b"value" if nodes.node == 0 else None)
        return nodes.clock()

    assert min(World(3).play(*[after_meeting(finish)] * 3)) >= 8


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_fails_while_others_are_done_ends_their_waiting(failing: int) -> None:
    def done(nodes: Nodes) -> Any:
        assert nodes.finish(0, b"value" if nodes.node == 0 else None) is None
        return nodes.settle(0, None)

    def fails(nodes: Nodes) -> Any:
        assert run_ranks(nodes, 50)
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 50.0))

    scripts = [after_meeting(done)] * 2
    scripts[failing] = after_meeting(fails)
    assert [cause.node for cause in World().play(*scripts)] == [failing, failing]


class SlowStore(Store):
    """Each large entry takes its time, in which the node can do nothing else."""

    def __init__(self, world: World, pause: Callable[[float], object]) -> None:
        super().__init__(world)
        self._pause = pause

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write an entry."""
        if len(value) > 1000:
            self._pause(8.0)
        super().set(key, value)

    def get(self, key: str, /) -> bytes:
        """Read one that is there."""
        entry = super().get(key)
        if len(entry) > 1000:
            self._pause(8.0)
        return entry


def test_a_value_may_take_longer_over_a_slow_line_than_a_node_may_be_silent() -> None:
    value = bytes(40 << 20)  # 40 pieces, five minutes, each way

    def finish(nodes: Nodes) -> Any:
        nodes.store = SlowStore(nodes.store.world, nodes.pause)  # type: ignore[attr-defined]
        return nodes.finish(0, value if nodes.node == 0 else None)

    values = World(3).play(*[after_meeting(finish)] * 3)
    assert [result == value for result in values] == [True, True, True], values


def test_node_0_keeps_the_store_for_one_that_reads_slowly_though_another_one_is_long_gone() -> None:
    value = bytes(40 << 20)

    def slow(nodes: Nodes) -> Any:
        nodes.store = SlowStore(nodes.store.world, nodes.pause)  # type: ignore[attr-defined]
        return nodes.finish(0, None)

    world = World(3)
    values = world.play(
        after_meeting(lambda nodes: nodes.finish(0, value)),
        after_meeting(lambda nodes: nodes.finish(0, None)),
        after_meeting(slow),
    )
    assert [result == value for result in values] == [True, True, True], values
    assert world.ended[1] + 2 * SILENT_S < world.ended[2] <= world.ended[0]


def test_node_0_goes_once_a_reader_has_died() -> None:
    world = World(killed={1: 2.0})

    def slow(nodes: Nodes) -> Any:
        nodes.store = SlowStore(nodes.store.world, nodes.pause)  # type: ignore[attr-defined]
        return nodes.finish(0, None)

    value, killed = world.play(after_meeting(lambda nodes: nodes.finish(0, bytes(5 << 20))), after_meeting(slow))
    assert len(value) == 5 << 20
    assert isinstance(killed, KilledError)
    assert world.ended[0] <= 2 + SILENT_S + 3 * BEAT_S


def test_a_signal_is_heard_between_two_pieces() -> None:
    world = World(told={1: 10.0})

    def time_goes_by(seconds: float) -> None:
        world.now += seconds

    def slow(nodes: Nodes) -> Any:
        nodes.store = SlowStore(world, time_goes_by)
        return nodes.finish(0, None)

    results = world.play(after_meeting(lambda nodes: nodes.finish(0, bytes(9 << 20))), after_meeting(slow))
    assert isinstance(results[1], ToldError)
    assert world.ended[1] < 20


# --- once more ---


def test_a_restart_sees_nothing_of_the_start_before() -> None:
    def script(nodes: Nodes) -> Any:
        meet(nodes, 0)
        nodes.fail(0)
        nodes.settle(0, verdict(nodes, 1.0 + nodes.node))
        said = nodes.meet(1, {"of": nodes.node, "again": True})
        assert said[1 - nodes.node] == {"of": 1 - nodes.node, "again": True}
        assert not nodes.look(1)
        assert run_ranks(nodes, 10, start=1)
        return nodes.finish(1, b"value" if nodes.node == 0 else None)

    assert World().play(script, script) == [b"value", b"value"]


def test_a_node_that_is_gone_at_a_restart_is_missed_before_the_time_to_meet_is_over() -> None:
    def script(nodes: Nodes) -> Any:
        meet(nodes, 0)
        nodes.fail(0)
        nodes.settle(0, None)
        if nodes.node == 1:
            return None
        return meet(nodes, 1)

    world = World(timeout_s=600)
    lost = world.play(script, script)[0]
    assert why(lost) == "lost node 1, not heard of for 30 s"
    assert world.ended[0] <= SILENT_S + 5


def test_a_verdict_that_says_that_it_was_the_last_start_says_so_everywhere() -> None:
    def failed(nodes: Nodes) -> Any:
        nodes.fail(0)
        return nodes.settle(0, verdict(nodes, 1.0, final=True) if nodes.node == 1 else None)

    assert [cause.final for cause in World().play(*[after_meeting(failed)] * 2)] == [True, True]
