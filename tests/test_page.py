"""sweep.html: what it says, that nothing of the app's gets out of its place in it, and what a browser makes of it."""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_view import end, launch, queued, seen, start

from hydra_plugins.hydra_gpu_pool_launcher import _family, _process, _sheet, _timeline
from hydra_plugins.hydra_gpu_pool_launcher._markup import WORDS, cell_text, plain, span
from hydra_plugins.hydra_gpu_pool_launcher._page import page, to_be_told
from hydra_plugins.hydra_gpu_pool_launcher._seen import State
from hydra_plugins.hydra_gpu_pool_launcher._view import View

DONE = {"event": "done", "time": 100.0}

SWEEP = (
    launch(slots=["0.0", "0.1", "1.0"], command=["python", "train.py", "-m"]),
    queued(0, "lr=0.001", "model=cnn"),
    queued(1, "lr=0.01", "model=cnn"),
    queued(2, "lr=0.1", "model=mlp"),
    queued(3, "lr=1", "model=mlp"),
    start(0, 0.0, "0.0"),
    start(1, 0.0, "1.0"),
    end(0, 50.0, value={"loss": 0.5, "acc": 0.75}, seconds=50.0, cpu_s=40.0, peak_mb=900.0),
    end(1, 20.0, "FAILED", event="retry", error_type="JobCrashedError", error_text="was killed by SIGSEGV"),
    start(1, 25.0, "1.0", attempt=2),
    start(2, 50.0, "0.1"),
    end(1, 100.0, attempt=2, value={"loss": 0.25, "acc": 0.5}, seconds=75.0),
    end(2, 60.0, "FAILED", error_type="ValueError", error_text="nan at step 7", seconds=10.0),
    end(3, 100.0, "FAILED", attempt=0, error_type="ValueError", error_text="nan at step 12"),
    DONE,
)

EVIL = "\"'><script>alert(1)</script></script><!--<img src=x onerror=alert(2)>&lt;\x1b[31m\0\ud800"


class Parsed(HTMLParser):
    """The elements of a page, in order, with their attributes, and the text in each of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            tag, attrs, text = self.elements[-1]
            self.elements[-1] = (tag, attrs, text + data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all such elements."""
        return [attrs for name, attrs, _ in self.elements if name == tag]

    def texts(self, tag: str) -> list[str]:
        return [text for name, _, text in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "".join(text for tag, _, text in self.elements if tag not in {"script", "style"})


def parsed(*events: dict[str, Any], now: float = 100.0, tails: dict[int, str] | None = None, **how: Any) -> Parsed:
    return Parsed(page(seen(*events), tails or {}, now, **how))


def bars(found: Parsed) -> list[tuple[str | None, str | None, str | None]]:
    return [(bar["class"], bar["x"], bar["width"]) for bar in found.of("rect") if "data-t" in bar]


def hostile() -> tuple[View, dict[int, str]]:
    """A sweep whose every text is an attack, with its tails."""
    view = seen(
        launch(slots=[f"{EVIL}.0", "0.0"], command=["python", EVIL], host=EVIL),
        queued(0, f"x={EVIL}", f"{EVIL}=1", "y=1"),
        queued(1, "x=2", f"{EVIL}=3", "y=2"),
        queued(2, f"x={EVIL}", "y=3"),
        start(0, 0.0, f"{EVIL}.0"),
        start(2, 0.0, "0.0"),
        end(0, 1.0, value={EVIL: 1.5, "n": 1, "text": EVIL}),
        end(1, 1.0, value={EVIL: 2.5, "n": 2, "text": "x"}),
        end(2, 1.0, "FAILED", error_type=EVIL, error_text=EVIL),
    )
    return view, {2: EVIL}


def large(jobs: int, tries: int = 1, columns: int = 3, text: str = "") -> View:
    """A sweep of very many jobs, whose overrides begin with a number and go on with this text."""
    slots = [f"{k}.0" for k in range(8)]
    events = [launch(slots=slots)]
    events += [queued(num, *(f"key{k}={num * k}{text}" for k in range(columns))) for num in range(jobs)]
    for num in range(jobs):
        for attempt in range(1, tries + 1):
            at = float(num // 8 * 10 + 9 * (attempt - 1) / tries)
            events.append(start(num, at, slots[num % 8], attempt=attempt))
            last: dict[str, Any] = {
                "seconds": 9.0,
                "cpu_s": 8.0,
                "peak_mb": 900.0,
                "value": {"loss": 1 / (num + 1), "note": text},
            }
            events.append(end(num, at + 9 / tries, event="end" if attempt == tries else "retry", **last))
    return seen(*events, {**DONE, "time": events[-1]["time"]})


# --- what it says ---


@pytest.mark.parametrize(
    ("events", "over", "word"),
    [
        (SWEEP[:-1], False, "running"),
        (SWEEP, False, "finished"),
        ((*SWEEP[:-1], {**DONE, "stopped": "Ctrl-C"}), False, "stopped"),
        (SWEEP[:8], True, "cut short"),
    ],
)
def test_it_says_whether_the_sweep_still_runs(events: tuple[dict[str, Any], ...], over: bool, word: str) -> None:
    found = parsed(*events, over=over, name="multirun/1")
    assert [text.strip() for tag, attrs, text in found.elements if "pill" in (attrs.get("class") or "")] == [word]
    assert found.texts("h1") == ["multirun/1"]
    assert ("load it again" in found.text) is (word == "running")
    assert (": Ctrl-C" in found.text) is (word == "stopped")
    assert ("what became of 3 jobs is not known" in found.text) is (word == "cut short")


def test_each_try_is_a_bar_in_its_slot_where_and_as_long_as_it_was() -> None:
    assert bars(parsed(*SWEEP)) == [
        ("completed", "0.000%", "50.000%"),
        ("failed", "50.000%", "10.000%"),
        ("failed", "0.000%", "20.000%"),
        ("completed", "25.000%", "75.000%"),
    ]


def test_what_still_runs_reaches_up_to_now_and_what_is_lost_up_to_the_last_that_was_heard() -> None:
    events = (launch(slots=["0.0"]), start(0, 0.0, "0.0"), start(1, 30.0, "1.0"))
    assert bars(parsed(*events, now=60.0)) == [("running", "0.000%", "100.000%"), ("running", "50.000%", "50.000%")]
    assert bars(parsed(*events, now=60.0, over=True))[0] == ("lost", "0.000%", "100.000%")
    assert "cut short" in parsed(*events, now=60.0, over=True).text


def test_after_a_resume_it_says_what_was_taken_over_and_does_not_count_the_time_between() -> None:
    first = [launch(slots=["0.0"]), queued(0), queued(1), queued(2), start(0, 0.0, "0.0"), end(0, 20.0)]
    first += [start(1, 20.0, "0.0"), end(1, 30.0, "FAILED"), {**DONE, "time": 30.0}]
    assert "taken over" not in parsed(*first).text
    again = [launch(slots=["0.0"], main=7, time=5000.0), *map(queued, range(3)), start(1, 5000.0, "0.0")]
    again += [end(0, 5000.0, attempt=0, cause="resumed"), end(1, 5010.0), {**DONE, "time": 5010.0}]
    text = parsed(*first, *again).text
    assert "2 of 3 jobs ended, 1 of them taken over from an earlier launch" in text
    assert "took40.0 s" in text
    between = [launch(slots=["0.0"], main=7, time=5000.0), queued(2), start(2, 5000.0, "0.0"), end(2, 5010.0), DONE]
    found = parsed(*first, *between, now=5010.0, over=True)
    assert found.text.count("100\u202f%") == 2


def test_its_commands_can_be_pasted_into_a_shell_however_their_words_are_made() -> None:
    words = ["python", "a.py", "-m", "seed=range(0,20)", "x='a  b'", "y=<b>&amp;" + "z" * 3000]
    found = parsed(launch(command=words), over=True, again=shlex.join(["cd", "/a  b"]))
    assert [shlex.split(text) for text in found.texts("pre")] == [words, ["cd", "/a  b"]]


def test_a_job_on_two_gpus_has_a_bar_on_each() -> None:
    assert len(bars(parsed(launch(), start(0, 0.0, "0.0", "1.0"), end(0, 5.0)))) == 2


def test_each_gpu_says_how_busy_it_was() -> None:
    spans = zip(parsed(*SWEEP).elements, parsed(*SWEEP).elements[1:], strict=False)
    assert [(name, text) for (tag, _, name), (_, _, text) in spans if tag == "b" and text.endswith("%")] == [
        ("GPU 0", "30\u202f%"),
        ("GPU 1", "95\u202f%"),
    ]


def test_the_table_has_a_row_per_job_and_only_columns_that_say_something() -> None:
    found = parsed(*SWEEP)
    heads = ["job", "lr", "model", "status", "loss", "acc", "time", "gpu", "tries", "peak MB", "CPU time"]
    assert found.texts("button") == [*heads, "what went wrong"]
    cells = found.texts("td")
    assert cells[:12] == ["0", "0.001", "cnn", "completed", "0.5", "0.75", "50.0 s", "0", "1", "900", "40.0 s", ""]
    assert len(cells) == 4 * 12
    assert [row["class"] for row in found.of("tr")[1:]] == ["completed", "completed", "failed", "failed"]


def test_a_key_of_the_values_that_an_override_is_called_too_keeps_its_whole_name() -> None:
    found = parsed(queued(0, "loss=1"), end(0, 1.0, value={"loss": 2, "acc": 3}))
    assert found.texts("button") == ["job", "loss", "status", "value.loss", "acc"]


def test_the_lowest_and_the_highest_value_are_named_with_their_jobs() -> None:
    found = parsed(*SWEEP)
    named = {attrs["id"]: text.strip() for _, attrs, text in found.elements if attrs.get("id")}
    assert (named["low"], named["low-job"], named["low-overrides"]) == ("0.25", "job 1", "lr=0.01, model=cnn")
    assert (named["high"], named["high-job"], named["high-overrides"]) == ("0.5", "job 0", "lr=0.001, model=cnn")
    assert found.texts("option") == ["loss", "acc"]


def test_values_that_are_no_numbers_have_no_best_and_no_plots() -> None:
    for value in (None, "good", True, float("nan"), [["x"]], 10**400):
        assert "plots" not in {attrs.get("id") for _, attrs, _ in parsed(end(0, 1.0, value=value)).elements}


def test_a_sweep_without_a_job_is_a_page_too() -> None:
    assert "no job so far" in parsed(DONE).text
    assert parsed(now=5.0, over=True).texts("h1") == ["sweep"]


def test_jobs_that_failed_alike_are_told_together_with_the_end_of_one_log() -> None:
    view = seen(*SWEEP)
    assert to_be_told(view) == [2]
    found = parsed(*SWEEP, tails={2: "step 1\nstep 7\nValueError: nan\n"})
    assert "ValueError: nan at step 7" in found.texts("b")
    assert found.texts("pre")[-1].strip() == "step 1\nstep 7\nValueError: nan"
    links = [attrs["href"] for attrs in found.of("a")]
    assert links[-3:] == ["#j2", "#j3", ".gpu_pool/jobs/2/output.log"]


def test_of_a_log_the_page_shows_what_tells_why_and_the_place_in_the_users_code() -> None:
    dump = "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"
    dump += (
        '  File "/home/<me>/train.py", line 7 in step\n' + '  File "/e/site-packages/hydra/main.py", line 1 in f\n' * 90
    )
    crash = {"error_type": "JobCrashedError", "error_text": "was ended by SIGABRT", "cause": "crash"}
    found = parsed(start(0, 0.0, "0.0"), end(0, 1.0, "FAILED", **crash), tails={0: f"step 1\n{dump}"})
    shown = ["step 1", "Fatal Python error: Aborted", '  File "/home/<me>/train.py", line 7 in step']
    assert found.texts("pre")[-1].strip().split("\n") == shown
    assert "train.py:7 in step" in found.text
    printed = "".join(f"line {i}\n" for i in range(100))
    found = parsed(end(0, 1.0, "FAILED", **crash), tails={0: printed})
    assert found.texts("pre")[-1].strip().split("\n") == [f"line {i}" for i in range(60, 100)]


def test_jobs_that_failed_in_their_own_ways_are_told_apart_the_most_first() -> None:
    view = seen(
        end(0, 1.0, "FAILED", error_type="A", error_text="x"),
        end(1, 1.0, "FAILED", error_type="B", error_text="at 0x7f12"),
        end(2, 1.0, "FAILED", error_type="B", error_text="at 0x7f99"),
        end(3, 1.0, "FAILED", error_type="A", error_text="x", cause="oom"),
        end(4, 1.0, "CANCELLED", error_type="JobCancelledError", error_text="was cancelled"),
        start(5, 1.0, "0.0"),
    )
    assert to_be_told(view) == [1, 0, 3]
    assert to_be_told(view, over=True) == [1, 0, 3, 5]


TAILS = {
    "colours": ("\x1b[1;31mred\x1b[0m \x1b[38;5;1mx\x1b[K", "red x"),
    "a progress bar": ("10%\r50%\r100%\r\ndone\r\n", "100%\ndone"),
    "a title and a link": ("\x1b]0;evil\x07a\x1b]8;;http://x\x1b\\b\x1b]8;;\x1b\\", "ab"),
    "an escape that does not end": ("a\x1b]0;evil\nb\x1b[", "a0;evil\nb"),
    "other control characters": ("a\0b\x07\x7f\x84\x9b1m", "a\u2400b\u2407\u2421\ufffd"),
    "empty lines at the end": ("a\n\nb\n\n \n", "a\n\nb"),
    "a long line": ("x" * 500, "x" * 399 + "…"),
    "nothing": ("", ""),
}


@pytest.mark.parametrize(("tail", "shown"), TAILS.values(), ids=TAILS)
def test_the_end_of_a_log_is_shown_as_a_terminal_would_have_it(tail: str, shown: str) -> None:
    assert plain(tail) == shown.split("\n") * bool(shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (59.96, "1:00"),
        (192, "3:12"),
        (3724.4, "1:02:04"),
        (1e5, "27:46:40"),
    ],
)
def test_time_spans_read_like_a_clock(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (0.1 + 0.2, "0.3"),
        (12, "12"),
        (123456789012, "1.23457e+11"),
        (True, "True"),
        (10**400, "401 digits"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_as_long_as_one_reads(cell: Any, text: str) -> None:
    assert cell_text(cell) == text


def test_every_state_has_a_word_and_a_colour() -> None:
    css = Path(page.__code__.co_filename).with_name("page.css").read_text()
    assert {*State} <= WORDS.keys()
    assert all(f".{word} {{ --c: var(--{word}); }}" in css for word in WORDS.values())


# --- that it is safe and small ---


def test_nothing_of_the_apps_is_markup_wherever_it_comes_up() -> None:
    view, tails = hostile()
    honest = parsed(*SWEEP, tails={2: "x"})
    found = Parsed(page(view, tails, 5.0, name=EVIL))
    assert len(found.of("script")) == 2
    assert {tag for tag, _, _ in found.elements} <= {tag for tag, _, _ in honest.elements}
    assert not {name for _, attrs, _ in found.elements for name in attrs if name.startswith("on")}
    assert found.text.count("<script>alert(1)</script>") >= 10


def test_it_reaches_for_nothing_outside() -> None:
    view, tails = hostile()
    found = Parsed(page(view, tails, 5.0, name=EVIL))
    reached = {
        attrs[name] for _, attrs, _ in found.elements for name in ("src", "href", "action", "data") if name in attrs
    }
    assert all(re.fullmatch(r"#\w+|results\.csv|\.gpu_pool/jobs/\d+/output\.log", str(where)) for where in reached)
    assert "url(" not in "".join(found.texts("style"))


def test_its_policy_lets_its_own_script_and_style_run_and_nothing_else() -> None:
    view, tails = hostile()
    found = Parsed(page(view, tails, 5.0))
    policy = next(attrs["content"] for attrs in found.of("meta") if "http-equiv" in attrs)

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style, script = digest(found.texts("style")[0]), digest(found.texts("script")[1])
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_its_data_is_json_without_markup() -> None:
    view, tails = hostile()
    data = Parsed(page(view, tails, 5.0)).texts("script")[0]
    assert "<" not in data
    assert json.loads(data)["tries"][0][:5] == [0, 1, 0, 0.0, 1.0]


def test_it_can_be_written_whatever_characters_there_were() -> None:
    view, tails = hostile()
    text = page(view, tails, 5.0, name=EVIL)
    text.encode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


@pytest.mark.parametrize(
    "view",
    [
        large(2000),
        large(2000, tries=5),
        large(2000, columns=9, text="<" * 300),
        large(2000, columns=10, text="🐍" * 50),
    ],
    ids=["plain", "tried again", "hostile", "beyond ASCII"],
)
def test_two_thousand_jobs_are_less_than_two_megabytes(view: View) -> None:
    tails = dict.fromkeys(to_be_told(view), "<" * 16_000)
    text = page(view, tails, 5e4)
    assert len(text.encode()) < 2_000_000
    assert len(Parsed(text).of("tr")) == 2001


def test_the_logs_of_many_ways_to_fail_are_cut_rather_than_the_page_too_large() -> None:
    view = seen(*(end(num, 1.0, "FAILED", error_type="E" + "x" * num, error_text="<" * 300) for num in range(100)))
    told = to_be_told(view)
    text = page(view, dict.fromkeys(told, f"{'<' * 399}\n" * 40), 1.0)
    assert len(told) == 30
    assert len(text.encode()) < 1_000_000
    assert "70 more jobs failed in other ways" in Parsed(text).text


def test_of_more_jobs_than_a_page_can_show_it_shows_the_first_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sheet, "_TABLE_BYTES", 100_000)
    found = Parsed(page(large(2000), {}, 5e4))
    rows = len(found.of("tr")) - 1
    assert 500 < rows < 2000
    assert f"the first {rows} of 2\u202f000 jobs; long cells are cut; results.csv has all of it" in found.text


def test_bars_too_short_to_tell_apart_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timeline, "_MOST_BARS", 500)
    drawn = [bar for bar in Parsed(page(large(2000), {}, 5e4)).of("rect") if "data-t" in bar]
    assert 250 < len(drawn) <= 2 * 500
    assert sum(int(bar.get("data-n") or 1) for bar in drawn) == 2000


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A chromium without a window."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install '.[browser]')"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on PATH")
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    _process.become_subreaper()  # its crash handlers are daemons, which may outlive it
    before = _family.children()
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=arguments)
        yield running
        running.close()
    gc.collect()  # its event loop has sockets
    for pid in _family.children() - before:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


Open = Callable[..., Any]


def dismissed(said: list[str]) -> Callable[[Any], None]:
    """Adds what a dialog says, and closes it."""

    def on_dialog(dialog: Any) -> None:
        said.append(dialog.message)
        dialog.dismiss()

    return on_dialog


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page; what it complains about, asks for or reaches for fails the test."""
    contexts, trouble, requests = [], [], []

    def open_page(view: View, tails: dict[int, str] | None = None, now: float = 100.0, **how: Any) -> Any:
        path = tmp_path / "sweep.html"
        path.write_text(page(view, tails or {}, now), encoding="utf-8")
        contexts.append(context := browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how}))
        shown = context.new_page()
        shown.set_default_timeout(20_000)
        shown.on("console", lambda message: trouble.append(message.text))
        shown.on("pageerror", lambda error: trouble.append(str(error)))
        shown.on("dialog", dismissed(trouble))
        shown.on("request", lambda request: requests.append(request.url))
        shown.goto(path.as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
    assert requests == [(tmp_path / "sweep.html").as_uri()] * len(contexts)


def column(shown: Any, nth: int) -> list[str]:
    return [text.strip() for text in shown.locator(f"#results td:nth-child({nth})").all_inner_texts()]


def test_a_browser_draws_the_bars(opened: Open) -> None:
    shown = opened(seen(*SWEEP))
    boxes = [bar.bounding_box() for bar in shown.locator("rect[data-t]").all()]
    lane = shown.locator(".lane").first.bounding_box()
    assert len(boxes) == 4
    assert boxes[0]["width"] == pytest.approx(lane["width"] / 2, abs=2)
    assert all(box["height"] > 10 for box in boxes)
    assert shown.evaluate("getComputedStyle(document.querySelector('rect[data-t].failed')).fill") == "rgb(209, 73, 91)"


def test_a_click_on_a_header_sorts_and_another_one_turns_it_round(opened: Open) -> None:
    shown = opened(seen(*SWEEP))
    assert column(shown, 1) == ["0", "1", "2", "3"]
    head = shown.get_by_role("button", name="time", exact=True)
    head.click()
    assert column(shown, 7) == ["10.0 s", "50.0 s", "1:15", ""]
    assert shown.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    head.press("Enter")
    assert column(shown, 7) == ["1:15", "50.0 s", "10.0 s", ""]
    for step in ("12", "7"):
        shown.get_by_role("button", name="what went wrong").click()
        told = column(shown, 12)
        assert (told[0], told[2:]) == (
            f"ValueError: nan at step {step}",
            ["", ""],
        )  # what is empty comes last, either way
    shown.get_by_role("button", name="model").click()
    assert column(shown, 3) == ["cnn", "cnn", "mlp", "mlp"]
    assert shown.locator("th[aria-sort]").count() == 1


def test_pointing_at_a_bar_shows_its_job_and_a_click_marks_it(opened: Open) -> None:
    shown = opened(seen(*SWEEP))
    tip = shown.locator("#tip")
    assert tip.is_hidden()
    shown.locator("rect[data-t='2']").hover()
    assert tip.inner_text() == (
        "job 1, try 2: completed\n1:15 in slot 1.0, from 25.0 s on\nlr = 0.01\nmodel = cnn\nloss = 0.25\nacc = 0.5"
    )
    shown.locator("rect[data-t='2']").click()
    assert shown.locator("#results tr.on").get_attribute("id") == "j1"
    assert shown.locator("rect.on").count() == 2
    shown.locator("h1").hover()
    assert tip.is_hidden()


def test_a_finger_does_what_a_mouse_does(opened: Open) -> None:
    shown = opened(seen(*SWEEP), has_touch=True)
    shown.locator("rect[data-t='0']").tap()
    assert shown.locator("#tip").inner_text().startswith("job 0: completed")
    shown.locator("h1").tap()
    assert shown.locator("#tip").is_hidden()


def test_the_keyboard_walks_along_the_bars(opened: Open) -> None:
    shown = opened(seen(*SWEEP))
    tip = shown.locator("#tip")
    while shown.evaluate("document.activeElement.dataset.t") is None:
        shown.keyboard.press("Tab")
    assert tip.inner_text().startswith("job 0: completed")
    shown.keyboard.press("ArrowDown")
    assert tip.inner_text().startswith("job 2: failed")
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("job 1: failed")
    shown.keyboard.press("Enter")
    assert shown.locator("#results tr.on").get_attribute("id") == "j1"
    shown.keyboard.press("Escape")
    assert tip.is_hidden()


def test_each_override_has_a_plot_of_the_value_that_is_chosen(opened: Open) -> None:
    shown = opened(seen(*SWEEP))
    assert [text.strip() for text in shown.locator("figcaption").all_inner_texts()] == ["lr", "model"]
    assert shown.locator("figure").first.locator("circle").count() == 2
    shown.locator("figure").first.locator("circle[data-j='1']").hover()
    assert shown.locator("#tip").inner_text() == "job 1\nlr = 0.01\nmodel = cnn\nloss = 0.25\nacc = 0.5"
    low = [shown.locator(f"figure circle[data-j='{num}']").first.get_attribute("cy") for num in (0, 1)]
    shown.locator("#key").select_option("acc")
    assert (shown.locator("#high").inner_text(), shown.locator("#high-job").inner_text()) == ("0.75", "job 0")
    assert shown.locator("#low-overrides").inner_text() == "lr=0.01, model=cnn"
    assert [shown.locator(f"figure circle[data-j='{num}']").first.get_attribute("cy") for num in (0, 1)] == low


def test_numbers_over_many_powers_of_ten_are_plotted_by_these(opened: Open) -> None:
    events = [queued(num, f"lr=1e-{num}", f"n={num}") for num in range(5)]
    shown = opened(seen(*events, *(end(num, 1.0, value=10.0**num) for num in range(5))))
    assert [text.strip() for text in shown.locator("figcaption").all_inner_texts()] == [
        "lr log, both ways",
        "n log upwards",
    ]
    xs = sorted(float(dot.get_attribute("cx")) for dot in shown.locator("figure").first.locator("circle").all())
    steps = [after - before for before, after in itertools.pairwise(xs)]
    assert max(steps) == pytest.approx(min(steps), abs=0.3)


def test_a_hostile_sweep_does_nothing_in_a_browser(opened: Open) -> None:
    shown = opened(*hostile())
    shown.locator("rect[data-t='0']").hover()
    assert "<script>alert(1)</script>" in shown.locator("#tip").inner_text()
    shown.locator("#key").select_option(index=0)
    for head in shown.locator("th button").all():
        head.click()
    for dot in shown.locator("circle").all():
        dot.hover()
    assert shown.locator("body img").count() == 0
    assert shown.locator("script").count() == 2


def test_should_markup_slip_through_all_the_same_its_policy_stops_it(browser: Any, tmp_path: Path) -> None:
    slipped = "<img src=x onerror='alert(1)'><script>alert(2)</script><p style='color:red' id=slipped>"
    path = tmp_path / "sweep.html"
    path.write_text(page(seen(*SWEEP), {}, 5.0).replace("<main>", f"<main>{slipped}"), encoding="utf-8")
    context = browser.new_context()
    shown = context.new_page()
    alerts: list[str] = []
    refused: list[str] = []
    shown.on("dialog", dismissed(alerts))
    shown.on("console", lambda message: refused.append(message.text))
    shown.goto(path.as_uri())
    assert shown.evaluate("getComputedStyle(document.getElementById('slipped')).color") != "rgb(255, 0, 0)"
    assert shown.locator("html.js").count() == 1
    context.close()
    assert alerts == []
    assert len(refused) >= 3


def test_two_thousand_jobs_render(opened: Open) -> None:
    shown = opened(large(2000), now=5e4)
    assert shown.locator("rect[data-t]").count() == 2000
    assert shown.locator("#results tbody tr").count() == 2000
    assert shown.locator("circle").count() == 2 * 2000  # key0 is 0 for all, and no column
    shown.get_by_role("button", name="loss").click()
    assert column(shown, 1)[0] == "1999"


def test_without_a_script_the_page_can_be_read(opened: Open) -> None:
    shown = opened(seen(*SWEEP), java_script_enabled=False)
    assert shown.locator("rect[data-t]").count() == 4
    assert column(shown, 1) == ["0", "1", "2", "3"]
    assert [told.is_visible() for told in shown.locator("noscript").all()] == [True, True]
    assert shown.get_by_text("a click on a header").is_hidden()
    assert shown.locator("#key").is_hidden()


def test_on_paper_it_is_light_and_fits_whole(opened: Open) -> None:
    shown = opened(large(100), color_scheme="dark", viewport={"width": 700, "height": 900})
    shown.emulate_media(media="print", color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert shown.evaluate(paper) == "rgb(255, 255, 255)"
    assert shown.evaluate("document.documentElement.scrollWidth") <= 700
    table, around = (shown.locator(name).bounding_box()["height"] for name in ("#results", ".scroll"))
    assert around == pytest.approx(table, abs=3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_text_stands_out_in_either_colour_scheme(opened: Open, scheme: str) -> None:
    shown = opened(seen(*SWEEP), color_scheme=scheme)
    names = ["--paper", "--sunk", "--ink", "--soft", "--mark", "--failed", "--completed"]
    value_of = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)"
    colours = {name: shown.evaluate(value_of, name) for name in names}
    for text in ("--ink", "--soft", "--mark"):
        for ground in ("--paper", "--sunk"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for shape in ("--failed", "--completed"):
        assert contrast(colours[shape], colours["--paper"]) >= 3.0, shape


def contrast(one: str, other: str) -> float:
    """Of two colours like #aabbcc, as WCAG 2 has it: 4.5 and more for text, 3 for shapes."""

    def luminance(colour: str) -> float:
        parts = [int(colour.strip()[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [1280, 400, 320])
def test_nothing_stands_over_the_edge_of_a_narrow_screen(opened: Open, width: int) -> None:
    view = seen(*SWEEP, end(0, 1.0, "FAILED", error_type="E", error_text="x" * 500))
    shown = opened(view, tails={0: "y" * 500}, viewport={"width": width, "height": 700})
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
