"""What the machines of one job tell each other through its store: that they are there, that one failed, the value.

The process of the job on each node has a ``Nodes``. All waiting is bounded by signs of life: each node writes a beat,
and whoever is not heard of for a while is lost. Nothing here knows of processes, or of torch: a store is a dictionary
that all nodes share.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ._model import GpuPoolError

BEAT_S = 1.0
"""Between two signs of life."""

SILENT_S = 30.0
"""Without one, a node is lost."""

SILENT_AFTER_FAILURE_S = 5.0
"""The same, once a rank has failed: perhaps of that node's death, and nobody else can tell."""

_LONGEST_PIECE = 1 << 20
"""Bytes of one entry; torch's store closes the connection on one of more than 8 MiB."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


class Store(Protocol):
    """What of torch's store is used here. Each call may raise a RuntimeError: the connection is broken."""

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
    _beats: int = 0
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # of each other node: its beat, and when

    def meet(self, start: int, mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Block until all nodes have come to this start of the group; what each has said of itself, by node rank.

        Bounded by ``timeout_s``. Raises NodeError, too, where another one has this node's rank.
        """
        text = json.dumps(mine)
        there = self._ask(self.store.compare_set, _key(start, "here", self.node), "", text)
        if there.decode() != text:
            raise NodeError(f"met another machine with ddp.node_rank={self.node}: give each its own", final=True)
        missing = set(self._others)
        deadline = self.clock() + self.timeout_s
        for pause in _pauses():
            missing = {node for node in missing if not self._has(start, "here", node)}
            if not missing:
                break
            if self.clock() >= deadline:
                raise NodeError(f"waited {self.timeout_s:g} s for {_named(missing)} to join, in vain", final=True)
            self.pause(pause)
        self._heard = {node: (b"", self.clock()) for node in self._others}
        return {node: json.loads(self._get(start, "here", node)) for node in range(self.count)}

    def gather(self, start: int) -> None:
        """Block until the ranks of all nodes are started, and may begin; or until the start is failing."""
        self._set("", start, "started", self.node)
        keys = ((start, "started", node) for node in range(self.count))
        self._wait_for(keys, functools.partial(self.look, start))

    def look(self, start: int) -> bool:
        """Give a sign of life, and look for those of the others. To be called every ``BEAT_S``.

        True where this start of the group is failing, and is to be ended here, too.
        """
        self._beat()
        self._require_life(SILENT_S)
        return self._has(start, "failing")

    def fail(self, start: int) -> None:
        """Tell the others to end this start of the group; ``settle`` is to follow."""
        self._set("", start, "failing")

    def settle(self, start: int, mine: Verdict | None) -> Verdict | None:
        """What the group failed of, once its ranks are gone on all nodes: the earliest of what each has to say.

        ``mine``: None where nothing has failed here.
        """
        self._set(json.dumps(None if mine is None else asdict(mine)), start, "verdict", self.node)
        since = self.clock()
        self._heard = {node: (beat, max(at, since)) for node, (beat, at) in self._heard.items()}
        self._wait_for(((start, "verdict", node) for node in self._others), self._live_on)
        said = [json.loads(self._get(start, "verdict", node)) for node in range(self.count)]
        self._part(start)
        verdicts = [Verdict(**verdict) for verdict in said if verdict is not None]
        return min(verdicts, key=lambda verdict: verdict.at) if verdicts else None

    def give_up(self, start: int, why: str) -> None:
        """Tell the others that this node ends, and that they are to do so, without waiting for them."""
        self._set(json.dumps(asdict(Verdict(self.node, 0.0, why, final=True))), start, "verdict", self.node)
        self.fail(start)

    def finish(self, start: int, value: bytes | None) -> bytes | None:
        """Block until the ranks of all nodes have ended well; the value, which only node 0 has so far.

        None where one of the others has failed meanwhile. Node 0 keeps the store until all of them have the value.
        """
        failing = functools.partial(self.look, start)
        self._set("", start, "done", self.node)
        if not self._wait_for(((start, "done", node) for node in range(self.count)), failing):
            return None
        if value is None:
            if not self._wait_for([(start, "value", "pieces")], failing):
                return None
            count = int(self._get(start, "value", "pieces"))
            value = b"".join(self._get(start, "value", number) for number in range(count))
        else:
            pieces = [value[at : at + _LONGEST_PIECE] for at in range(0, len(value), _LONGEST_PIECE)]
            for number, piece in enumerate(pieces):
                self._set(piece, start, "value", number)
            self._set(str(len(pieces)), start, "value", "pieces")
        self._part(start)
        return value

    def _part(self, start: int) -> None:
        """Nothing is asked of the store any more; node 0 keeps it for the others, as long as they live."""
        self._set("", start, "over", self.node)
        if self.node == 0:
            try:
                self._wait_for(((start, "over", node) for node in self._others), self._live_on)
            except NodeError:
                pass  # what it had to say is known

    def _live_on(self) -> bool:
        self._beat()
        self._require_life(SILENT_AFTER_FAILURE_S)
        return False

    def _wait_for(self, keys: Iterable[tuple[object, ...]], stop: Callable[[], bool]) -> bool:
        """Block until all entries are there (True), or ``stop``, called every ``BEAT_S``, is true (False)."""
        missing, next_look = list(keys), self.clock()
        for pause in _pauses():
            missing = [key for key in missing if not self._has(*key)]
            if not missing:
                break
            if self.clock() >= next_look:
                next_look = self.clock() + BEAT_S
                if stop():
                    return False
            self.pause(pause)
        return True

    def _beat(self) -> None:
        self._beats += 1
        self._ask(self.store.set, f"gpu_pool/beat/{self.node}", str(self._beats))
        for node in self._others:
            key = f"gpu_pool/beat/{node}"
            if self._ask(self.store.check, [key]):
                beat = self._ask(self.store.get, key)
                if beat != self._heard[node][0]:
                    self._heard[node] = beat, self.clock()

    def _require_life(self, within_s: float) -> None:
        silent = {node for node, (_, at) in self._heard.items() if self.clock() - at > within_s}
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
        try:
            return question(*args)
        except RuntimeError as error:  # torch.distributed's DistError is one
            raise NodeError("lost node 0, which holds the store", final=True) from error


def _key(*what: object) -> str:
    return "/".join(map(str, ("gpu_pool", *what)))


def _named(nodes: set[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, sorted(nodes)))


def _pauses() -> Iterator[float]:
    """Ever longer: what comes soon is seen at once, and what does not costs little."""
    pause = _SHORTEST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)
