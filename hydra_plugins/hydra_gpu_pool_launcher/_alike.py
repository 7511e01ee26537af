"""Failed jobs, those together that have failed in the same way. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ._errors import JOB_ERRORS
from ._results import error_line
from ._seen import JobView

_ADDRESS = re.compile(r"0[xX][0-9a-fA-F]+")
_DIFFERS = re.compile(rf"{_ADDRESS.pattern}|\d+(\.\d+)?([eE][+-]?\d+)?(\s?[KMGT]i?B\b)?")
"""From job to job, where the same has happened: addresses, sizes, steps."""

_LONGEST = 200


def alike(failed: Iterable[JobView]) -> list[list[JobView]]:
    """Groups of one cause, and one text but for the numbers in it: the largest first, each as the jobs came.

    In what gpu_pool itself says of an end, a number is that of an exit code, and not to be taken for another one.
    """
    groups: dict[tuple[str, str], list[JobView]] = {}
    for job in failed:
        differs = _ADDRESS if job.error_type in JOB_ERRORS else _DIFFERS
        text = differs.sub("0", error_line(job.error_type, job.error_text, _LONGEST))
        groups.setdefault((job.cause.value if job.cause else "", text), []).append(job)
    return sorted(groups.values(), key=len, reverse=True)


def place_in(group: Sequence[JobView], place: str | None) -> str:
    """The place of its first job, whose log is the one that is read; "" for none. Others may have failed elsewhere."""
    if place is None:
        return ""
    return place if len(group) == 1 else f"job {group[0].job.num}: {place}"


def runs(nums: Iterable[int]) -> list[str]:
    """Numbers that rise, those that follow on each other as one: "3", "7", "9 to 12"."""
    spans: list[list[int]] = []
    for num in nums:
        if spans and num == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], num]
        else:
            spans.append([num])
    return [" to ".join(map(str, span)) if span[-1] - span[0] != 1 else f"{span[0]}, {span[1]}" for span in spans]


def named(jobs: Iterable[JobView], most: int) -> str:
    """The numbers of jobs, for one line: "job 3", "jobs 3, 7, 9 to 12"; of more spans than that the first."""
    spans = runs(job.job.num for job in jobs)
    text = ", ".join(spans[:most]) + (", …" if len(spans) > most else "")
    return f"job{'s' if len(spans) > 1 or not spans[0].isdigit() else ''} {text}"
