"""What the machines of one job tell each other through its store: that they are there, that one failed, the value.

The process of the job on each node has a ``Nodes``. All waiting is bounded by signs of life: each node writes a beat,
and whoever is not heard of for a while is lost. Nothing here knows of processes, or of torch: a store is a dictionary
that all nodes share.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ._errors import GpuPoolError

BEAT_S = 1.0
"""Between two signs of life."""

SILENT_S = 30.0
"""Without one, a node is lost."""

SILENT_AFTER_FAILURE_S = 5.0
"""The same, once a rank has failed: perhaps of that node's death, and nobody else can tell."""

_PARTING_S = 2.0
"""For which node 0, when it gives up, keeps the store for the others, that they read why."""

_LONGEST_WHY = 10_000
"""Characters of a verdict; an exception may say more than an entry of the store takes."""

_LONGEST_PIECE = 1 << 20
"""Bytes of one entry; torch's store closes the connection on one of more than 8 MiB."""

_Key = tuple[int, str, int]
_Stop = Callable[[Sequence[_Key]], bool]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


class Store(Protocol):
    """What of torch's store is used here. Each call may raise a RuntimeError: the connection is broken.

    It does so, too, where no answer comes: ``SILENT_S`` is the most that a call may take.
    """

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write an entry."""

    def get(self, key: str, /) -> bytes:
        """Read one that is there."""

    def check(self, keys: list[str], /) -> bool:
        """True where all of them are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write an entry where none is there, ``expected`` being ""; what is there then."""


class NodeError(GpuPoolError):
    """Another node, or the way to it, ended this start of the group. ``why``: a clause; ``final``: it was the last."""

    def __init__(self, why: str, final: bool) -> None:
        super().__init__(why, final)
        self.why = why
        self.final = final


@dataclass(frozen=True)
class Verdict:
    """Why a start of the group has failed. ``at``: when, in seconds since the epoch; ``final``: it was the last one."""

    node: int
    at: float
    why: str
    final: bool

    @property
    def elsewhere(self) -> str:
        """The clause for the other nodes."""
        return f"was ended by node {self.node}, where {self.why}"


UNSAID = "was ended by another node, which does not say why"


@dataclass
class Nodes:
    """The nodes of one job, as seen from the one of rank ``node``; node 0 holds the store.

    ``pause``: blocks for so many seconds; whatever it raises ends the call that it is made in. Every method raises
    NodeError where another node, or the store, is lost.
    """

    store: Store
    node: int
    count: int
    timeout_s: float
    pause: Callable[[float], object]
    clock: Callable[[], float] = time.monotonic
    _broken: bool = False
    _beats: int = 0
    _beaten: float = -math.inf
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # of each other node: its beat, and when

    def meet(self, start: int, mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Block until all nodes have come to this start of the group; what each has said of itself, by node rank.

        Bounded by ``timeout_s``. Raises NodeError, too, where another one has this node's rank.
        """
        text = json.dumps(mine)
        there = self._ask(self.store.compare_set, _key(start, "here", self.node), "", text)
        if there.decode() != text:
            raise NodeError(f"met another machine with ddp.node_rank={self.node}: give each its own", final=True)
        here = [(start, "here", node) for node in self._others]
        missing = self._wait_for(here, lambda _: self.look(start), self.clock() + self.timeout_s)
        if missing and self._has(start, "failing"):
            raise self._given_up(start)
        if missing:
            why = f"waited {self.timeout_s:g} s for {_named([key[-1] for key in missing])} to join, in vain"
            self.give_up(start, f"it {why}")
            raise NodeError(why, final=True)
        self._listen_anew(self._others)
        return {node: json.loads(self._get(start, "here", node)) for node in range(self.count)}

    def look(self, start: int) -> bool:
        """Give a sign of life, and look for those of the others. To be called every ``BEAT_S``.

        Who was never heard of is not missed: ``meet`` waits for it. True where this start of the group is failing, and
        is to be ended here, too.
        """
        self._beat()
        if self._has(start, "failing"):
            return True  # who has had its say may be gone
        self._require_life(list(self._heard), SILENT_S)
        return False

    def fail(self, start: int) -> None:
        """Tell the others to end this start of the group; ``settle`` is to follow."""
        self._set("", start, "failing")

    def settle(self, start: int, mine: Verdict | None) -> Verdict | None:
        """What the group failed of, once its ranks are gone on all nodes: the earliest of what each has to say.

        ``mine``: None where nothing has failed here.
        """
        self._say(start, mine)
        self._listen_anew(self._others)
        live_on = functools.partial(self._live_on, within_s=SILENT_AFTER_FAILURE_S)
        self._wait_for([(start, "verdict", node) for node in self._others], live_on)
        verdicts = [verdict for node in range(self.count) if (verdict := self._said(start, node)) is not None]
        self._part(start, SILENT_AFTER_FAILURE_S)
        return min(verdicts, key=lambda verdict: verdict.at) if verdicts else None

    def give_up(self, start: int, why: str) -> None:
        """Tell the others that this node ends, and that they are to do so; node 0 waits for them, but not for long.

        Raises no NodeError: it is over in any case.
        """
        with contextlib.suppress(NodeError):
            self._say(start, Verdict(self.node, 0.0, why, final=True))
            self.fail(start)
            self._set("", start, "over", self.node)
            if self.node == 0:
                over = [(start, "over", node) for node in self._others if self._has(start, "here", node)]
                self._wait_for(over, lambda _: False, self.clock() + _PARTING_S)

    def finish(self, start: int, value: bytes | None) -> bytes | None:
        """Block until the ranks of all nodes have ended well; the value, which only node 0 has so far.

        None where one of the others has failed meanwhile. Node 0 keeps the store until all of them have the value.
        """

        def failing(_: object) -> bool:
            return self.look(start)

        self._set("", start, "done", self.node)
        if self._wait_for([(start, "done", node) for node in range(self.count)], failing):
            return None
        if value is None:
            if self._wait_for([(start, "pieces", 0)], failing):
                return None
            value = b"".join(self._pieces(start, int(self._get(start, "pieces", 0))))
        else:
            count = 0
            for count, at in enumerate(range(0, len(value), _LONGEST_PIECE), start=1):
                self._set(value[at : at + _LONGEST_PIECE], start, "value", count - 1)
                self._breathe()
            self._set(str(count), start, "pieces", 0)
        self._part(start, SILENT_S)
        return value

    def _pieces(self, start: int, count: int) -> Iterator[bytes]:
        for number in range(count):
            yield self._get(start, "value", number)
            self._breathe()

    def _breathe(self) -> None:
        """Between two pieces: a large value, over a slow line, takes longer than a node may be silent."""
        self.pause(0)
        if self.clock() - self._beaten >= BEAT_S:
            self._beat()

    def _say(self, start: int, verdict: Verdict | None) -> None:
        fields = None if verdict is None else {**asdict(verdict), "why": verdict.why[:_LONGEST_WHY]}
        self._set(json.dumps(fields), start, "verdict", self.node)

    def _said(self, start: int, node: int) -> Verdict | None:
        fields = json.loads(self._get(start, "verdict", node))
        return None if fields is None else Verdict(**fields)

    def _given_up(self, start: int) -> NodeError:
        """What another one, that has not waited for all to come, has left."""
        said = [self._said(start, node) for node in self._others if self._has(start, "verdict", node)]
        self._part(start, SILENT_AFTER_FAILURE_S)
        return NodeError(next((verdict.elsewhere for verdict in said if verdict), UNSAID), final=True)

    def _part(self, start: int, within_s: float) -> None:
        """Nothing is asked of the store any more; node 0 keeps it for each of the others, as long as that one lives."""
        self._set("", start, "over", self.node)
        if self.node == 0:
            for node in self._others:
                if self._has(start, "here", node):
                    self._listen_anew([node])
                    with contextlib.suppress(NodeError):  # what it had to say is known
                        self._wait_for([(start, "over", node)], functools.partial(self._live_on, within_s=within_s))

    def _live_on(self, missing: Sequence[_Key], within_s: float) -> bool:
        """Of those whose entries are missing: who has left what it had to say may be gone."""
        self._beat()
        self._require_life([key[-1] for key in missing], within_s)
        return False

    def _wait_for(self, keys: Sequence[_Key], stop: _Stop, deadline: float = math.inf) -> Sequence[_Key]:
        """Block until all entries are there, or ``stop``, called every ``BEAT_S``, is true, or until the deadline.

        Those that are still missing, which ``stop`` is told, too.
        """
        missing, next_look = keys, self.clock()
        for pause in _pauses():
            missing = [key for key in missing if not self._has(*key)]
            if not missing or self.clock() >= deadline:
                break
            if self.clock() >= next_look:
                next_look = self.clock() + BEAT_S
                if stop(missing):
                    break
            self.pause(min(pause, max(0.0, deadline - self.clock())))
        return missing

    def _beat(self) -> None:
        self._beats += 1
        self._beaten = self.clock()
        self._ask(self.store.set, f"gpu_pool/beat/{self.node}", str(self._beats))
        for node in self._others:
            key = f"gpu_pool/beat/{node}"
            if self._ask(self.store.check, [key]):
                beat = self._ask(self.store.get, key)
                if node not in self._heard or beat != self._heard[node][0]:
                    self._heard[node] = beat, self.clock()

    def _listen_anew(self, nodes: Sequence[int]) -> None:
        """Their silence counts from now on."""
        for node in nodes:
            self._heard[node] = self._heard.get(node, (b"", 0.0))[0], self.clock()

    def _require_life(self, nodes: Sequence[int], within_s: float) -> None:
        silent = [node for node in nodes if self.clock() - self._heard[node][1] > within_s]
        if silent:
            raise NodeError(f"lost {_named(silent)}, not heard of for {within_s:g} s", final=True)

    @property
    def _others(self) -> list[int]:
        return [node for node in range(self.count) if node != self.node]

    def _has(self, *key: object) -> bool:
        return bool(self._ask(self.store.check, [_key(*key)]))

    def _get(self, *key: object) -> bytes:
        found: bytes = self._ask(self.store.get, _key(*key))
        return found

    def _set(self, value: str | bytes, *key: object) -> None:
        self._ask(self.store.set, _key(*key), value)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """The answer. After one that did not come nothing is asked: it may come yet, and be taken for another one's."""
        try:
            if self._broken:
                raise ConnectionError("an earlier question was not answered")
            return question(*args)
        except (RuntimeError, OSError) as error:  # torch.distributed's DistError is the first
            self._broken = True
            raise NodeError("lost node 0, which holds the store", final=True) from error


def _key(*what: object) -> str:
    return "/".join(map(str, ("gpu_pool", *what)))


def _named(nodes: Sequence[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))


def _pauses() -> Iterator[float]:
    """Ever longer: what comes soon is seen at once, and what does not costs little."""
    pause = _SHORTEST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)
