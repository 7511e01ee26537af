"""Where main cannot be forked from, that is said before anything starts; where it no longer can, the last fork serves.

There is no GPU here: a stand-in for the driver library, mapped into the app as torch maps the real one, answers as the
driver does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import LOAD_DRIVER as LOAD
from support import RunApp, build_driver, write_sweeper

SWEEP = """
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool
print([o.value for o in GpuPool(gpus=GPUS, start_method="fork").map(abs_, [dict(x=-1), dict(x=-2)])])
"""

APP = "GPUS = [0, 1]\ndef abs_(x): return abs(x)\n"


@pytest.fixture
def driver(tmp_path: Path) -> None:
    """A libcuda.so.1 in the app's directory."""
    build_driver(tmp_path)


@pytest.mark.usefixtures("driver")
def test_a_driver_that_is_mapped_and_not_initialised_is_no_obstacle(run_app: RunApp) -> None:
    done = run_app(APP + LOAD + SWEEP)
    assert done.stdout == "[1, 2]\n", done.stderr


@pytest.mark.usefixtures("driver")
def test_cuda_initialised_in_main_is_refused_with_the_remedy(run_app: RunApp) -> None:
    done = run_app(APP + LOAD + "driver.cuInit(0)\n" + SWEEP)
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert "gpu_pool cannot fork jobs from this process: the CUDA driver is initialised in it" in last
    assert "into the task function." in last


@pytest.mark.usefixtures("driver")
def test_cuda_initialised_in_main_is_no_matter_where_no_job_sees_a_gpu(run_app: RunApp) -> None:
    done = run_app(APP + LOAD + "driver.cuInit(0)\nGPUS = []\n" + SWEEP)
    assert done.stdout == "[1, 2]\n", done.stderr


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (
            {"torch": "", "torch.cuda": "_is_in_bad_fork = lambda: True"},  # CUDA, and HIP
            "something in it has called a torch.cuda or torch.xpu function",
        ),
        (
            {
                "torch": "",
                "torch.cuda": "_is_in_bad_fork = lambda: False",
                "torch.xpu": "_is_in_bad_fork = lambda: True",
            },
            "something in it has called a torch.cuda or torch.xpu function",
        ),
        ({"jax._src.xla_bridge": "backends_are_initialized = lambda: True"}, "a JAX backend is initialised in it"),
    ],
)
def test_what_torch_and_jax_say_of_a_fork_is_heard(run_app: RunApp, modules: dict[str, str], why: str) -> None:
    """Neither is imported for it: these are stand-ins under their names."""
    source = "import sys, types\n"
    for name, code in modules.items():
        source += f"module = sys.modules[{name!r}] = types.ModuleType({name!r})\nexec({code!r}, vars(module))\n"
    done = run_app(APP + source + SWEEP)
    assert done.stdout == ""
    assert why in done.stderr.splitlines()[-1]


TOUCHING = """
import __main__
values = []
for batch in range(3):
    values += [ret.return_value for ret in self.launcher.launch([["+x=1"], ["+x=2"]], 2 * batch)]
    __main__.driver.cuInit(0)
print("VALUES", values)
"""


@pytest.mark.usefixtures("driver")
def test_cuda_initialised_between_batches_leaves_the_last_clean_supervisor_in_service(
    run_app: RunApp, tmp_path: Path
) -> None:
    write_sweeper(tmp_path, TOUCHING)
    source = f"""{LOAD}
import ctypes, hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return cfg.x, driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))  # 3: not initialised in the job

if __name__ == "__main__":
    main()
"""
    done = run_app(source, "-m", "hydra/launcher=gpu_pool", "hydra/sweeper=own", "hydra.launcher.gpus=[0,1]")
    assert f"VALUES {[(1, 3), (2, 3)] * 3}" in done.stdout, done.stderr


def test_a_lock_of_logging_that_is_not_to_be_had_delays_a_fork_and_no_more(run_app: RunApp) -> None:
    source = """
import logging, threading
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

class Odd(logging.Handler):
    def createLock(self):
        self.lock = self

    def acquire(self, *_):
        pass

    release = __enter__ = __exit__ = acquire

    def emit(self, record):
        pass

held = [logging.NullHandler() for _ in range(70)]
for handler in held:
    handler.lock = threading.RLock()
logging.getLogger().addHandler(Odd())

def hold():
    for handler in held:
        handler.lock.acquire()
    ready.set()
    done.wait()
    for handler in held:
        handler.lock.release()

ready, done = threading.Event(), threading.Event()
threading.Thread(target=hold).start()
ready.wait()
print([o.value for o in GpuPool(gpus=[], cpu_slots=1, progress="none").map(abs, [])], end=" ")
print([o.value for o in GpuPool(gpus=[], cpu_slots=1, progress="none").map(lambda: 1, [{}])])
done.set()
"""
    done = run_app(source)
    assert done.stdout == "[] [1]\n", done.stderr


@pytest.mark.gpu
def test_the_real_driver_answers_as_the_stand_in_does(run_app: RunApp) -> None:
    source = """
import ctypes
from hydra_plugins.hydra_gpu_pool_launcher import _interpreter
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no driver")
else:
    print(_interpreter.cuda_state())
    driver.cuInit(0)
    print(_interpreter.cuda_state())
"""
    done = run_app(source)
    if done.stdout == "no driver\n":
        pytest.skip("there is no GPU driver here")
    assert done.stdout == "None\nthe CUDA driver is initialised in it, and no fork of it can use a GPU\n", done.stderr
