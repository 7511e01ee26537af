"""forkserver and spawn: the app is imported again, and all else is as under fork. And auto, which finds the way there.

The apps are real ones, run as users run theirs. Where CUDA is in play, a stand-in for the driver's library answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import LIMIT_S, LOAD_DRIVER, RunApp, build_driver, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors

FRESH = ["forkserver", "spawn"]
ALL = ["fork", *FRESH]

POOL = "from hydra_plugins.hydra_gpu_pool_launcher import GpuPool\n"


def a_pool(method: str, more: str = "gpus=[], cpu_slots=2") -> str:
    return f"GpuPool({more}, dir='sweep', progress='none', start_method={method!r})"


# --- entries ---

HYDRA_APP = """
import functools, os
from dataclasses import dataclass
from typing import Any
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@dataclass
class Conf:
    x: int = 0
    kind: Any = None
    y: str = "${twice:${x}}"

class Own:
    def __init__(self, *values):
        self.values = values

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return Own(*function(*args).values, "decorated")
    return wrapper

@hydra.main(version_base=None, config_name="conf", config_path=None)
@decorated
def main(cfg):
    return Own(cfg.x, int(cfg.y), cfg.kind, HydraConfig.get().job.num, __name__ == "__main__")

def store():
    ConfigStore.instance().store(name="conf", node=Conf)
    ConfigStore.instance().store(group="kind", name="late", node={"k": 3})
    OmegaConf.register_new_resolver("twice", lambda x: 2 * int(x))

if __name__ == "__main__":
    store()
    main()
"""

SCRIPT = """#!/usr/bin/env python3
import sys
from pkg.app import main, store
if __name__ == "__main__":
    sys.argv[0] = "app"
    store()
    sys.exit(main())
"""

SWEEP = """
import sys
returns = self.launcher.launch([["x=1"], ["x=2", "+kind=late"]], 0)
own = (sys.modules["pkg.app"] if "pkg.app" in sys.modules else sys.modules["__main__"]).Own
print("VALUES", [(type(ret.return_value) is own, *ret.return_value.values) for ret in returns])
"""

ENTRIES = {
    "script": ["pkg/app.py"],
    "module": ["-m", "pkg.app"],
    "console script": ["pkg/bin/app"],
    "package": ["-m", "pkg"],
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("method", FRESH)
def test_a_hydra_app_is_run_as_under_fork_however_it_was_started(
    run_app: RunApp, tmp_path: Path, method: str, entry: str
) -> None:
    """A decorated task function, an own class as the result, configs and a resolver from under the guard."""
    write_sweeper(tmp_path, SWEEP)
    package_main = "from pkg.app import main, store\nstore()\nmain()\n"  # without a guard: it is not imported again
    files = {"__init__.py": "", "app.py": HYDRA_APP, "__main__.py": package_main, "bin/app": SCRIPT}
    for name, text in files.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    launcher = ["hydra/launcher=gpu_pool", f"hydra.launcher.start_method={method}", "hydra.launcher.gpus=[]"]
    done = run_app.python(
        *ENTRIES[entry],
        "-m",
        "hydra/sweeper=own",
        *launcher,
        env={"PYTHONPATH": str(tmp_path), "HYDRA_FULL_ERROR": "1"},
    )
    expected = [(True, 1, 2, None, 0, False, "decorated"), (True, 2, 4, {"k": 3}, 1, False, "decorated")]
    assert f"VALUES {expected}" in done.stdout, done.stderr


@pytest.mark.parametrize("method", ALL)
def test_a_plain_function_a_lambda_and_a_closure_are_run_by_all_three(run_app: RunApp, method: str) -> None:
    source = f"""{POOL}
import multiprocessing
class Own(Exception):
    pass
def function(x):
    return Own(x)
def raising(x):
    raise Own(x)
def outer(y):
    def inner(x):
        return Own(x + y)
    return inner
def an_instance():
    class Local:
        def __call__(self, x):
            return Own(x + 9)
    return Local()
named = lambda x: Own(-x)
def values(function):
    outcomes = {a_pool(method)}.map(function, [dict(x=1), dict(x=2)])
    return [(type(o.value or o.error) is Own, *(o.value or o.error).args) for o in outcomes]
if __name__ == "__main__":
    z = 7
    print([values(f) for f in (function, raising, outer(5), named, lambda x: Own(x * z), an_instance())])
    print(multiprocessing.get_start_method(allow_none=True))
"""
    done = run_app(source)
    expected = [[(True, value(1)), (True, value(2))] for value in VALUES]
    assert done.stdout == f"{expected}\nNone\n", done.stderr


VALUES: list[Callable[[int], int]] = [
    lambda x: x,
    lambda x: x,
    lambda x: x + 5,
    lambda x: -x,
    lambda x: x * 7,
    lambda x: x + 9,
]


@pytest.mark.parametrize("method", FRESH)
def test_multiprocessings_start_method_is_in_the_job_what_the_app_made_it(run_app: RunApp, method: str) -> None:
    source = f"""{POOL}
import multiprocessing
def function():
    return multiprocessing.get_start_method(allow_none=True)
if __name__ == "__main__":
    print({a_pool(method)}.map(function, [{{}}])[0].value)
    multiprocessing.set_start_method("spawn")
    print({a_pool(method)}.map(function, [{{}}])[0].value)
"""
    done = run_app(source)
    assert done.stdout == "None\nspawn\n", done.stderr


def test_the_whitelist_of_hydra_main_holds_in_a_fresh_interpreter(run_app: RunApp) -> None:
    pytest.importorskip("hydra._internal.execution_policy", reason="Hydra 1.3 has none")
    source = """
import hydra
from hydra.utils import instantiate
@hydra.main(execution_whitelist=["collections.Counter"])
def main(cfg):
    print(instantiate({"_target_": "collections.Counter"}))
    try:
        instantiate({"_target_": "collections.OrderedDict"})
    except Exception as error:
        print("REFUSED", type(error).__name__)
if __name__ == "__main__":
    main()
"""
    for method in ALL:
        launcher = ["hydra/launcher=gpu_pool", f"hydra.launcher.start_method={method}", "hydra.launcher.gpus=[]"]
        run_app(source, "-m", f"hydra.sweep.dir={method}", *launcher)
        log = (run_app.directory / method / ".gpu_pool/jobs/0/output.log").read_text()
        assert log == "Counter()\nREFUSED InstantiationException\n"


# --- what is refused ---


@pytest.mark.parametrize("method", FRESH)
@pytest.mark.parametrize("caught", ["", "hydra"])
def test_a_hydra_app_without_a_guard_is_refused_and_not_run_twice(run_app: RunApp, method: str, caught: str) -> None:
    call = "main()" if not caught else "try:\n    main()\nexcept BaseException:\n    if __name__ == '__main__': raise"
    source = f"""
import hydra
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    open("ran", "w")
{call}
"""
    launcher = ["hydra/launcher=gpu_pool", f"hydra.launcher.start_method={method}", "hydra.launcher.gpus=[]"]
    done = run_app(source, "-m", "+x=1,2", *launcher)
    assert done.returncode == 1
    assert done.stderr.count("app.py has no `if __name__ == '__main__':` guard: it starts its sweep when") == 1
    assert not (run_app.directory / "ran").exists()


@pytest.mark.parametrize("method", FRESH)
def test_a_pool_without_a_guard_is_refused_and_one_that_is_only_made_is_not(run_app: RunApp, method: str) -> None:
    source = f"""{POOL}
pool = {a_pool(method).replace("dir='sweep', ", "")}
def function():
    return len(os.listdir(os.environ["TMPDIR"]))  # main's own, and that of none that is only there
import os
"""
    temporary = run_app.directory / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    done = run_app(source + "print([o.value for o in pool.map(function, [{}])])", env=env)
    assert done.stdout == ""
    assert "app.py has no `if __name__ == '__main__':` guard" in done.stderr.splitlines()[-1]
    done = run_app(source + "if __name__ == '__main__': print([o.value for o in pool.map(function, [{}])])", env=env)
    assert done.stdout == "[1]\n", done.stderr
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("method", FRESH)
@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_an_app_with_no_file_to_import_is_refused(run_app: RunApp, method: str, how: str) -> None:
    source = f"{POOL}if __name__ == '__main__': {a_pool(method)}.map(print, [{{}}])"
    done = run_app.python("-c", source) if how == "-c" else run_app.python("-", stdin=source)
    assert "this one has no file to import" in done.stderr.splitlines()[-1]
    assert done.returncode == 1


@pytest.mark.parametrize("method", FRESH)
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ValueError('odd')", "app.py cannot be imported again, as start_method: forkserver and spawn must do: "
         "ValueError: odd;"),
        ("sys.exit('not here')", "SystemExit: not here"),
        ("print('last words', flush=True); os._exit(3)", "(the last that it printed: 'last words')"),
    ],
)  # fmt: skip
def test_an_import_that_fails_is_told_with_its_error(run_app: RunApp, method: str, code: str, why: str) -> None:
    source = f"{POOL}import os, sys\nif __name__ != '__main__':\n    {code}\n{a_pool(method)}.map(print, [{{}}])"
    done = run_app(source)
    assert why in done.stderr
    assert done.stdout == ""
    if "raise" in code:
        assert f'  File "{run_app.directory}/app.py", line 4, in <module>' in done.stderr


@pytest.mark.parametrize(
    ("function", "kwargs", "why"),
    [
        ("lambda x: lock", "x=1", "The function cannot be carried into a fresh interpreter"),
        ("print", "x=lock", "kwargs_list[0] cannot be carried into a fresh interpreter"),
        ("print", "x=Late()", "kwargs_list[0] cannot be loaded in a fresh interpreter"),
        ("late", "x=1", "The function cannot be loaded in a fresh interpreter"),
    ],
)
def test_what_cannot_go_along_is_named(run_app: RunApp, function: str, kwargs: str, why: str) -> None:
    source = f"""{POOL}
import threading
if __name__ == "__main__":
    class Late: pass
    def late(x): pass
    lock = threading.Lock()
    {a_pool("forkserver")}.map({function}, [dict({kwargs})])
"""
    done = run_app(source)
    last = done.stderr.splitlines()[-1]
    assert why in last
    assert done.stdout == ""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("registers", "name"),
    [
        ('OmegaConf.register_new_resolver("locked", lambda: lock.locked())', "The resolver 'locked'"),
        (
            'ConfigStore.instance().store(group="kind", name="odd", node=a_local())',
            "The ConfigStore's entry kind/odd.yaml",
        ),
    ],
)
def test_what_is_registered_and_cannot_go_along_is_missed_only_where_the_import_does_not_bring_it(
    run_app: RunApp, registers: str, name: str
) -> None:
    source = f"""
import dataclasses, threading
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
def a_local():
    @dataclasses.dataclass
    class Local:
        x: int = 1
    return Local
def register():
    lock = threading.Lock()
    {registers}
BEFORE
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("RAN")
if __name__ == "__main__":
    AFTER
    main()
"""
    launcher = ["-m", "hydra/launcher=gpu_pool", "hydra.launcher.start_method=forkserver", "hydra.launcher.gpus=[]"]
    app = source.replace("BEFORE", "register()").replace("AFTER", "")
    done = run_app(app, *launcher, "hydra.sweep.dir=out")
    assert "1 COMPLETED" in done.stdout, done.stderr
    app = source.replace("BEFORE", "").replace("AFTER", "register()")
    done = run_app(app, *launcher, "hydra.sweep.dir=out")
    assert f"{name} is not there when the app is imported again" in done.stderr


# --- unsafe, and auto ---

CUDA_APP = f"""{LOAD_DRIVER}{POOL}
import ctypes, os
def count():
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
def job(x):
    return count(), __name__ == "__main__", os.environ["CUDA_VISIBLE_DEVICES"]
"""

IN_MAIN = "if __name__ == '__main__':\n    driver.cuInit(0)\n"

RUN = """
if __name__ == "__main__":
    print([o.value for o in GpuPool(gpus=[0, 1]{more}).map(job, [dict(x=1), dict(x=2)])])
"""


@pytest.fixture
def driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    (tmp_path / "library.py").write_text("import starts")
    (tmp_path / "starts.py").write_text(
        "import os, ctypes\nvisible = os.environ.get('CUDA_VISIBLE_DEVICES')\nctypes.CDLL('./libcuda.so.1').cuInit(0)\n"
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "start_method" in line]


@pytest.mark.usefixtures("driver")
def test_auto_is_fork_where_that_is_safe_and_nothing_is_said_of_it(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + RUN.format(more=""))
    assert done.stdout == "[(3, True, '0'), (3, True, '1')]\n", done.stderr
    assert lines(done) == []


@pytest.mark.usefixtures("driver")
def test_auto_goes_over_to_forkserver_where_main_has_cuda_and_one_line_says_so(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + IN_MAIN + RUN.format(more=""))
    assert done.stdout == "[(3, False, '0'), (3, False, '1')]\n", done.stderr
    (line,) = lines(done)
    assert line.startswith("start_method: forkserver, since in the main process, the CUDA driver is initialised in it")
    assert "jobs are forked from an interpreter that has imported app.py once more; to have fork again, move" in line


@pytest.mark.usefixtures("driver")
def test_auto_goes_over_to_spawn_where_the_import_starts_cuda_and_names_the_module(run_app: RunApp) -> None:
    app = CUDA_APP.replace("return count()", "return library.starts.visible") + "import json, library, csv\n"
    done = run_app(app + RUN.format(more=""))
    assert done.stdout == "[('0', False, '0'), ('1', False, '1')]\n", done.stderr
    (line,) = lines(done)
    assert line.startswith("start_method: spawn, since after the import of starts, the CUDA driver is initialised")
    assert "each job imports app.py once more, in an interpreter of its own; to have fork again, move" in line


@pytest.mark.usefixtures("driver")
def test_where_no_other_module_does_it_the_app_itself_is_named(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + "driver.cuInit(0)\n" + RUN.format(more=""))
    assert "since after the import of app.py, the CUDA driver is initialised" in done.stderr


@pytest.mark.usefixtures("driver")
def test_on_cpu_slots_cuda_is_no_matter(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + "import library\n" + RUN.format(more="").replace("[0, 1]", "[], cpu_slots=1"))
    assert done.stdout == "[(0, True, ''), (0, True, '')]\n", done.stderr
    assert lines(done) == []


@pytest.mark.usefixtures("driver")
def test_fork_and_forkserver_are_refused_where_they_are_not_safe_and_say_what_is(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + IN_MAIN + RUN.format(more=", start_method='fork'"))
    assert "leave start_method at auto, or move what initialises it" in done.stderr.splitlines()[-1]
    done = run_app(CUDA_APP + "import library\n" + RUN.format(more=", start_method='forkserver'"))
    last = done.stderr.splitlines()[-1]
    assert "after the import of starts, the CUDA driver is initialised in it" in last
    assert "move that import into the task function, or use start_method: spawn." in last
    assert done.stdout == ""


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_devices_that_the_app_shows_itself_cannot_beat_the_slot(run_app: RunApp, method: str) -> None:
    own = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n"
    done = run_app(own + CUDA_APP + RUN.format(more=f", start_method='{method}'"))
    if method == "forkserver":
        assert done.stdout == "[(3, False, '0'), (3, False, '1')]\n", done.stderr
    else:
        assert "app.py sets CUDA_VISIBLE_DEVICES when it is imported, over what" in done.stderr.splitlines()[-1]
        assert done.stdout == ""


@pytest.mark.usefixtures("driver")
def test_devices_that_the_import_shows_itself_in_a_job_alone_are_the_jobs_failure(run_app: RunApp) -> None:
    own = "import os\nif 'GPU_POOL_SLOT' in os.environ: os.environ['CUDA_VISIBLE_DEVICES'] = '7'\n"
    done = run_app(own + CUDA_APP + RUN.format(more=", start_method='spawn'").replace("o.value", "str(o.error)"))
    assert "job 0 (x=1) was not run: The app sets CUDA_VISIBLE_DEVICES='7' when it is imported" in done.stdout


def test_what_torch_says_of_a_fork_is_asked_after_the_import_too(run_app: RunApp) -> None:
    """A stand-in under torch's name, which refuses in every fork of the process that imported it."""
    (run_app.directory / "torch").mkdir()
    (run_app.directory / "torch/__init__.py").write_text("from . import cuda\n")
    (run_app.directory / "torch/cuda.py").write_text(
        "import os\nat = os.getpid()\ndef _is_in_bad_fork():\n    return os.getpid() != at\n"
    )
    done = run_app("import torch\n" + POOL + "def job(x):\n    return x\n" + RUN.format(more=""))
    assert done.stdout == "[1, 2]\n", done.stderr
    assert "start_method: spawn, since after the import of app.py, something in it has called a torch" in done.stderr


@pytest.mark.usefixtures("driver")
def test_an_app_that_can_only_be_forked_and_cannot_is_told_both(run_app: RunApp) -> None:
    done = run_app(CUDA_APP + "driver.cuInit(0)\n" + RUN.format(more="").replace('if __name__ == "__main__":', "if 1:"))
    last = done.stderr.splitlines()[-1]
    assert "app.py has no `if __name__ == '__main__':` guard" in last
    assert "start_method: fork; fork is not safe here, since the CUDA driver is initialised in it" in last


BATCHES = """
import __main__
values = []
for batch in range(3):
    __main__.OmegaConf.register_new_resolver("batch", lambda batch=batch: batch, replace=True)
    values += [ret.return_value for ret in self.launcher.launch([["+x=1"]], batch)]
print("VALUES", values, open("imports").read().count("import"))
"""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "expected"),
    [("fork", [0, 1, 2]), ("spawn", [0, 1, 2]), ("forkserver", ["none", "none", "none"])],
)
def test_each_batch_sees_the_newest_state_but_for_forkserver_which_imports_the_app_once(
    run_app: RunApp, tmp_path: Path, method: str, expected: list[object]
) -> None:
    write_sweeper(tmp_path, BATCHES)
    source = """
import hydra
from omegaconf import OmegaConf
with open("imports", "a") as file:
    file.write("import ")
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return OmegaConf.create({"a": "${batch:}"}).a if OmegaConf.has_resolver("batch") else "none"
if __name__ == "__main__":
    main()
"""
    launcher = ["hydra/launcher=gpu_pool", f"hydra.launcher.start_method={method}", "hydra.launcher.gpus=[]"]
    done = run_app(source, "-m", "hydra/sweeper=own", *launcher)
    imports = {"fork": 1, "forkserver": 2, "spawn": 5}[method]  # with main's, and in spawn the one to see how it goes
    assert f"VALUES {expected} {imports}" in done.stdout, done.stderr


@pytest.mark.gpu
def test_with_the_real_driver_auto_is_forkserver_and_its_jobs_can_use_the_gpu(run_app: RunApp) -> None:
    source = f"""{POOL}
import ctypes
def job(x):
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    return driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value
if __name__ == "__main__":
    try:
        print(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        print("no driver")
    else:
        print([o.value for o in GpuPool(gpus=[0]).map(job, [dict(x=1), dict(x=2)])])
"""
    done = run_app(source)
    if done.stdout == "no driver\n":
        pytest.skip("there is no GPU driver here")
    assert done.stdout == "0\n[(0, 0, 1), (0, 0, 1)]\n", done.stderr
    assert lines(done)[0].startswith("start_method: forkserver, since in the main process")


# --- the job's world ---


@pytest.mark.parametrize("method", ALL)
def test_unseeded_jobs_draw_different_numbers_and_a_seed_from_the_import_holds(run_app: RunApp, method: str) -> None:
    pytest.importorskip("numpy")
    source = f"""{POOL}
import random
import numpy
SEED
def draw():
    return random.random(), numpy.random.random()
if __name__ == "__main__":
    first = draw()
    values = [o.value for o in {a_pool(method)}.map(draw, [{{}}, {{}}])]
    as_alone = (draw() if {method!r} == "fork" else first) == values[0]
    print(len({{x for x, _ in values}}), len({{y for _, y in values}}), as_alone)
"""
    assert run_app(source.replace("SEED", "")).stdout == "2 2 False\n"
    assert run_app(source.replace("SEED", "random.seed(1); numpy.random.seed(1)")).stdout == "1 1 True\n"


def test_openmp_that_the_import_has_warmed_hangs_no_job_of_forkserver(run_app: RunApp) -> None:
    pytest.importorskip("torch")
    source = f"""{POOL}
import torch
torch.set_num_threads(2)
product = lambda: (torch.ones(512, 512) @ torch.ones(512, 512)).exp().isinf().all().item()
product()
def job():
    return product()
if __name__ == "__main__":
    print([o.value for o in GpuPool(gpus=[], cpu_slots=2, threads_per_job=2, start_method="forkserver",
                                    progress="none").map(job, [{{}}, {{}}])])
"""
    done = run_app(source)
    assert done.stdout == "[True, True]\n", done.stderr


@pytest.mark.parametrize("method", ALL)
def test_a_job_sees_the_environment_the_directory_and_the_threads_that_are_its_own(
    run_app: RunApp, method: str
) -> None:
    source = f"""{POOL}
import os
import signal
at_import = os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
def job():
    names = ["GPU_POOL_JOB_NUM", "GPU_POOL_SLOT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OWN"]
    names.append("PYTORCH_NVML_BASED_CUDA_CHECK")
    descriptors = len(os.listdir("/proc/self/fd")) - 1  # it needs one itself; three streams, the pipe of its signals
    clean = not blocked and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return [os.environ.get(name) for name in names], os.path.basename(os.getcwd()), at_import, descriptors, clean, \\
        os.getsid(0) == os.getpid(), open("/proc/self/oom_score_adj").read().strip()
if __name__ == "__main__":
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    os.environ["OWN"] = "mine"
    score = int(open("/proc/self/oom_score_adj").read())
    pool = GpuPool(gpus=[], cpu_slots=1, threads_per_job=3, start_method={method!r}, progress="none")
    value = pool.map(job, [{{}}])[0].value
    print(value[:-1], int(value[-1]) - score)
"""
    done = run_app(source)
    at_import = {"fork": (None, None), "forkserver": (None, "1"), "spawn": ("3", None)}[method]
    expected: tuple[object, ...] = (["0", "cpu.0", "", "3", "mine", None], "elsewhere", at_import, 5, True, True)
    assert done.stdout == f"{expected} 300\n", done.stderr


def test_handlers_threads_and_children_of_the_import_are_its_own_under_forkserver(run_app: RunApp) -> None:
    """Its child is spared while jobs end, and gone when the sweep is; its directory is removed by its own hook."""
    source = f"""{POOL}
import os, signal, subprocess, sys, tempfile, threading
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
heard = []
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if __name__ != "__main__":
    threading.Thread(target=threading.Event().wait, name="of the import", daemon=True).start()
    child = subprocess.Popen(["sleep", "1000"])
    temporary = tempfile.TemporaryDirectory()
    print("printed at import")
def job():
    os.kill(os.getpid(), signal.SIGUSR1)
    alive = open(f"/proc/{{child.pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    return heard, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and alive, child.pid, temporary.name
if __name__ == "__main__":
    outcomes = GpuPool(gpus=[], cpu_slots=1, start_method="forkserver", dir="sweep").map(job, [{{}}] * 3)
    for o in outcomes:
        heard, default, pid, directory = o.value
        print(heard, default, os.path.exists(f"/proc/{{pid}}"), os.path.exists(directory))
    print(len({{o.value[2] for o in outcomes}}))
"""
    done = run_app(source)
    assert done.stdout == "[1] True False False\n" * 3 + "1\n", done.stderr
    assert "another thread runs in the interpreter that has imported the app (of the import)" in done.stderr
    assert (run_app.directory / "sweep/.gpu_pool/supervisor.log").read_text() == "printed at import\n"


def test_what_a_spawned_jobs_import_registers_for_its_exit_is_the_jobs_own(run_app: RunApp) -> None:
    source = f"""{POOL}
import atexit, tempfile
import signal
temporary = tempfile.TemporaryDirectory()
atexit.register(print, "hook")
signal.signal(signal.SIGTERM, print)
def job():
    print("job", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    return temporary.name
if __name__ == "__main__":
    import os
    (o,) = GpuPool(gpus=[], cpu_slots=1, start_method="spawn", progress="none", dir="sweep").map(job, [{{}}])
    print(os.path.exists(o.value), o.value != temporary.name, os.path.exists(temporary.name))
"""
    done = run_app(source)
    assert done.stdout == "False True True\nhook\n", done.stderr
    assert (run_app.directory / "sweep/.gpu_pool/jobs/0/output.log").read_text() == "job True\nhook\n"


DEATHS = {
    "raise Own('text')": "Own('text')",
    "sys.exit(0)": "None",
    "sys.exit(3)": "JobCrashedError: called sys.exit(3)",
    "os._exit(4)": "JobCrashedError: ended with exit code 4 and without a result",
    "os.kill(os.getpid(), signal.SIGKILL)": "JobCrashedError: was ended by SIGKILL",
    "os.kill(os.getpid(), signal.SIGTERM)": "JobCancelledError: was cancelled: SIGTERM was sent to its process",
    "os.killpg(0, signal.SIGKILL)": "JobCrashedError: was ended by SIGKILL",
    "return lambda: 1": "JobError: returned a value of type function that cannot be sent",
    "subprocess.Popen(['sleep', '1000'])": "None",
    "raise KeyboardInterrupt": "JobError: raised KeyboardInterrupt",
}


@pytest.mark.parametrize("method", ALL)
def test_the_deaths_of_jobs_are_the_same_by_every_method(run_app: RunApp, method: str) -> None:
    cases = "".join(f"    if x == {i}:\n        {code}\n" for i, code in enumerate(DEATHS))
    source = f"""{POOL}
import os, signal, subprocess, sys
class Own(Exception):
    pass
def job(x):
{cases}
    return x if x >= {len(DEATHS)} else None
if __name__ == "__main__":
    for o in {a_pool(method)}.map(job, [dict(x=x) for x in range({len(DEATHS)} + 1)]):
        own = o.error is None or type(o.error) is Own
        print(repr(o.error) if own else f"{{type(o.error).__name__}}: {{o.error.why}}")
    print(o.value)
"""
    done = run_app(source)
    *told, none, last = done.stdout.splitlines()
    for line, expected in zip(told, DEATHS.values(), strict=True):
        assert line.startswith(expected), done.stdout
    assert (none, last) == ("None", str(len(DEATHS)))
    journal = (run_app.directory / "sweep/.gpu_pool/journal.jsonl").read_text()
    assert journal.count('"error_type": "__main__.Own"') == 1


# --- nothing is left behind ---

SLEEPER = """
import os, signal, subprocess, sys
{pool}
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
def report(text):
    os.write({lifeline}, f"{{os.getpid()}} {{text}}\\n".encode())
def sleeping(x):
    report("job")
    signal.pause()
if __name__ == "__mp_main__":
    {at_import}
if __name__ == "__main__":
    GpuPool(gpus=[], cpu_slots=2, kill_grace_s=0.2, dir="sweep", start_method={method!r}).map(
        sleeping, [dict(x=x) for x in range(3)])
"""


@dataclass
class Running:
    """An app that runs, and the pipe that ends when the last of its processes has."""

    process: subprocess.Popen[str]
    lifeline: int
    _unread: bytes = field(default=b"")

    def report(self) -> list[str]:
        """Block until the next line; [] when everybody is gone."""
        while b"\n" not in self._unread:
            assert _descriptors.wait_readable([self.lifeline], LIMIT_S), "nothing is reported, nobody is gone"
            got = os.read(self.lifeline, 4096)
            if not got:
                return []
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().split()

    def child(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(method: str, at_import: str = "pass") -> Running:
        read, write = os.pipe()
        text = SLEEPER.format(pool=POOL, lifeline=write, at_import=at_import, method=method)
        (tmp_path / "app.py").write_text(text)
        process = subprocess.Popen(
            [sys.executable, "app.py"], cwd=tmp_path, pass_fds=[write], stderr=subprocess.PIPE, text=True
        )
        os.close(write)
        running.append(Running(process, read))
        return running[-1]

    yield begin
    for app in running:
        with contextlib.suppress(ProcessLookupError):
            app.process.kill()
        app.process.communicate(timeout=LIMIT_S)
        os.close(app.lifeline)


@pytest.mark.parametrize("method", FRESH)
@pytest.mark.parametrize(
    ("who", "signum"),
    [
        ("main", signal.SIGKILL),
        ("main", signal.SIGTERM),
        ("main", signal.SIGINT),
        ("guard", signal.SIGKILL),
        ("supervisor", signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_sweep_that_is_killed(
    start: Callable[..., Running], method: str, who: str, signum: signal.Signals
) -> None:
    app = start(method)
    assert {app.report()[1], app.report()[1]} == {"job"}
    guard = app.child(app.process.pid)
    os.kill({"main": app.process.pid, "guard": guard, "supervisor": app.child(guard)}[who], signum)
    assert app.report() == []
    app.process.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("who", "signum"),
    [("main", signal.SIGKILL), ("main", signal.SIGINT), ("main", signal.SIGTERM), ("guard", signal.SIGKILL)],
)
def test_nothing_is_left_of_an_import_that_hangs_when_its_sweep_is_ended(
    start: Callable[..., Running], who: str, signum: signal.Signals
) -> None:
    child = "" if who == "guard" else "subprocess.Popen(['sleep', '1000']); "
    app = start("forkserver", f"{child}report('import'); signal.pause()")
    assert app.report()[1] == "import"
    os.kill(app.process.pid if who == "main" else app.child(app.process.pid), signum)
    assert app.report() == []
    assert app.process.wait(LIMIT_S) == (-signum if who == "main" else 1)
