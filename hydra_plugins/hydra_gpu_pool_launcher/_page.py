"""A sweep as one page for a browser: its slots over time, its values, its results, what failed. Pure.

The page is whole in itself, and reaches for nothing outside. Timeline and table are plain HTML, so that it can be read
and printed where scripts do not run, as in a notebook's file browser; page.js adds what moves, and the plots. Whatever
comes from the app goes through ``escaped``, or into a block of JSON with no "<" in it, which the script shows as text;
should something slip through all the same, the page's Content-Security-Policy runs that one script alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._alike import alike, place_in
from ._excerpt import excerpt
from ._markup import WORDS, counted, escaped, grouped, moment, percent, plain, span, verbatim
from ._results import LOST, error_line, log_of, results, status
from ._seen import JobView, State
from ._sheet import Sheet
from ._timeline import Timeline
from ._view import View

_CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_JS = Path(__file__).with_name("page.js").read_text(encoding="utf-8")

_TAILS_BYTES = 300_000
_MOST_FAILURES = 30
_MOST_LINES = 40
_MOST_NAMED = 12


def page(
    view: View,
    tails: Mapping[int, str],
    now: float,
    *,
    name: str = "",
    over: bool = False,
    again: str | None = None,
) -> str:
    """The page, at this time. ``name``: what the sweep is called; ``over``: nothing runs, whatever the journal says.
    ``again``: the command that goes on with it, where something has not completed.

    ``tails``: of the jobs that ``to_be_told`` names, the last of what they printed, as it is in their logs. The page
    shows what of that tells why they failed, and links to the logs as from the sweep's directory. Of more than some
    thousands of jobs it shows what it can, and says so.
    """
    live = not (view.done or over)
    sheet = Sheet.of(results(view, over=not live))
    timeline = Timeline.of(view, now if live else view.at, live)
    data = {**sheet.data(), "states": list(WORDS.values()), "tries": timeline.data()}
    css = _CSS + sheet.css()
    parts = (
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(css)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escaped(name or 'sweep', 100)}</title>",
        f"<style>{css}</style></head><body>",
        _head(view, name or "sweep", now, live, again),
        "<main>",
        _facts(view, now, live),
        timeline.html(),
        sheet.values_html(),
        sheet.html(),
        _failures(view, tails, not live),
        '</main><div id="tip" role="status" hidden></div>',
        f'<script type="application/json" id="data">{_as_data(data)}</script>',
        f"<script>{_JS}</script></body></html>",
    )
    return "\n".join(part for part in parts if part)


def _as_data(data: dict[str, Any]) -> str:
    """JSON that no parser of HTML takes for markup."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(css: str) -> str:
    """Of the page itself: this style and this script, and nothing else, from nowhere."""
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (css, _JS))
    allowed = f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'"
    return f"{allowed}; base-uri 'none'; form-action 'none'"


def _head(view: View, title: str, now: float, live: bool, again: str | None) -> str:
    lost = 0 if live else _states(view, over=True)[LOST]
    if live:
        word, said = "running", f"written {moment(now)}, while the sweep runs; load it again for what is newer"
    elif lost:
        word, said = "cut short", f"last heard of {moment(view.at)}; what became of {counted(lost, 'job')} is not known"
    elif view.stopped is not None:
        word, said = "stopped", f"{moment(view.at)}: {escaped(view.stopped, 200)}"
    else:
        word, said = "finished", moment(view.at) if view.jobs else "no job so far"
    launch = view.launch
    where = f"on {escaped(launch.host, 60)}, " if launch is not None and launch.host else ""
    commands = f"<pre>{verbatim(shlex.join(launch.command))}</pre>" if launch is not None and launch.command else ""
    if again is not None:
        commands += f'<p class="note">to run only what has not completed:</p><pre>{verbatim(again)}</pre>'
    return (
        f'<header><h1>{escaped(title, 200)}</h1><p><b class="pill {word.replace(" ", "-")}">{word}</b> '
        f"<span>{where}{said}</span></p>{commands}</header>"
    )


def _states(view: View, over: bool) -> Counter[str]:
    return Counter(status(job, over) for job in view.jobs.values())


def _facts(view: View, now: float, live: bool) -> str:
    """What a glance should tell: how many jobs are where, how long it took, how busy the slots were."""
    counts, total, upto = _states(view, over=not live), len(view.jobs), now if live else view.at
    done = sum(counts[state.value] for state in State if state.over)
    more = f", {grouped(kept)} of them taken over from an earlier launch" if (kept := view.taken_over()) else ""
    facts = [("jobs", f"{grouped(done)} <small>of {counted(total, 'job')} ended{more}</small>")]
    if any(job.known_tries for job in view.jobs.values()):
        left = view.left_s(now) if live else None
        more = f" <small>about {span(left)} more</small>" if left else ""
        facts.append(("running for" if live else "took", span(view.took_s(upto)) + more))
    if (busy := view.busy(upto)) is not None:
        facts.append(("slots busy", f"{percent(busy)} <small>of {counted(len(view.slots()), 'slot')}</small>"))
    cells = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts)
    return f'<section class="facts"><dl>{cells}</dl>{_shares(counts)}</section>'


def _shares(counts: Counter[str]) -> str:
    """How many jobs are in each state, as a bar and in words."""
    total, at = counts.total(), 0.0
    legend, bars = [], []
    for state, word in WORDS.items():
        if counts[state]:
            share = 100 * counts[state] / total
            bars.append(f'<rect class="{word}" x="{at:.3f}%" width="{share:.3f}%"/>')
            text = f'<i class="{word}"></i><b>{grouped(counts[state])}</b> {word}'
            is_told = state in {State.FAILED.value, LOST}
            legend.append(f'<li><a href="#failures">{text}</a></li>' if is_told else f"<li>{text}</li>")
            at += share
    bar = f'<svg class="share" aria-hidden="true">{"".join(bars)}</svg>' if bars else ""
    return f'{bar}<ul class="legend">{"".join(legend)}</ul>'


def _alike(view: View, over: bool) -> list[list[JobView]]:
    """The jobs that failed, those together that failed in the same way; the largest group first."""
    return alike(job for job in view.in_order() if status(job, over) in {State.FAILED.value, LOST})


def to_be_told(view: View, *, over: bool = False) -> list[int]:
    """The jobs of whose logs the page shows the last lines: one of each way to fail."""
    return [jobs[0].job.num for jobs in _alike(view, over or view.done)[:_MOST_FAILURES]]


def _said(job: JobView, longest: int) -> str:
    return error_line(job.error_type, job.error_text, longest) or (
        "nothing is known of its end" if not job.state.over else "no reason is known"
    )


def _failures(view: View, tails: Mapping[int, str], over: bool) -> str:
    """Each way to fail: what was said, which jobs, where, and what one log says of it; none where no job failed."""
    groups = _alike(view, over)
    if not groups:
        return ""
    left, items = _TAILS_BYTES, []
    for nth, jobs in enumerate(groups[:_MOST_FAILURES]):
        told = excerpt(plain(tails.get(jobs[0].job.num, "")), jobs[0], _MOST_LINES)
        tail = _within(told.whole(), left // 2)
        left -= len(tail.encode())
        items.append(_failure(jobs, place_in(jobs, told.place), tail, unfolded=nth < 3))
    rest = sum(map(len, groups[_MOST_FAILURES:]))
    note = f'<p class="note">{counted(rest, "more job")} failed in other ways</p>' if rest else ""
    return f'<section id="failures"><h2>Failures</h2><ol class="failures">{"".join(items)}</ol>{note}</section>'


def _failure(jobs: Sequence[JobView], place: str, tail: str, unfolded: bool) -> str:
    first = jobs[0]
    links = ", ".join(f'<a href="#j{job.job.num}">{job.job.num}</a>' for job in jobs[:_MOST_NAMED])
    more = f" and {grouped(len(jobs) - _MOST_NAMED)} more" if len(jobs) > _MOST_NAMED else ""
    facts = [first.cause.value if first.cause else "lost", f"job{'s' if len(jobs) > 1 else ''} {links}{more}"]
    facts += [escaped(" ".join(first.job.overrides), 200)] if first.job.overrides else []
    facts += [escaped(place, 200)] if place else []
    path = log_of(first)
    link = f'<a href="{path}">{path}</a>'
    log = f'<p class="note">{f"its log is {link}" if path else "it was not started"}</p>'
    if tail:
        summary = f"<summary>from {link}</summary>"
        log = f'<details{" open" if unfolded else ""}>{summary}<pre tabindex="0">{tail}</pre></details>'
    what = escaped(_said(first, 400), 400)
    return f'<li><p><b>{what}</b></p><p class="note">{" · ".join(facts)}</p>{log}</li>'


def _within(told: Sequence[str], most: int) -> str:
    """As many of its last lines as fit into so many bytes of HTML."""
    lines = [html.escape(line).encode("utf-8", "replace").decode("utf-8") for line in told]
    while lines and sum(len(line.encode()) + 1 for line in lines) > most:
        lines.pop(0)
    return "\n".join(lines)
