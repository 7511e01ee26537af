"""What the journal's events have to say; and that a journal which says anything else harms nobody who reads it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_view import end, launch, queued, start, stop

from hydra_plugins.hydra_gpu_pool_launcher import _cli, _journal
from hydra_plugins.hydra_gpu_pool_launcher._facts import DamagedEventError, fault, sound
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._outside import WatchedSweep, over

FIGURES: dict[str, Any] = {"seconds": 1.5, "cpu_s": 1.0, "peak_mb": 200.0, "gpu_mb": 900.0}
BAD: dict[str, Any] = {"status": "FAILED", "cause": "error", "error_type": "ValueError", "error_text": "no"}
RESUMED = {
    "kept": 1,
    "moved": ["0.1"],
    "left": [],
    "known": 3,
    "empty": False,
    "back": 0,
    "elsewhere": [1, ".gpu_pool.1"],
}
VALID: list[dict[str, Any]] = [
    launch(host=os.uname().nodename, given=["x=0,1,2"]),
    {"event": "moved_aside", "time": 0.0, "to": ".gpu_pool.1", "jobs": 3, "completed": 1},
    {"event": "resumed", "time": 0.0, **RESUMED},
    *(queued(num, f"x={num}", "y=0") for num in range(5)),
    end(4, 0.5, attempt=0, cause="resumed", value=1, **FIGURES),
    start(0, 1.0, "0.0"),
    start(1, 1.0, "1.0"),
    end(1, 2.0, event="retry", **BAD, **FIGURES),
    start(1, 3.0, "1.0", attempt=2),
    end(0, 9.0, value={"loss": 0.5, "l": [1, 2]}, **FIGURES),
    start(2, 9.5, "0.0"),
    {"event": "memory", "time": 9.6, "job": 2, "gpu_mb": 512.5},
    {"event": "waiting", "time": 9.7, "device": "1", "why": "a job waits for a slot on GPU 1"},
    end(1, 10.0, **BAD, **FIGURES),
    start(3, 10.0, "1.0"),
    stop(3, 11.0),
]

NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e308, -1, 0, 2**70, 10**4000, True)
EXTREMES = st.sampled_from([*NUMBERS, None, "", "COMPLETED", "\ud800\x1b[2J"])
NESTED: Any = json.loads("[" * 300 + "]" * 300)
JSON = st.recursive(
    st.one_of(EXTREMES, st.floats(), st.integers(), st.text(max_size=5)),
    lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(st.text(max_size=3), part, max_size=3)),
    max_leaves=5,
)
ANYTHING = st.one_of(JSON, st.just(NESTED))


@st.composite
def journals(draw: st.DrawFn) -> bytes:
    """The lines of a valid journal, of which some are changed in one field or another, or are something else."""
    lines = [dict(event) for event in VALID[: draw(st.integers(1, len(VALID)))]]
    if draw(st.booleans()):
        lines.append({"event": "done", "time": 12.0})
    for _ in range(draw(st.integers(1, 3))):
        event = draw(st.sampled_from(lines))
        name = draw(st.sampled_from([*event, "of the future"]))
        if draw(st.booleans()) or name not in event:
            event[name] = draw(ANYTHING)
        else:
            del event[name]
    content = [json.dumps(event).encode() for event in lines]
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content)))
        content.insert(
            place, draw(st.one_of(st.binary(max_size=8), ANYTHING.map(lambda one: json.dumps(one).encode())))
        )
    return b"\n".join(content) + b"\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("sweep")
    before = Path.cwd()
    os.chdir(path)
    yield path
    os.chdir(before)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    """The exit code of a command that says what it has to, or one sentence; a traceback fails the test."""
    code = _cli.run(arguments)
    out, err = capsys.readouterr()
    assert code in {0, 2}
    assert (code == 2) == err.startswith("gpu-pool: ")
    assert err.count("\n") == (code == 2)
    assert out or code == 2
    return code


COMMANDS = ("status .", "status . --json", "status . --all", "report .", "logs . 2", "logs . 0", "cancel . 2")


def ask(directory: Path, journal: bytes, capsys: pytest.CaptureFixture[str]) -> set[int]:
    """Every command, on a sweep that has this journal; their exit codes."""
    files = SweepFiles(str(directory))
    for num in (0, 2):
        os.makedirs(files.job_dir(num), exist_ok=True)
        Path(files.output(num)).write_text("printed\n")
    Path(files.journal).write_bytes(journal)
    codes = {told(capsys, *command.split()) for command in COMMANDS}
    with contextlib.suppress(Exception), contextlib.closing(WatchedSweep(files)) as sweep:
        if not over(sweep.standing):
            return codes  # a watch would wait for its end
    return codes | {told(capsys, "status", ".", "--watch"), told(capsys, "status", ".", "--watch", "--json")}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(journal=journals())
def test_whatever_is_in_a_journal_every_command_says_what_there_is_or_one_sentence(
    journal: bytes, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(directory, journal, capsys)


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        ("launch", "time", float("nan")),
        ("start", "time", 1e308),
        ("end", "time", float("inf")),
        ("launch", "supervisor", 2**70),
        ("launch", "supervisor", "1"),
        ("launch", "host", 7),
        ("launch", "command", "python"),
        ("launch", "command", [["python"]]),
        ("start", "slots", [["0.0"]]),
        ("start", "slots", []),
        ("start", "job", "0"),
        ("queued", "job", 2**70),
        ("queued", "job", True),
        ("queued", "overrides", [None]),
        ("end", "error_type", ["ValueError"]),
        ("end", "error_text", {}),
        ("end", "peak_mb", "much"),
        ("end", "cpu_s", float("nan")),
        ("end", "status", "RUNNING"),
        ("end", "cause", "of the future"),
        ("end", "value", NESTED),
    ],
)
def test_an_event_that_is_not_as_it_should_be_is_named_by_every_command(
    event: str, name: str, value: Any, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*VALID, {"event": "done", "time": 12.0}]
    at = next(i for i, each in enumerate(lines) if each["event"] == event)
    lines[at] = {**lines[at], name: value}
    assert ask(directory, "".join(json.dumps(each) + "\n" for each in lines).encode(), capsys) == {2}
    assert _cli.run(["status", "."]) == 2
    assert f"is damaged, or another version's ({name} of {event} is not what it should be)" in capsys.readouterr().err


def test_text_that_no_encoding_has_is_spelled_out(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a host, an override, an error: JSON can say half a character, which a file's name may have as well."""
    facts = {"host": "\ud800", "overrides": ["x=\ud800"], "error_text": "\ud800", "slots": ["\ud800.0"]}
    lines = [{**event, **{name: facts[name] for name in facts.keys() & event.keys()}} for event in VALID]
    assert ask(directory, "".join(json.dumps(each) + "\n" for each in lines).encode(), capsys) == {0, 2}
    assert _cli.run(["status", "."]) == 0
    assert "\\ud800.0" in capsys.readouterr().out


OUTCOME = {
    "status": "COMPLETED",
    "error_type": None,
    "error_text": None,
    "value": 3,
    "sha256": "",
    "traceback": None,
    "out_of_memory": False,
    "crashed": False,
    "overrides": ["x=2", "y=0"],
    "directory": "2",
}


@pytest.mark.parametrize("odd", [[], {"a": 1}, 7, True, 1e308, NESTED, "RUNNING"])
@pytest.mark.parametrize("name", OUTCOME)
def test_an_outcome_that_is_not_as_it_should_be_is_one_that_says_what_it_can_or_none(
    name: str, odd: Any, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a sweep that was killed, what its jobs say of themselves is asked for."""
    files = SweepFiles(str(directory))
    os.makedirs(files.job_dir(2), exist_ok=True)
    Path(files.journal).write_text("".join(json.dumps(each) + "\n" for each in VALID))
    Path(files.outcome(2)).write_text(json.dumps({**OUTCOME, name: odd}))
    for command in ("status .", "status . --json"):
        assert told(capsys, *command.split()) == 0


def test_every_event_and_every_field_of_it_is_asked_for() -> None:
    assert [*sound(VALID)] == VALID
    for event in VALID:
        for name in event.keys() - {"event", "given", *FIGURES}:
            assert fault({key: value for key, value in event.items() if key != name}) == (
                f"{name} of {event['event']} is missing"
            )
        for name in event.keys() - {"event"}:
            assert fault({**event, name: {"of": object()}}) is not None or name == "value"
    with pytest.raises(DamagedEventError, match="time of done"):
        [*sound([*VALID, {"event": "done", "time": "now"}])]


def test_what_a_later_version_adds_is_no_fault() -> None:
    assert fault({"event": "of the future"}) is None
    assert all(fault({**event, "new": object()}) is None for event in VALID)


def test_lines_that_are_no_events_are_passed_over(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = b'7\n[1]\nnull\n"x"\n{}\n{"event": 7}\n\xff\n{"event"\n'
    lines = [json.dumps(event).encode() + b"\n" for event in [*VALID, {"event": "done", "time": 12.0}]]
    assert ask(directory, odd.join(lines), capsys) == {0, 2}  # there is nothing to cancel
    told(capsys, "status", ".")
    assert _cli.run(["status", "."]) == 0
    assert "2 done" in capsys.readouterr().out


def test_a_line_that_never_ends_takes_no_more_memory_than_the_longest_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_journal, "_LONGEST_LINE", 1000)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 3500)
    with contextlib.closing(_journal.JournalReader(str(path))) as reader:
        assert [*reader.new()] == []
        assert reader.offset == 3000
        with path.open("ab") as file:
            file.write(b"x\n" + json.dumps(queued(0)).encode() + b"\n")
        assert [event["event"] for event in reader.new()] == ["queued"]
