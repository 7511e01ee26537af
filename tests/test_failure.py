"""What a group of ranks failed of: the first failure, not the ones that follow from it."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import pytest

from hydra_plugins.hydra_gpu_pool_launcher import JobCancelledError, JobCrashedError, JobError
from hydra_plugins.hydra_gpu_pool_launcher._failure import End, Failure, Said, describe, first_failure
from hydra_plugins.hydra_gpu_pool_launcher._model import Exit, Job, Report, Status

JOB = Job(3, ("lr=1",))


def exit_of(code: int | None = None, signum: int | None = None) -> Exit:
    return Exit(code, signum, cpu_s=0.1, peak_mb=1.0)


def raised(at: float, error: Exception, *told: int, **report: Any) -> Said:
    text = {"error_type": type(error).__name__, "error_text": str(error), "traceback": f"Traceback of {error}"}
    return Said(at, Report(Status.FAILED, value=None, sha256="", **{**text, **report}), pickle.dumps(error), told)


def returned(at: float, *told: int) -> Said:
    return Said(at, Report(Status.COMPLETED, None, None, 1, ""), pickle.dumps(1), told)


def dead(rank: int, seen: float, signum: int = signal.SIGKILL, **how: Any) -> End:
    return End(rank, seen, exit_of(signum=signum), None, **how)


def over(rank: int, seen: float, said: Said, **how: Any) -> End:
    return End(rank, seen, exit_of(0), said, **how)


def failure(*ends: End, forwarded: tuple[int, ...] = ()) -> Failure:
    found = first_failure(JOB, ends, forwarded)
    assert found is not None
    return found


def test_a_group_whose_ranks_all_end_well_has_not_failed() -> None:
    assert first_failure(JOB, [over(0, 2.0, returned(1.0)), over(1, 1.0, returned(1.0))]) is None


def test_the_earliest_exception_by_the_ranks_own_clocks_is_the_one_whichever_is_seen_first() -> None:
    first, then = ValueError("the cause"), RuntimeError("connection closed by peer")
    found = failure(over(0, 5.0, raised(4.0, then)), over(1, 6.0, raised(3.9, first)))
    assert (found.rank, repr(found.error)) == (1, "ValueError('the cause')")
    assert found.elsewhere.place == "rank 1"
    assert "Traceback of the cause" in (found.elsewhere.traceback or "")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_silent_death_is_the_cause_of_errors_just_before_it_is_seen(signum: int) -> None:
    found = failure(over(0, 1.2, raised(1.0, RuntimeError("closed by peer"))), dead(1, 1.1, signum))
    assert found.rank == 1
    assert isinstance(found.error, JobCrashedError)
    assert f"lost its rank 1, which was ended by {signal.Signals(signum).name}" in str(found.error)
    assert found.elsewhere.crashed


def test_an_error_long_before_a_silent_death_is_its_cause() -> None:
    assert failure(over(0, 9.0, raised(1.0, ValueError("x"))), dead(1, 9.5)).rank == 0


def test_an_abort_follows_from_an_error_just_before_it() -> None:
    assert failure(over(0, 1.2, raised(1.0, ValueError("x"))), dead(1, 1.1, signal.SIGABRT)).rank == 0


LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4")


def test_a_rank_that_misses_another_one_failed_of_what_that_one_says_a_moment_later() -> None:
    """It has left its group on the way out: the other's error is there before its own exception is."""
    found = failure(over(0, 1.0, raised(1.0, LOST)), over(1, 1.5, raised(1.4, ValueError("x"))))
    assert (found.rank, repr(found.error)) == (1, "ValueError('x')")
    assert failure(over(0, 1.0, raised(1.0, LOST)), dead(1, 1.1, signal.SIGABRT)).rank == 1
    assert failure(over(0, 1.0, raised(1.0, LOST)), over(1, 9.0, raised(9.0, ValueError("x")))).rank == 0


def test_a_rank_that_was_told_to_end_has_no_other_ones_word_to_wait_for() -> None:
    assert not over(0, 1.0, raised(1.0, LOST, signal.SIGTERM)).misses_another


@pytest.mark.parametrize(
    ("kind", "text", "misses"),
    [
        ("RuntimeError", "[pair.cc:537] Read error [127.0.0.1]:4: Connection reset by peer", True),
        ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error", True),
        ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1.", True),
        ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("RuntimeError", "shape '[2]' is invalid for input of size 3", False),
        ("BrokenPipeError", "[Errno 32] Broken pipe", False),
    ],
)
def test_what_the_backends_say_of_a_lost_rank_is_known(kind: str, text: str, misses: bool) -> None:
    said = raised(1.0, RuntimeError(text), error_type=kind)
    assert over(0, 1.0, said).misses_another is misses


def test_what_was_stopped_is_no_failure_however_it_ends() -> None:
    ends = [over(0, 1.0, raised(1.0, ValueError("x"))), dead(1, 1.1, signal.SIGTERM, stopped=True)]
    assert failure(*ends, dead(2, 1.0, signal.SIGKILL, stopped=True)).rank == 0
    assert failure(*ends, over(2, 1.5, returned(1.4, signal.SIGTERM), stopped=True)).rank == 0
    assert first_failure(JOB, [over(2, 1.5, returned(1.4, signal.SIGTERM), stopped=True)]) is None


def test_an_end_without_a_result_is_a_crash_whatever_the_exit_code() -> None:
    found = failure(End(1, 1.0, exit_of(0), None))
    assert str(found.error) == "job 3 (lr=1) lost its rank 1, which ended with exit code 0 and without a result"


def test_a_rank_that_cannot_be_killed_is_said_to_be_so() -> None:
    assert "which did not die within 10 s of SIGKILL" in str(failure(End(1, 1.0, None, None)).error)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_rank_that_is_ended_by_hand_cancels_the_job_for_good(signum: signal.Signals) -> None:
    found = failure(dead(1, 1.0, signum))
    assert isinstance(found.error, JobCancelledError)
    assert str(found.error) == f"job 3 (lr=1) was cancelled: {signum.name} was sent to its rank 1"
    assert found.final


def test_so_does_one_that_catches_the_signal_and_ends_as_it_likes() -> None:
    for said in (returned(1.0, signal.SIGTERM), raised(1.0, KeyError("x"), signal.SIGTERM)):
        assert isinstance(failure(over(1, 1.1, said)).error, JobCancelledError)


def test_a_signal_to_the_jobs_process_is_not_said_to_have_been_sent_to_a_rank() -> None:
    found = failure(dead(0, 1.0, signal.SIGTERM), forwarded=(signal.SIGTERM,))
    assert str(found.error) == "job 3 (lr=1) was cancelled: SIGTERM was sent to its process"


def test_what_only_the_rank_can_know_of_its_error_goes_along() -> None:
    assert failure(over(1, 1.0, raised(1.0, ValueError("x"), out_of_memory=True))).elsewhere.out_of_memory


def test_an_exception_that_cannot_be_loaded_here_is_told_of() -> None:
    said = raised(1.0, ValueError("x"))
    broken = Said(said.at, said.report, b"not a pickle")
    found = failure(over(1, 1.0, broken))
    assert isinstance(found.error, JobError)
    assert str(found.error) == "job 3 (lr=1) raised ValueError: x"


def test_a_failure_is_described_with_whose_it_was() -> None:
    assert describe(failure(over(1, 1.0, raised(1.0, ValueError("x"))))) == "rank 1 raised ValueError: x"
    assert describe(failure(dead(1, 1.0, signal.SIGSEGV))) == "the group lost its rank 1, which was ended by SIGSEGV"
