"""The ends of jobs' logs: whatever a job prints, a person is shown plain text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_plugins.hydra_gpu_pool_launcher._tail import as_seen, last_line, last_lines, lines_seen, one_line, plain


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("epoch 1\n", "epoch 1"),
        ("  10%|#    |\r  20%|##   |", "  20%|##   |"),
        ("  10%\r  20%\r", "  20%"),
        ("done\r\n", "done"),
        ("\x1b[31mred\x1b[0m and \x1b[1;32mbold\x1b[m", "red and bold"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2K\x1b[1Gbar 3/4", "bar 3/4"),
        ("\x1b(Bcharset", "charset"),
        ("\x9b31mC1", "C1"),
        ("\x9d0;a title\x9ctext", "text"),
        ("\x1bP1$r0m\x1b\\text", "text"),
        ("a\tb\x07\x08", "a    b"),
        ("good\u202elive", "goodlive"),
        ("Größe 日本", "Größe 日本"),
    ],
)
def test_a_line_is_what_a_terminal_shows_of_it(printed: str, seen: str) -> None:
    assert as_seen(printed) == seen


@pytest.mark.parametrize("begin", [*(f"\x1b{c}" for c in "]PX^_"), *"\x90\x98\x9d\x9e\x9f"])
def test_an_escape_sequence_that_does_not_end_in_its_line_takes_no_text_with_it(begin: str) -> None:
    assert plain(f"{begin}0;loss is nan\nat step 7\x07") == "0;loss is nan\nat step 7"
    assert plain(f"{begin}0;a\x1b[31mb\x07") == "0;ab"
    assert one_line(f"expected {begin}") == "expected"


def test_beginnings_without_an_end_are_read_in_no_time() -> None:
    assert plain("\x9d" * 100_000) == plain("\x1b]" * 100_000) == ""


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("\r 0%|  |\r 50%|# |Traceback (most recent call last):", [" 50%|# |", "Traceback (most recent call last):"]),
        (
            "\r 50%|# |  + Exception Group Traceback (most recent call last):",
            [" 50%|# |", "  + Exception Group Traceback (most recent call last):"],
        ),
        ("\r 50%|# |\rTraceback (most recent call last):\r", ["Traceback (most recent call last):"]),
        ("[rank0]: Traceback (most recent call last):\r", ["[rank0]: Traceback (most recent call last):"]),
        ("+ Traceback (most recent call last):", ["+ Traceback (most recent call last):"]),
        ("\r 50%|# | and so on", [" 50%|# | and so on"]),
        ("", [""]),
    ],
)
def test_a_traceback_is_a_line_of_its_own_after_a_bar_that_ended_none(
    tmp_path: Path, printed: str, seen: list[str]
) -> None:
    assert lines_seen(printed) == seen
    log = tmp_path / "log"
    log.write_text(f"first\n{printed}\n  File\n", newline="")
    assert last_lines(str(log)) == ["first", *seen, "  File"]


@given(st.text())
def test_nothing_that_a_terminal_would_obey_is_left(text: str) -> None:
    left = plain(text)
    assert not any(ord(c) < 32 and c != "\n" for c in left.replace("\t", ""))
    assert "\x1b" not in left
    assert "\n" not in one_line(text)


def test_the_last_line_is_the_last_with_something_in_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nsecond \xff\n\n\x1b[0m\n")
    assert last_line(str(log)) == "second \ufffd"


def test_a_line_that_is_not_ended_yet_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n50%\r60%")
    assert last_line(str(log)) == "60%"


def test_no_more_is_read_of_a_long_log_than_is_needed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(10 << 30)  # holes, which would take minutes to read
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    assert last_line(str(log)) == "the end"
    assert last_lines(str(log), 20)[-1] == "the end"


def test_the_last_lines_are_in_their_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert last_lines(str(log))[-3:] == ["line 97", "line 98", "line 99"]


def test_what_is_no_log_has_no_lines_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("somebody else's\n")
    os.symlink("file", tmp_path / "link")
    for path in (tmp_path / "missing", tmp_path / "pipe", tmp_path / "link", tmp_path):
        assert last_line(str(path)) == ""
        assert last_lines(str(path)) == []
