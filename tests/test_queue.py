"""What waits: two lines, one order."""

from __future__ import annotations

from dataclasses import replace

from hydra_plugins.hydra_gpu_pool_launcher._model import Job
from hydra_plugins.hydra_gpu_pool_launcher._queue import Entry, Queue


def submitted(*nums: int) -> Queue:
    queue = Queue()
    queue.submit(Job(num, ()) for num in nums)
    return queue


def first(queue: Queue) -> Entry:
    assert queue.first is not None
    return queue.first


def taken(queue: Queue) -> Entry:
    entry = first(queue)
    queue.remove(entry)
    return entry


def numbers(entries: list[Entry]) -> list[int]:
    return [entry.job.num for entry in entries]


def test_what_comes_back_stands_before_all_that_was_submitted_after_it() -> None:
    queue = submitted(7, 3, 5)
    entries = [taken(queue) for _ in range(3)]
    for entry in (entries[1], entries[2], entries[0]):
        queue.put_back(entry)
    assert numbers([taken(queue) for _ in range(3)]) == [7, 3, 5]


def test_what_needs_whole_devices_stands_in_a_line_of_its_own() -> None:
    queue = submitted(1, 2)
    queue.put_back(replace(taken(queue), alone=True))
    assert first(queue).job.num == 2
    alone = queue.first_alone
    assert alone is not None
    assert alone.job.num == 1
    queue.remove(alone)
    assert queue.first_alone is None


def test_all_that_waits_is_taken_in_the_order_of_submission_whichever_line_it_stands_in() -> None:
    queue = submitted(4, 2, 3)
    _, second, third = (taken(queue) for _ in range(3))
    queue.put_back(replace(third, alone=True))
    queue.put_back(second)
    queue.submit([Job(9, ())])
    assert numbers(queue.take_all()) == [2, 3, 9]
    assert not queue


def test_a_job_is_taken_by_its_number_from_either_line_once() -> None:
    queue = submitted(4, 2)
    queue.put_back(replace(taken(queue), alone=True))
    found = [queue.take(num) for num in (4, 4, 2, 8)]
    assert [entry and entry.job.num for entry in found] == [4, None, 2, None]
    assert not queue
