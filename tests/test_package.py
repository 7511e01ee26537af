"""The package as users get it: what the wheel holds and asks for, and that it works alone, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hydra_plugins.hydra_gpu_pool_launcher import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = "hydra_plugins/hydra_gpu_pool_launcher"
NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "build", "dist", "multirun", "outputs")

APP = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    pass

app()
"""


def run(*command: str | Path) -> str:
    """The standard output of a command that must succeed; where it fails, pytest shows all it said."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with sdist and wheel, made as for a release: the wheel from the sdist, so that both are whole.

    They are built from a copy, since setuptools leaves files in the source, and takes what an earlier build left there.
    """
    source, out = tmp_path_factory.mktemp("source") / "gpu_pool", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def needed(metadata: Message) -> dict[str, Distribution]:
    """What the wheel needs without any extra, and what that needs, by canonical name: as installed here."""
    found: dict[str, Distribution] = {}
    queue: list[str] = metadata.get_all("Requires-Dist", [])
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        queue += found[name].requires or []
    return found


def copy_to(site: Path, installed: Distribution) -> None:
    """Put an installed distribution into another environment's site-packages, where no registry can be reached too."""
    for file in installed.files or []:
        if ".." not in file.parts and file.suffix != ".pyc":
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), site / file)


@pytest.fixture(scope="module")
def python(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and what it needs, and nothing else."""
    env = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", env)
    python = env / "bin" / "python"
    site = Path(run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for installed in needed(metadata).values():
        copy_to(site, installed)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    run(*pip, "check")
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    info = f"hydra_gpu_pool_launcher-{__version__}.dist-info"
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    modules = {f"{PACKAGE}/{path.name}" for path in (ROOT / PACKAGE).glob("*.py")}
    data = {f"{PACKAGE}/{name}" for name in ("page.css", "page.js", "py.typed")}

    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {*modules, *data, *(f"{info}/{name}" for name in about)}


def test_the_sdist_can_be_developed_from(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert names >= {
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "benchmarks/README.md",
        "example_app/conf/hydra/launcher/box.yaml",
        "example_app/train.py",
        "pyproject.toml",
        "requirements/constraints.txt",
        "setup.py",
        "tests/test_package.py",
        f"{PACKAGE}/page.css",
        f"{PACKAGE}/page.js",
        f"{PACKAGE}/py.typed",
    }


def test_the_metadata_says_what_is_needed_and_pins_nothing(metadata: Message) -> None:
    assert metadata["Name"] == "hydra-gpu-pool-launcher"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License"] == "MIT"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "browser",
        "clients",
        "ddp",
        "dev",
        "example",
        "gpu",
        "ray",
        "title",
    }

    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert {str(one) for one in requirements if one.marker is None} == {
        "cloudpickle",
        "hydra-core>=1.3",
        "rich",
        "threadpoolctl",
    }
    assert {part.operator for one in requirements for part in one.specifier} <= {">="}


def test_the_readme_is_the_long_description(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_extras_are_not_needed(metadata: Message) -> None:
    assert needed(metadata).keys().isdisjoint({"torch", "numpy", "nvidia-ml-py"})


def test_hydra_shows_the_launcher_of_the_installed_wheel_without_torch(python: Path, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)

    assert "None" in run(python, "-I", "-c", "from importlib.util import find_spec; print(find_spec('torch'))")
    assert "GpuPoolLauncher" in run(python, "-I", app, "--info", "plugins")


def test_the_command_is_installed_and_works_in_both_ways_without_torch(python: Path, tmp_path: Path) -> None:
    script = python.with_name("gpu-pool")

    for command in ((script,), (python, "-I", "-m", "hydra_plugins.hydra_gpu_pool_launcher")):
        assert run(*command, "--version") == f"gpu_pool {__version__}\n"
        assert '"cpu_slots"' in run(*command, "gpus", "--json")
    journal = tmp_path / ".gpu_pool" / "journal.jsonl"
    journal.parent.mkdir()
    journal.write_text('{"event": "queued", "time": 1, "job": 0, "overrides": []}\n')
    assert "1 queued" in run(script, "status", tmp_path)


def test_a_type_checker_sees_the_installed_package_as_typed(python: Path) -> None:
    where = "import hydra_plugins.hydra_gpu_pool_launcher as p; print(p.__file__)"

    assert Path(run(python, "-I", "-c", where).strip()).with_name("py.typed").exists()
