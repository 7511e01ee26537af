"""The README is true: its settings are what they are, its commands and snippets run, its samples are what they print.

All of them are found in the text, so that one that is added is run too, or fails here. Its app, train.py, is
readme_app.py, on two GPUs that nobody asks; in groups of ranks, torch is a stand-in, whose import takes no seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from support import LIMIT_S, RunApp

from hydra_plugins.hydra_gpu_pool_launcher._settings import DEFAULTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOKENS = MarkdownIt("commonmark").enable("table").parse(README)


def rows() -> dict[str, Any]:
    """Of the tables of settings: each key's default, as YAML reads it."""
    section = README[README.index("\n## Settings\n") : README.index("\n## What you see\n")]
    found = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| ", section, re.MULTILINE)
    return {key: yaml.safe_load(default.strip("`")) for key, default in found}


def test_every_key_has_its_row_with_its_default() -> None:
    expected = {key: value for key, value in DEFAULTS.items() if key != "ddp"}
    expected |= {f"ddp.{key}": value for key, value in DEFAULTS["ddp"].items()}
    assert rows() == expected


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_within_leads_to_a_heading() -> None:
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors(README)


def test_every_file_that_it_shows_or_names_is_there() -> None:
    for link in re.findall(r"\]\((?!#|http)([^)]+)\)", README):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), path
        assert not anchor or anchor in anchors((ROOT / path).read_text(encoding="utf-8")), link


# --- commands ---


@dataclass(frozen=True)
class Block:
    """A block of code. ``kind``: what its fence says, "" where it is indented, as what programs print is."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text.partition("\n")[0].rstrip(" \\")[-50:]

    @property
    def commands(self) -> list[list[str]]:
        """The words of its commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True) for line in lines]


BLOCKS = [Block(token.info, token.content) for token in TOKENS if token.type in {"fence", "code_block"}]
INLINE = [child.content for token in TOKENS for child in token.children or [] if child.type == "code_inline"]

ELSEWHERE = {
    "pip": "test_package.py installs the wheel as it does",
    "make": "below, the demo's command as the Makefile has it",
    "hydra.launcher.ddp.rdzv_endpoint": "it takes a machine node0: below as far as Hydra; test_ddp_nodes.py has two",
}
"""By a word of theirs, up to its "=": commands that do not run here as they stand, and what is done instead."""


def of_kind(kind: str, has: str = "") -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind and has in block.text]


def runs_here(block: Block) -> bool:
    return not any(word.partition("=")[0] in ELSEWHERE for words in block.commands for word in words)


TORCH = {
    "torch/__init__.py": "",
    "torch/distributed.py": "class TCPStore:\n    port = 1\n    def __init__(self, *_, **__): pass\n",
    "torch-2.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.5\n",
}
"""All of it that a job asks for, before it starts its ranks."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunApp:
    """A directory with train.py. Whatever runs there has two GPUs to choose from, and finds the torch above."""
    shutil.copy(Path(__file__).with_name("readme_app.py"), tmp_path / "train.py")
    for name, text in TORCH.items():
        path = tmp_path / "stand-in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("COLUMNS", "80")
    return RunApp(tmp_path)


def shell(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What bash makes of it; fails when it hangs."""
    return subprocess.run(
        ["bash", "-euc", script],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_every_block_is_of_a_kind_that_is_run_or_shows_what_a_program_prints() -> None:
    assert {block.kind for block in BLOCKS} == {"", "sh", "python", "yaml"}
    first = [block.text.split()[0] for block in of_kind("")]
    commands = [word for word in first if shutil.which(word) or (Path(sys.executable).parent / word).exists()]
    assert commands == ["gpu-pool"], "test_cli.py runs this one's lines; fence others as sh"


@pytest.mark.parametrize("block", [block for block in of_kind("sh") if runs_here(block)], ids=str)
def test_a_command_runs_as_it_stands_and_its_jobs_complete(here: RunApp, block: Block) -> None:
    if "optuna" in block.text:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    done = shell(here.directory, f"{block.text}wait")

    assert done.returncode == 0, done.stdout + done.stderr
    journals = list(here.directory.glob("multirun/**/.gpu_pool/journal.jsonl"))
    events = [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]
    ended = [event["status"] for event in events if event["event"] == "end"]
    assert ended, "it has run no job"
    assert set(ended) == {"COMPLETED"}
    if "resume=true" in block.text:
        assert sum(event["event"] == "start" for event in events) == len(ended) // 2


def test_what_two_machines_are_told_is_what_hydra_understands(here: RunApp) -> None:
    (command,) = [words for block in of_kind("sh", "rdzv_endpoint") for words in block.commands]
    not_swept = [word for word in command[1:] if word not in {"-m", "lr=1e-3,1e-4"}]
    done = here.python(*not_swept, "--cfg", "hydra", "--package", "hydra.launcher")
    said = yaml.safe_load(done.stdout)
    assert said["ddp"].items() >= {"nnodes": 2, "node_rank": 0, "rdzv_endpoint": "node0:29500"}.items()
    assert (said["mode"], said["gpus_per_job"]) == ("ddp", 8)


def test_what_make_and_pip_are_told_to_do_is_there() -> None:
    told = [words for block in of_kind("sh") for words in block.commands] + [text.split() for text in INLINE]
    targets = {words[1] for words in told if words[0] == "make" and len(words) > 1}
    assert targets >= {"demo", "demo-ddp", "test", "clean"}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"'\.\[(\w+)\]'", README))
    assert extras
    assert extras <= set(re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE))


SLIPS = re.findall(r"^\| `(hydra\S+)` \| (.+?) \| ", README[README.index("| you wrote |") :], re.MULTILINE)


@pytest.mark.parametrize(("wrote", "said"), SLIPS)
def test_what_hydra_says_to_a_slip_on_the_command_line(here: RunApp, wrote: str, said: str) -> None:
    chosen = [] if wrote.startswith("hydra.launcher=") else ["hydra/launcher=gpu_pool"]
    done = here.python("train.py", "-m", "lr=1e-3,1e-4", *chosen, wrote)
    assert done.returncode == 1
    for part in said.split(" (…) "):
        assert part in done.stderr


# --- snippets ---

CONFIGURED = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def app(cfg):
    pass

app()
"""


@pytest.mark.parametrize("block", of_kind("yaml"), ids=lambda block: "own" if "- gpu_pool" in block.text else "primary")
def test_a_config_chooses_the_launcher_and_sets_its_keys(run_app: RunApp, tmp_path: Path, block: Block) -> None:
    own = "- gpu_pool" in block.text
    config, launcher = tmp_path / "conf/config.yaml", tmp_path / "conf/hydra/launcher/box.yaml"
    launcher.parent.mkdir(parents=True)
    config.write_text("lr: 0.1" if own else block.text)
    if own:
        launcher.write_text(block.text)
    chosen = ["hydra/launcher=box"] if own else []
    done = run_app(CONFIGURED, *chosen, "--cfg", "hydra", "--package", "hydra.launcher")
    said = yaml.safe_load(done.stdout)
    assert said["_target_"].endswith(".GpuPoolLauncher"), done.stderr
    assert said["per_gpu"] == 2
    assert said["gpus"] == ([0, 1] if own else "auto")


@pytest.mark.parametrize("block", of_kind("python"), ids=str)
def test_a_snippet_runs_as_it_stands(here: RunApp, block: Block) -> None:
    """Its function is given where it has none, and what it comes to is printed where it does not do so itself."""
    if "hydra_zen" in block.text:
        pytest.importorskip("hydra_zen")
    told = "is_main_rank()" if "is_main_rank" in block.text else "10 * lr"
    before = "" if "def train(" in block.text else f"def train(lr): return {told}\n"
    after = "" if "print(" in block.text else "print([outcome.value for outcome in outcomes])"
    done = here(f"{before}{block.text}{after}")
    expected = "[True]" if "is_main_rank" in block.text else "[0.01, 0.001]"
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [expected]), done.stderr


# --- samples of what is printed ---


def shape(line: str) -> str:
    """The line without what differs from run to run: times, pids, slots, what a job of its own comes to, blanks."""
    line = re.sub(r"^\[20\d\d-[^]]+\]", "[time]", line.removeprefix("    ").rstrip())
    line = re.sub(r"multirun/[\d-]+/[\d-]+", "DIR", line)
    line = re.sub(r"in 0:\d\d:\d\d, slots \d+% busy|pid \d+|try \d+", "N", line)
    line = re.sub(r'File "[/…].*|File "train.py".*', "FILE", line)
    line = re.sub(r"\d+\.\d +cpu\.\d", "SECONDS SLOT", line)
    line = re.sub(r"slot cpu\.\d", "SLOT", line)
    line = re.sub(r"\d at once", "N at once", line)
    line = re.sub(r"COMPLETED +0\.\d+", "COMPLETED VALUE", line)
    return " ".join(line.split())


def lines_of(sample: Block) -> list[str]:
    return [shape(line) for line in sample.text.splitlines() if line.strip() != "…"]


def sample(has: str) -> Block:
    (block,) = of_kind("", has)
    return block


def assert_printed(said: list[str], printed: str) -> None:
    lines = {shape(line) for line in printed.splitlines()}
    assert [line for line in said if line not in lines] == []


NIGHT = "python train.py -m lr=0.1,0.01 model=mlp,cnn,vit hydra/launcher=gpu_pool hydra.sweep.dir=sweep"
MORE = ("hydra.launcher.max_retries=1", "hydra.launcher.output=tee")


def test_the_samples_of_a_sweep_in_a_pipe_are_what_it_prints(here: RunApp) -> None:
    printed = shell(here.directory, f"CUDA_VISIBLE_DEVICES= {NIGHT} {' '.join(MORE)}").stdout
    for word in MORE:
        printed = printed.replace(f"{word} ", "")
    assert_printed(lines_of(sample("what failed, and where")), printed)
    assert_printed(lines_of(sample("and has another")), printed.replace("[HYDRA] ", "[HYDRA]\n"))
    assert_printed(lines_of(sample("[1] FloatingPointError")), printed)


def test_the_demo_is_the_first_command_and_prints_what_it_says(here: RunApp, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shlex.split(command.replace("example_app/", "")) == of_kind("sh")[0].commands[0]
    no_gpu, *said = lines_of(sample("2 COMPLETED in"))
    assert re.fullmatch(r"\[time\]\[HYDRA\] CPU only, N at once: no GPU was found", no_gpu)

    (here.directory / "example_app").mkdir()
    (here.directory / "train.py").rename(here.directory / "example_app/train.py")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert_printed(said, shell(here.directory, f"{command} hydra.launcher.gpus=[]").stdout)
