"""The page's timeline: who was in which slot when, a bar per try, and how busy each GPU was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._markup import WORDS, cut, escaped, moment, percent
from ._results import LOST, gpu_of
from ._seen import JobView, TryView
from ._view import View

_MOST_BARS = 5000


@dataclass(frozen=True)
class _Bar:
    """One try in one slot, or several that are too short to tell apart. ``index``: of the first, among all tries."""

    start: float
    end: float
    state: str
    index: int
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """Who was in which slot when. ``begin`` and ``end``: of the axis, in seconds since the epoch."""

    view: View
    begin: float
    end: float
    live: bool
    each: tuple[tuple[JobView, TryView], ...]

    @classmethod
    def of(cls, view: View, upto: float, live: bool) -> Timeline:
        each = tuple(view.tries())
        begin = min((one.started for _, one in each), default=0.0)
        end = max((one.started + one.seconds(upto) for _, one in each), default=0.0)
        return cls(view, begin, max(end, begin + 1e-3), live, each)

    @property
    def length(self) -> float:
        return self.end - self.begin

    def _ended(self, one: TryView) -> float:
        return self.end if one.ended is None else max(one.ended, one.started)

    def _state(self, job: JobView, one: TryView) -> str:
        if one.state is not None:
            return one.state.value
        return job.state.value if self.live else LOST

    def data(self) -> list[list[Any]]:
        """For page.js, of each try: job, try, the state's place, when it started and how long it took, its slots."""
        places = {state: place for place, state in enumerate(WORDS)}
        return [
            [
                job.job.num,
                one.attempt,
                places[self._state(job, one)],
                round(one.started - self.begin, 1),
                round(one.seconds(self.end), 1),
                cut(",".join(one.slots), 60),
            ]
            for job, one in self.each
        ]

    def bars(self) -> dict[str, list[_Bar]]:
        """By slot, in the order of their starts."""
        slots: dict[str, list[_Bar]] = {slot: [] for slot in self.view.slots()}
        for index, (job, one) in enumerate(self.each):
            for slot in one.slots:
                slots[slot].append(_Bar(one.started, self._ended(one), self._state(job, one), index))
        for row in slots.values():
            row.sort(key=lambda bar: bar.start)
        if sum(map(len, slots.values())) > _MOST_BARS:
            least = self.length * len(slots) / _MOST_BARS
            slots = {slot: _merged(row, least) for slot, row in slots.items()}
        return slots

    def html(self) -> str:
        """The section; none where nothing has been started."""
        if not self.each:
            return ""
        gpus: dict[str, list[tuple[str, list[_Bar]]]] = {}
        for slot, row in self.bars().items():
            gpus.setdefault(gpu_of(slot), []).append((slot, row))
        groups = "".join(self._gpu(gpu, rows) for gpu, rows in gpus.items())
        many = " many" if sum(map(len, gpus.values())) > 24 else ""
        dense = " dense" if max(len(row) for rows in gpus.values() for _, row in rows) > 150 else ""
        marks = [(100 * at / self.length, _tick(at)) for at in _ticks(self.length)]
        ticks = "".join(
            f'<text x="{x:.2f}%" y="17" text-anchor="{"end" if x > 95 else "start"}">{text}</text>' for x, text in marks
        )
        grid = "".join(f'<line x1="{x:.2f}%" x2="{x:.2f}%" y2="100%"/>' for x, _ in marks)
        return (
            f'<section><h2>Timeline</h2><div class="timeline{many}{dense}" id="timeline">'
            f'<svg class="grid" aria-hidden="true">{grid}</svg>{groups}'
            f'<svg class="axis" aria-hidden="true">{ticks}</svg></div>'
            f'<p class="note">since {moment(self.begin)}<span class="scripted">; point at a bar, or walk along them'
            " with the arrow keys</span></p></section>"
        )

    def _gpu(self, gpu: str, rows: Sequence[tuple[str, list[_Bar]]]) -> str:
        ran = self.view.ran_s(self.begin, self.end) or self.length
        used = sum(min(ran, sum(bar.end - bar.start for bar in row)) for _, row in rows)
        busy = used / (ran * len(rows))
        name = "CPU" if gpu == "cpu" else f"GPU {gpu}" if gpu.isdigit() else gpu
        meter = f'<svg class="meter" aria-hidden="true"><rect width="{100 * busy:.1f}%"/></svg>'
        name = f'<b title="{escaped(gpu, 60)}">{escaped(name, 60)}</b>'
        label = f'<div class="gpu">{name}<span>{percent(busy)}</span>{meter}</div>'
        lanes = "".join(self._lane(slot, row) for slot, row in rows)
        return f'<div class="group">{label}<div class="lanes">{lanes}</div></div>'

    def _lane(self, slot: str, row: Sequence[_Bar]) -> str:
        bars = "".join(
            f'<rect class="{WORDS[bar.state]}" x="{100 * (bar.start - self.begin) / self.length:.3f}%"'
            f' width="{max(0.15, 100 * (bar.end - bar.start) / self.length):.3f}%" data-t="{bar.index}"'
            + (f' data-n="{bar.count}"/>' if bar.count > 1 else "/>")
            for bar in row
        )
        tries = sum(bar.count for bar in row)
        said = f"slot {escaped(slot, 60)}: {tries} {'try' if tries == 1 else 'tries'}"
        return f'<svg class="lane" role="group" aria-label="{said}">{bars}</svg>'


def _merged(row: Sequence[_Bar], least: float) -> list[_Bar]:
    """Neighbours of one state made one, up to this length in seconds."""
    merged: list[_Bar] = []
    for bar in row:
        last = merged[-1] if merged else None
        if last is not None and last.state == bar.state and bar.end - last.start < least:
            merged[-1] = _Bar(last.start, bar.end, bar.state, last.index, last.count + 1)
        else:
            merged.append(bar)
    return merged


_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def _ticks(length: float) -> list[float]:
    """Some four to six round times since the beginning."""
    step = next((step for step in _STEPS_S if length / step <= 6), 86400 * math.ceil(length / 6 / 86400))
    return [step * k for k in range(int(length / step) + 1)]


def _tick(at: float) -> str:
    if at == 0:
        return "0"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if at >= unit and at * 10 % unit == 0:
            return f"{at / unit:g}\u202f{name}"
    return f"{at:g}\u202fs"
