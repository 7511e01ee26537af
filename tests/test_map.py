"""GpuPool.map: one outcome per call, in order, whatever the call does."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, outcome, outcomes

from hydra_plugins.hydra_gpu_pool_launcher import (
    ConfigurationError,
    GpuPool,
    JobCancelledError,
    JobCrashedError,
    JobError,
    Status,
    _returns,
)


def test_outcomes_come_in_the_order_of_the_calls_not_of_their_ends(tmp_path: Path) -> None:
    read, write = os.pipe()

    def job(x: int) -> int:
        if x == 0:
            os.read(read, 1)  # ends last: after job 2, on the other slot
        if x == 2:
            os.write(write, b"x")
        return x * x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)))
    assert [(o.status, o.value) for o in results] == [(Status.COMPLETED, x * x) for x in range(3)]
    os.close(read)
    os.close(write)


def test_no_calls_are_no_outcomes(tmp_path: Path) -> None:
    assert outcomes(tmp_path, print) == []


def test_neither_function_nor_arguments_are_pickled(tmp_path: Path) -> None:
    lock = threading.Lock()
    assert outcome(tmp_path, lambda lock, inner: (inner(), lock.locked()), lock=lock, inner=lambda: 7).value == (
        7,
        False,
    )


def test_an_exception_is_passed_on_as_it_is_with_its_traceback_as_text(tmp_path: Path) -> None:
    def the_culprit() -> None:
        raise KeyError("missing", 3)

    result = outcome(tmp_path, the_culprit)
    assert result.status is Status.FAILED
    assert type(result.error) is KeyError
    assert result.error.args == ("missing", 3)
    assert "in the_culprit" in str(result.error.__cause__)
    assert "_job.py" not in str(result.error.__cause__)


class OtherArgumentsError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> Any:
    raise error


def local_error() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("never to be found")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: raise_(OtherArgumentsError(1, 2)), "OtherArgumentsError: 1 and 2"),
        (local_error, "LocalError: never to be found"),
        (lambda: raise_(ValueError(threading.Lock())), "ValueError: <unlocked _thread.lock"),
    ],
)
def test_an_exception_that_cannot_travel_is_told_by_type_text_and_traceback(
    tmp_path: Path, function: Any, text: str
) -> None:
    result = outcome(tmp_path, function)
    assert result.status is Status.FAILED
    assert type(result.error) is JobError
    assert str(result.error).startswith("job 0 raised ")
    assert text in str(result.error)
    assert text in str(result.error.__cause__)


def test_an_exception_without_a_text_is_still_an_outcome(tmp_path: Path) -> None:
    result = outcome(tmp_path, lambda: raise_(UnprintableError()))
    assert type(result.error) is UnprintableError


class Unloadable:
    """Refuses to be loaded anywhere but in the process that made it, as a CUDA tensor would in main."""

    def __init__(self) -> None:
        self.maker = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["maker"] != os.getpid():
            raise RuntimeError("not here")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: lambda: 1, "job 0 returned a value of type function that cannot be sent to the main process"),
        (threading.Lock, "job 0 returned a value of type _thread.lock that cannot be sent"),
        (Unloadable, "job 0 returned what the main process cannot load (RuntimeError: not here)"),
    ],
)
def test_a_value_that_cannot_travel_is_a_failure_that_says_so(tmp_path: Path, function: Any, text: str) -> None:
    results = outcomes(tmp_path, lambda x: function() if x else 5, {"x": 0}, {"x": 1})
    assert results[0].value == 5
    assert results[1].status is Status.FAILED
    assert type(results[1].error) is JobError
    assert text.replace("job 0", "job 1 (x=1)") in str(results[1].error)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class EvilError(Exception):
    @property
    def __notes__(self) -> Any:
        raise RuntimeError("no notes")

    def __str__(self) -> str:
        raise SystemExit(3)

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class UnloadableExit:
    def __init__(self) -> None:
        self.maker = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["maker"] != os.getpid():
            sys.exit("in main")


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (lambda: raise_(FrozenError(3)), JobError, "FrozenError: 3"),  # cannot be unpickled, nor given a traceback
        (lambda: raise_(EvilError()), JobError, "exception of type EvilError"),
        (UnloadableExit, JobError, "the main process cannot load (SystemExit: in main)"),
    ],
)
def test_objects_that_strike_back_when_looked_at_fail_their_own_job_only(
    tmp_path: Path, function: Any, kind: Any, text: str
) -> None:
    results = outcomes(tmp_path, lambda x: function() if x else 5, {"x": 0}, {"x": 1}, {"x": 0})
    assert [o.value for o in results] == [5, None, 5]
    assert type(results[1].error) is kind
    assert text in str(results[1].error)


def test_a_fork_that_comes_back_from_the_task_function_does_not_speak_for_the_job(tmp_path: Path) -> None:
    def job(x: int) -> int:
        for _ in range(5):
            if os.fork() == 0:
                sys.exit(0)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        if x == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    results = outcomes(tmp_path, job, *({"x": x} for x in range(3)))
    assert [o.value for o in results] == [0, None, 2]
    assert "ended by SIGKILL" in str(results[1].error)


def test_keyword_arguments_may_have_any_name(tmp_path: Path) -> None:
    names = {"job": 1, "function": 2, "self": 3, "error": 4}
    assert outcomes(tmp_path, lambda **kwargs: kwargs, names)[0].value == names


def reduce_lock(_: Any) -> Any:
    return str, ("a lock",)


def test_what_is_registered_with_copyreg_in_the_task_counts(tmp_path: Path) -> None:
    def job() -> Any:
        copyreg.pickle(type(threading.Lock()), reduce_lock)
        return threading.Lock()

    assert outcome(tmp_path, job).value == "a lock"


@pytest.mark.parametrize(
    ("function", "calls", "sentence"),
    [
        (None, [{}], "function=null: expected something that can be called."),
        (print, {"x": 1}, "kwargs_list={'x': 1}: expected a list with a dict for each call."),
        (print, 3, "kwargs_list=3: expected a list with a dict for each call."),
        (print, [{}, 3], "kwargs_list[1]=3: expected a dict of keyword arguments."),
        (print, [{1: 2}], "kwargs_list[0]={1: 2}: expected a dict of keyword arguments."),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_sentence(
    tmp_path: Path, function: Any, calls: Any, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        GpuPool(dir=tmp_path, cpu_slots=1).map(function, calls)
    assert str(refusal.value) == sentence


def test_a_status_is_equal_to_its_name(tmp_path: Path) -> None:
    assert outcome(tmp_path, lambda: 1).status == "COMPLETED"


def test_plain_python_sees_the_lines_too(run_app: RunApp) -> None:
    done = run_app(
        "from hydra_plugins.hydra_gpu_pool_launcher import GpuPool\nGpuPool(cpu_slots=1, gpus=[]).map(abs, [{}])"
    )
    lines = done.stderr.splitlines()
    assert lines[0] == "gpu_pool: 1 job, 1 at once, on CPU slots"
    assert "job 0 FAILED: TypeError" in done.stderr
    assert any(line.startswith("1 FAILED in 0:00:0") for line in lines)


def test_large_values_come_back_whole(tmp_path: Path) -> None:
    value = outcome(tmp_path, lambda: os.urandom(1) * 50_000_000).value
    assert len(value) == 50_000_000


@pytest.mark.parametrize("code", [None, 0])
def test_sys_exit_without_an_error_code_is_a_normal_end(tmp_path: Path, code: int | None) -> None:
    result = outcome(tmp_path, functools.partial(sys.exit, code))
    assert (result.status, result.value, result.error) == (Status.COMPLETED, None, None)


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (lambda: sys.exit(3), JobCrashedError, "called sys.exit(3)"),
        (lambda: sys.exit("no data"), JobCrashedError, "called sys.exit('no data')"),
        (lambda: os._exit(0), JobCrashedError, "ended with exit code 0 and without a result"),
        (lambda: os._exit(4), JobCrashedError, "ended with exit code 4"),
        (lambda: raise_(KeyboardInterrupt()), JobError, "raised KeyboardInterrupt"),
        (lambda: raise_(GeneratorExit()), JobError, "raised GeneratorExit"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            JobCrashedError,
            "ended by SIGKILL; perhaps the machine ran out",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), JobCrashedError, "ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), JobCrashedError, "ended by SIGBUS; perhaps the shared memory"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3), JobCrashedError, f"ended by signal {signal.SIGRTMIN + 3}"),
        (lambda: os.killpg(0, signal.SIGKILL), JobCrashedError, "ended by SIGKILL"),
        (os.abort, JobCrashedError, "ended by SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), JobCancelledError, "SIGTERM was sent to its process"),
    ],
)
def test_whatever_ends_a_job_harms_no_other_and_is_named(tmp_path: Path, function: Any, kind: Any, text: str) -> None:
    results = outcomes(tmp_path, lambda x: function() if x == 1 else x, *({"x": x} for x in range(4)))
    assert [o.value for o in results] == [0, None, 2, 3]
    assert [o.status is Status.COMPLETED for o in results] == [True, False, True, True]
    assert type(results[1].error) is kind
    assert text in str(results[1].error)
    assert "job 1 (x=1)" in str(results[1].error)


def test_every_error_of_a_job_pickles(tmp_path: Path) -> None:
    error = outcome(tmp_path, lambda: os._exit(4)).error
    assert isinstance(error, JobCrashedError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.job, again.overrides, again.why) == (
        JobCrashedError,
        str(error),
        error.job,
        error.overrides,
        error.why,
    )


@pytest.mark.parametrize("bad", [{"per_gpu": 0}, {"gpus": "all"}, {"per_gpus": 2}])
def test_bad_arguments_are_refused_by_name(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{next(iter(bad))}\b"):
        GpuPool(dir=tmp_path, **bad)


def test_a_second_map_in_one_directory_keeps_the_files_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pool = GpuPool(dir=tmp_path, cpu_slots=1)
    assert [o.value for o in pool.map(print, [{"end": "first\n"}])] == [None]
    assert Path(pool.map(print, [{"end": "second\n"}])[0].log).read_text() == "second\n"
    assert (tmp_path / ".gpu_pool.1/jobs/0/output.log").read_text() == "first\n"
    assert caplog.messages.count(f"the files of the map before are now in {tmp_path}/.gpu_pool.1") == 1


def test_the_logs_of_all_maps_outlive_a_pool_without_a_directory() -> None:
    pool = GpuPool(cpu_slots=1)
    logs = [pool.map(print, [{"end": text}])[0].log for text in ("kept", "too")]
    del pool
    gc.collect()
    assert [Path(log).read_text() for log in logs] == ["kept", "too"]


def test_a_pool_in_a_job_of_a_pool_works(tmp_path: Path) -> None:
    def job() -> list[Any]:
        return [o.value for o in outcomes(tmp_path / "inner", lambda x: -x, {"x": 1}, {"x": 2})]

    assert outcome(tmp_path / "outer", job).value == [-1, -2]


def test_two_pools_in_two_threads_do_not_meet(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}

    def use(name: str) -> None:
        found[name] = [o.value for o in outcomes(tmp_path / name, lambda x: (name, x), *({"x": x} for x in range(6)))]

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [(name, x) for x in range(6)] for name in ("a", "b")}


def test_a_value_that_json_cannot_say_comes_back_all_the_same(tmp_path: Path) -> None:
    def job(kind: str) -> Any:
        circle: list[Any] = [kind]
        circle.append(circle)
        return {"circle": circle, "huge": 10**5000, "bytes": b"x", "nested": {1: (2, [{3}])}}[kind]

    results = outcomes(tmp_path, job, *({"kind": kind} for kind in ("circle", "huge", "bytes", "nested")))
    assert [o.status for o in results] == [Status.COMPLETED] * 4
    assert results[0].value[1] is results[0].value
    assert [o.value for o in results[1:]] == [10**5000, b"x", {1: (2, [{3}])}]


def test_a_directory_that_cannot_be_had_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"The sweep's files cannot be written to"):
        outcomes(tmp_path / "file", print, {})
    (tmp_path / ".gpu_pool").mkdir()
    (tmp_path / ".gpu_pool").chmod(0o775)
    with pytest.raises(ConfigurationError, match=r"others can write it"):
        outcomes(tmp_path, print, {})


def test_what_is_left_of_a_sweep_without_a_journal_is_not_taken_for_a_result(tmp_path: Path) -> None:
    outcome(tmp_path, lambda: "old")
    (tmp_path / ".gpu_pool/journal.jsonl").unlink()
    assert "ended with exit code 3" in str(outcome(tmp_path, lambda: os._exit(3)).error)


def test_a_ring_of_causes_ends(tmp_path: Path) -> None:
    def job() -> None:
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    assert str(outcome(tmp_path, job).error) == "first"


def test_large_nested_values_do_not_swell_the_journal(tmp_path: Path) -> None:
    result = outcome(tmp_path, lambda: [[0] * 3000] * 3000)
    assert result.value == [[0] * 3000] * 3000
    assert (tmp_path / ".gpu_pool/journal.jsonl").stat().st_size < 10_000


def test_a_result_that_the_supervisor_could_not_read_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, load = os.getpid(), _returns.load_report
    monkeypatch.setattr(_returns, "load_report", lambda *args: load(*args) if os.getpid() == main else None)
    assert outcome(tmp_path, lambda: 5).value == 5


class Tensor:
    """As torch's own is, on a GPU: it can be sent only when it has been copied to the CPU."""

    def __init__(self, device: str) -> None:
        self.device = types.SimpleNamespace(type=device)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return Tensor("cpu")

    def __reduce_ex__(self, _: Any) -> Any:
        if self.device.type != "cpu":
            raise RuntimeError("to load this, main would have to initialise CUDA")
        return Tensor, ("cpu",)


def test_a_tensor_on_a_gpu_arrives_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, __version__="2.5"))
    result = outcome(tmp_path, lambda: {"weights": [Tensor("cuda")]})
    assert result.error is None
    assert result.value["weights"][0].device.type == "cpu"
