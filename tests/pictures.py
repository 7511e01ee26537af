"""Makes the README's pictures, by ``make pictures``: a sweep on a terminal while it runs, and its page afterwards.

Both are of one sweep of the app beside this file, which runs for half a minute on slots of two GPUs, which need not be
there. The first is what a terminal shows in the middle of it, as SVG; the second is sweep.html in a chromium.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from support import LIMIT_S
from terminal import Terminal, terminal

EXAMPLE = Path(__file__).parent.parent / "example_app"
SIZE = (100, 21)
SECONDS = "6"  # that a job takes, more or less

SWEEP = (
    "python train.py -m lr=0.1,0.01,0.001 model=mlp,cnn,vit seed=1,2 hydra/launcher=gpu_pool"
    " 'hydra.launcher.gpus=[0,1]' hydra.launcher.per_gpu=2 hydra.sweep.dir=multirun/first"
)
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # so that the page says "python", and not where it is

THEME = TerminalTheme(
    (22, 27, 34),
    (220, 224, 230),
    [(22, 27, 34), (255, 123, 114), (63, 185, 80), (210, 153, 34)] + [(220, 224, 230)] * 4,
)


def svg(shown: Terminal, title: str) -> str:
    """What is on the screen, in its colours. No font is asked of the network: each viewer has one of even width."""
    console = Console(record=True, width=SIZE[0], file=io.StringIO(), color_system="standard", force_terminal=True)
    for row in shown.rows():
        console.print(Text("").join(Text(c.data, "" if c.fg == "default" else c.fg) for c in row), soft_wrap=True)
    made = console.export_svg(title=title, theme=THEME, unique_id="live")
    return re.sub(r"\s*@font-face \{.*?\}", "", made, flags=re.DOTALL)


def live(directory: Path) -> str:
    """Runs the sweep to its end, and gives the picture of its middle: each failure that there is has happened."""
    with terminal() as tty:
        tty.resize(*SIZE)
        with subprocess.Popen(shlex.split(SWEEP), cwd=directory, **tty.popen(PATH=PATH, README_SECONDS=SECONDS)) as app:
            tty.until_drawn(lambda: tty.has("7 done") and tty.has("4 failed"))
            picture = svg(tty, "python train.py -m … hydra/launcher=gpu_pool")
            while app.poll() is None:
                tty.until_quiet()
                os.sched_yield()
    return picture


def report(directory: Path, to: Path) -> None:
    """The page of the sweep, as far as its plots."""
    journal = directory / "multirun/first/.gpu_pool/journal.jsonl"
    journal.write_text(journal.read_text().replace(f'"{os.uname().nodename}"', '"box"'))
    gpu_pool = [sys.executable, "-m", "hydra_plugins.hydra_gpu_pool_launcher"]
    subprocess.run([*gpu_pool, "report", "multirun/first"], cwd=directory, check=True, timeout=LIMIT_S)
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])],
        )
        page = browser.new_page(viewport={"width": 1100, "height": 1020})
        page.goto((directory / "multirun/first/sweep.html").as_uri())
        page.screenshot(path=to)
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(Path(__file__).with_name("readme_app.py"), Path(directory, "train.py"))
        (EXAMPLE / "live.svg").write_text(live(Path(directory)), encoding="utf-8")
        report(Path(directory), EXAMPLE / "sweep.png")


if __name__ == "__main__":
    main()
