"""The rooms of the package: which way imports point, who talks to the system, and what Hydra's scan loads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydra_plugins.hydra_gpu_pool_launcher as package

ROOT = Path(package.__file__).parent

ORDER = (
    "__init__",
    "gpu_pool_launcher",
    "__main__",
    "_cli",
    "_watch",
    "_status",
    "_logs",
    "_cancel",
    "_gpus",
    "_outside",
    "_map",
    "_sweep",
    "_hydra_body",
    "_hydra_state",
    "_composed",
    "_devices",
    "_ids",
    "_machine",
    "_sysfs",
    "_supervisor",
    "_settled",
    "_start",
    "_link",
    "_fresh",
    "_guard",
    "_world",
    "_channel",
    "_records",
    "_memory",
    "_monitor",
    "_pool",
    "_system",
    "_requests",
    "_schedule",
    "_tries",
    "_queue",
    "_slots",
    "_gauge",
    "_job",
    "_ddp",
    "_stores",
    "_group",
    "_launch",
    "_rank",
    "_forward",
    "_leader",
    "_nodes",
    "_failure",
    "_verdict",
    "_carry",
    "_reimport",
    "_result",
    "_body",
    "_exceptions",
    "_exit_hooks",
    "_environ",
    "_threads",
    "_interpreter",
    "_stacks",
    "_family",
    "_leases",
    "_lease_directory",
    "_line",
    "_lease_files",
    "_process",
    "_pidfd",
    "_inotify",
    "_signals",
    "_descriptors",
    "_streams",
    "_display",
    "_event_lines",
    "_say",
    "_last_words",
    "_summary",
    "_live",
    "_tee",
    "_screen",
    "_printing",
    "_ways",
    "_outlet",
    "_table",
    "_report",
    "_again",
    "_page",
    "_timeline",
    "_sheet",
    "_excerpt",
    "_alike",
    "_markup",
    "_results",
    "_view",
    "_seen",
    "_tail",
    "_resume",
    "_aside",
    "_returns",
    "_journal",
    "_facts",
    "_files",
    "_caps",
    "_vendors",
    "_cards",
    "_driver",
    "_settings",
    "_torchrun",
    "_events",
    "_errors",
    "_model",
)
"""From the top down, as in the design: each room may import those that come after it, and no other."""

LAZY = ("__init__", "gpu_pool_launcher", "__main__")
"""Hydra imports these in every app: they import other rooms inside functions only."""

PROCESS_CALLS = frozenset(
    {"fork", "forkpty", "kill", "killpg", "pidfd_open", "posix_spawn", "posix_spawnp", "system"}
    | {"wait", "wait3", "wait4", "waitid", "waitpid"}
)
"""Of the module os; beside them, whatever needs ctypes, subprocess or multiprocessing to be imported."""

PROCESS_MODULES = frozenset({"ctypes", "multiprocessing", "select", "subprocess"})

ALLOWED = {
    "_machine": {"subprocess", "os.killpg"},  # has the driver asked, and ends that where a broken driver holds it
    "_driver": {"subprocess"},  # is a program of its own, which starts nvidia-smi
    "_interpreter": {"ctypes"},  # asks libcuda and libgomp
    "_reimport": {"multiprocessing"},  # imports an app as multiprocessing does, and starts no process with it
    "_pidfd": {"ctypes", "os.pidfd_open"},
    "_inotify": {"ctypes"},
    "_descriptors": {"ctypes", "select"},
    "_streams": {"ctypes"},  # has the C library flush its buffers
    "_outlet": {"select"},  # asks a terminal whether it takes anything, and no process
    "_family": {"os.kill", "os.killpg", "os.wait4", "os.waitid", "os.waitpid"},  # is about nothing else
}
"""What rooms other than _process do with processes all the same, and why."""

DECIDES = {"__future__", "collections", "collections.abc", "dataclasses", "enum", "functools", "signal"}
"""All that the schedule may import from outside: no clock, no system."""


def _tree(room: str) -> ast.Module:
    return ast.parse((ROOT / f"{room}.py").read_text(encoding="utf-8"))


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(node: ast.AST, *, inside_functions: bool = True, for_types: bool = True) -> Iterator[str]:
    """The modules that the code imports, by their full names; with ``from … import …``, each name is taken for one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = ".".join(filter(None, [package.__name__ if child.level else "", child.module]))
            assert child.level <= 1, "a room imports nothing from above the package"
            yield base
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif (inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))) and (
            for_types or not _is_for_types_only(child)
        ):
            yield from _imports(child, inside_functions=inside_functions, for_types=for_types)


def _rooms(modules: Iterator[str]) -> set[str]:
    """Those of the modules that are rooms of this package."""
    within = (name.removeprefix(f"{package.__name__}.") for name in modules if name.startswith(f"{package.__name__}."))
    return {name for name in (dotted.split(".")[0] for dotted in within) if (ROOT / f"{name}.py").exists()}


def _uses_of_the_system(room: str) -> set[str]:
    tree = _tree(room)
    calls = {
        f"os.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in PROCESS_CALLS
    }
    imported = set(_imports(tree))
    calls |= {name for name in imported if name.startswith("os.") and name.removeprefix("os.") in PROCESS_CALLS}
    return calls | ({name.split(".")[0] for name in imported} & PROCESS_MODULES)


def test_every_module_of_the_package_has_its_place_in_the_order() -> None:
    assert {path.stem for path in ROOT.rglob("*.py")} == set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    allowed = set(ORDER[ORDER.index(room) + 1 :])
    assert _rooms(_imports(_tree(room))) <= allowed


@pytest.mark.parametrize("room", LAZY)
def test_what_hydra_imports_in_every_app_imports_no_room_until_it_is_used(room: str) -> None:
    assert not _rooms(_imports(_tree(room), inside_functions=False, for_types=False))


@pytest.mark.parametrize("room", [room for room in ORDER if room != "_process"])
def test_processes_are_the_business_of_one_room_but_for_what_is_listed_with_its_reason(room: str) -> None:
    assert _uses_of_the_system(room) == ALLOWED.get(room, set())


def test_what_decides_has_no_clock_and_no_system() -> None:
    for room in ("_schedule", "_slots", "_gauge", "_events", "_errors", "_model"):
        outside = {name for name in _imports(_tree(room)) if not name.startswith(package.__name__)}
        modules = {name for name in outside if name in sys.stdlib_module_names or name == "collections.abc"}
        assert modules <= DECIDES | {"typing"}
    assert "_journal" not in _rooms(_imports(_tree("_schedule")))


@pytest.mark.parametrize("room", ORDER)
def test_no_room_imports_a_heavy_library_at_its_top(room: str) -> None:
    heavy = {"torch", "numpy", "rich", "threadpoolctl", "cloudpickle", "pynvml", "jax"}
    assert not {name.split(".")[0] for name in _imports(_tree(room), inside_functions=False)} & heavy


def test_the_check_of_imports_sees_them_in_functions_and_in_every_form() -> None:
    tree = ast.parse(
        f"def f():\n    from . import _pool\n    import {package.__name__}._job\n    from ._process import fork\n"
        f"    from {package.__name__}._journal import Journal\n"
    )
    assert _rooms(_imports(tree)) == {"_pool", "_job", "_process", "_journal"}
    assert not _rooms(_imports(tree, inside_functions=False))


def test_hydras_scan_loads_the_public_module_and_no_other_room_and_no_heavy_library() -> None:
    code = (
        "import json, sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import Launcher;"
        "found = [cls.__name__ for cls in Plugins.instance().discover(Launcher)];"
        "print(json.dumps([found, sorted(sys.modules)]))"
    )
    root = ROOT.parent.parent
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found, loaded = json.loads(answer.stdout)
    assert found.count("GpuPoolLauncher") == 1
    private = {name for name in loaded if name.startswith(f"{package.__name__}._")}
    assert private == {f"{package.__name__}.__main__"}  # which runs nothing there, else it would have loaded others
    assert not {name.split(".")[0] for name in loaded} & {
        "torch",
        "rich",
        "numpy",
        "threadpoolctl",
        "cloudpickle",
        "pynvml",
    }
