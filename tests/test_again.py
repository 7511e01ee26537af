"""The command that goes on with a sweep."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher._again import command_to_resume

ADDED = ["hydra.launcher.resume=true", "hydra.sweep.dir=multirun/1"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("python a.py -m x=1,2", "python a.py -m x=1,2 RESUME DIR"),
        ("python a.py x=1,2 -m", "python a.py x=1,2 RESUME DIR -m"),
        ("python -m pkg.a -m x=1,2 --config-name c", "python -m pkg.a -m x=1,2 RESUME DIR --config-name c"),
        ("python a.py -m x=1 hydra.sweep.dir=old y=2", "python a.py -m x=1 y=2 RESUME DIR"),
        ("python a.py -m x=1 y=2 +hydra.launcher.resume=false", "python a.py -m x=1 y=2 RESUME DIR"),
        ("python a.py -m", "python a.py -m RESUME DIR"),
        ("a.py 'x=[1, 2]' -m", "a.py 'x=[1, 2]' RESUME DIR -m"),
    ],
)
def test_it_is_what_was_typed_with_resume_and_the_directory(typed: str, said: str) -> None:
    words = shlex.split(typed)
    given = [*(word for word in words if "=" in word), "hydra.mode=MULTIRUN"]
    expected = [w for word in shlex.split(said) for w in {"RESUME": ADDED[:1], "DIR": ADDED[1:]}.get(word, [word])]
    command = command_to_resume(words, given, "multirun/1")
    assert command is not None
    assert shlex.split(command) == expected


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["python", "a.py"], ["x=1,2"]),  # given by a function call, and by no command line
        (["python", "-c", "main()", "x=1"], ["x=1"]),
        (["python", "-", "x=1"], ["x=1"]),
        (["python"], []),
        ([], []),
    ],
)
def test_there_is_none_where_the_words_alone_did_not_start_the_sweep(words: list[str], given: list[str]) -> None:
    assert command_to_resume(words, given, "multirun/1") is None


@pytest.mark.parametrize("directory", ["a b", "a=1,b=2", "it's", "1e3", "null", "back\\slash", "(x)", "é", "a,b/'q'\\"])
def test_whatever_the_directory_is_called_hydra_understands_it(directory: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    command = command_to_resume(["python", "a.py", "-m"], [], directory)
    assert command is not None
    assert OverridesParser.create().parse_override(shlex.split(command)[-1]).value() == directory


def test_a_directory_that_would_be_an_interpolation_cannot_be_said() -> None:
    assert command_to_resume(["python", "a.py", "-m"], [], "multirun/${x}") is None


APP = """
import os
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    open(f"ran-{cfg.x}", "a").write(".")
    if cfg.x == "b c" and not os.path.exists("mended"):
        raise ValueError("not yet")

if __name__ == "__main__":
    main()
"""


def command_in(text: str) -> str | None:
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if "to run only what has not completed:" in line]
    return lines[found[-1] + 1] if found else None


def given_in_journal(sweep_dir: Path) -> Any:
    with (sweep_dir / ".gpu_pool/journal.jsonl").open() as journal:
        return json.loads(journal.readline())["given"]


@pytest.mark.parametrize("directory", ["sweep", "it's a=sweep"])
def test_the_command_runs_only_what_failed_and_is_not_given_when_nothing_did(
    run_app: RunApp, tmp_path: Path, directory: str
) -> None:
    quoted = directory.replace("'", "\\'")
    arguments = ("-m", "+x=a,'b c',d", "hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=2")
    failed = run_app(APP, *arguments, f"hydra.sweep.dir='{quoted}'")
    assert failed.returncode == 1
    command = command_in(failed.stdout)
    assert command is not None, failed.stdout
    before, _, after = failed.stdout.rpartition("to run only what has not completed:")
    assert before.count("to run only what has not completed:") == 1  # in the summary; and again, the last of all:
    assert after == f"\n{command}\n"
    assert "job 1 (+x='b c'): ValueError: not yet (app.py:9 in main)" in before.splitlines()[-2]
    assert given_in_journal(tmp_path / directory)[:2] == ["hydra/launcher=gpu_pool", "hydra.launcher.cpu_slots=2"]
    (tmp_path / "mended").touch()
    done = run_app.python("-c", f"import sys, os; sys.exit(os.waitstatus_to_exitcode(os.system({command!r})))")
    assert done.returncode == 0, done.stdout
    assert {x: (tmp_path / f"ran-{x}").read_text() for x in ("a", "b c", "d")} == {"a": ".", "b c": "..", "d": "."}
    assert command_in(done.stdout) is None
    assert "2 of 3 jobs had completed and are not run again" in done.stdout


def test_no_command_is_given_with_a_sweeper_that_may_ask_for_other_points(run_app: RunApp, tmp_path: Path) -> None:
    write_sweeper(tmp_path, "return self.launcher.launch([['+x=b c']], initial_job_idx=0)")
    done = run_app(APP, "-m", "hydra/sweeper=own", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep")
    assert "1 FAILED" in done.stdout, done.stdout + done.stderr
    assert command_in(done.stdout) is None
    assert given_in_journal(tmp_path / "sweep") is None
