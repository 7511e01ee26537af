"""A sweep as its user sees it: the command line, the configuration, the files, the lines, and JobReturns in order."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import RunApp, write_sweeper

POOL = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra.job.num}")

APP = """
import json, os, sys, threading
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path=None)
def main(cfg):
{body}

main()
"""


def app(body: str) -> str:
    """An app whose task function has this body."""
    return APP.format(body="\n".join(f"    {line}" for line in body.splitlines()))


def journal(tmp_path: Path, event: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "sweep/.gpu_pool/journal.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def output(tmp_path: Path, num: int) -> str:
    return (tmp_path / f"sweep/.gpu_pool/jobs/{num}/output.log").read_text()


# --- what comes back ---

BATCHES = """
returns, numbers_from = [], 3
for start in (0, 3):
    batch = [[*arguments, f"+x={{start + i}}"] for i in (1, 2, 3)]
    if start:
{between}
    returns += self.launcher.launch(batch, initial_job_idx=start and numbers_from)
for ret in returns:
    job = ret.hydra_cfg and ret.hydra_cfg.hydra.job
    print("RETURN", list(ret.overrides), ret.status.name, repr(ret._return_value), ret.task_name,
          job and (job.id, job.num), flush=True)
"""


@dataclass(frozen=True)
class RunBatches:
    """Runs an app under a sweeper that launches two batches of three jobs, +x=1 to +x=6, and prints what comes back."""

    run_app: RunApp

    def __call__(
        self, body: str, *arguments: str, between: str = "pass", before: str = ""
    ) -> subprocess.CompletedProcess[str]:
        lines = textwrap.indent(textwrap.dedent(between), "        ")
        write_sweeper(self.run_app.directory, BATCHES.format(between=lines))
        return self.run_app(before + app(body), *POOL, "hydra/sweeper=own", *arguments)


@pytest.fixture
def run_batches(run_app: RunApp) -> RunBatches:
    return RunBatches(run_app)


def returns(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line[7:] for line in done.stdout.splitlines() if line.startswith("RETURN ")]


def test_job_returns_come_in_the_order_of_the_overrides_with_numbers_through_all_batches(
    run_batches: RunBatches,
) -> None:
    lines = returns(run_batches("return cfg.x * 10"))
    assert lines == [f"['+x={x}'] COMPLETED {x * 10} app ('{x - 1}', {x - 1})" for x in range(1, 7)]


def test_each_job_has_its_own_directory_through_all_batches(run_batches: RunBatches, tmp_path: Path) -> None:
    run_batches("return HydraConfig.get().runtime.output_dir")
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == [".gpu_pool", *"012345"]
    for num in range(6):
        assert (tmp_path / f"sweep/{num}/.hydra/overrides.yaml").read_text() == f"- +x={num + 1}\n"


def test_launch_raises_for_no_job_and_keeps_each_in_its_place(run_batches: RunBatches) -> None:
    body = """
        if cfg.x == 2: raise ValueError("two")
        if cfg.x == 3: sys.exit(3)
        if cfg.x == 4: sys.exit()
        if cfg.x == 5: os.kill(os.getpid(), 9)
        return cfg.x"""
    lines = returns(run_batches(textwrap.dedent(body)))
    assert [line.split()[1] for line in lines] == [
        "COMPLETED", "FAILED", "FAILED", "COMPLETED", "FAILED", "COMPLETED",
    ]  # fmt: skip
    assert "ValueError('two') app ('1', 1)" in lines[1]
    assert "JobCrashedError(2, ('+x=3',), 'called sys.exit(3)') app ('2', 2)" in lines[2]
    assert "None app ('3', 3)" in lines[3]
    assert "JobCrashedError(4, ('+x=5',), 'was ended by SIGKILL" in lines[4]


def test_values_that_hydra_sweepers_take_arrive_untouched(run_batches: RunBatches) -> None:
    body = "return {1: float('nan'), 2: (1, float('inf')), 3: {'a': [1]}, 4: 'x', 5: None, 6: True}[cfg.x]"
    lines = returns(run_batches(body))
    assert [line.split(" COMPLETED ")[1].split(" app ")[0] for line in lines] == [
        "nan", "(1, inf)", "{'a': [1]}", "'x'", "None", "True",
    ]  # fmt: skip


def test_a_failed_job_fails_the_command_with_the_traceback_from_the_job(run_app: RunApp) -> None:
    done = run_app(app("if cfg.x == 2: the_culprit()\nreturn cfg.x"), *POOL, "+x=1,2,3")
    assert done.returncode == 1
    assert "in the job's process" in done.stderr or "the_culprit" in done.stderr
    assert "NameError: name 'the_culprit' is not defined" in done.stderr


def test_an_error_before_the_task_function_is_the_jobs_own(run_batches: RunBatches) -> None:
    before = """
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("picky", lambda: 1 / 0 if os.environ["GPU_POOL_JOB_NUM"] == "2" else 7)
import os
"""
    lines = returns(
        run_batches("return cfg.y", "+y=${picky:}", "hydra.sweep.subdir=${hydra.job.num}_${y}", before=before)
    )
    assert ["FAILED" in line for line in lines] == [False, False, True, False, False, False]
    assert "ZeroDivisionError" in lines[2]


# --- what the next batch finds ---


def test_the_second_batch_finds_what_the_sweeper_did_between(run_batches: RunBatches) -> None:
    between = 'os.environ["BETWEEN"] = "set"\nOmegaConf.register_new_resolver("between", lambda: "resolved")'
    body = "return os.getenv('BETWEEN'), OmegaConf.has_resolver('between')"
    lines = returns(run_batches(body, between=between))
    assert ["(None, False)" in line for line in lines] == [True] * 3 + [False] * 3
    assert ["('set', True)" in line for line in lines] == [False] * 3 + [True] * 3


def test_with_a_thread_in_main_the_second_batch_still_finds_the_environment(
    run_batches: RunBatches, tmp_path: Path
) -> None:
    between = """
threading.Thread(target=threading.Event().wait, daemon=True, name="logger").start()
os.environ["BETWEEN"] = "set"
os.makedirs("elsewhere"); os.chdir("elsewhere")"""
    body = "return os.getenv('BETWEEN'), os.path.basename(os.getcwd())"
    lines = returns(run_batches(body, f"hydra.sweep.dir={tmp_path}/sweep", between=between))
    assert ["(None," in line for line in lines] == [True] * 3 + [False] * 3
    assert ["('set', 'elsewhere')" in line for line in lines] == [False] * 3 + [True] * 3


def test_a_sweeper_that_gives_the_same_numbers_again_gets_no_old_results(run_batches: RunBatches) -> None:
    lines = returns(run_batches("os._exit(7) if cfg.x == 4 else None\nreturn cfg.x", between="numbers_from = 0"))
    assert "COMPLETED 1 app" in lines[0]
    assert "ended with exit code 7" in lines[3]
    assert "COMPLETED 5 app ('1', 1)" in lines[4]


def test_a_relative_sweep_directory_follows_main_to_another_place(run_batches: RunBatches, tmp_path: Path) -> None:
    between = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.makedirs("elsewhere"); os.chdir("elsewhere")"""
    lines = returns(run_batches("return cfg.x", between=between))
    assert ["COMPLETED" in line for line in lines] == [True] * 6
    assert (tmp_path / "elsewhere/sweep/.gpu_pool/jobs/5/outcome.json").exists()


def test_a_supervisor_that_was_killed_between_batches_is_replaced(run_batches: RunBatches) -> None:
    between = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
from pathlib import Path
guard = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0]
os.kill(int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0]), 9)
os.waitid(os.P_PID, int(guard), os.WEXITED | os.WNOWAIT)"""
    lines = returns(run_batches("return cfg.x", between=between))
    assert ["COMPLETED" in line for line in lines] == [True] * 6


@pytest.mark.parametrize(
    ("between", "supervisors"),
    [("pass", 2), ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 1)],
)
def test_the_supervisor_is_forked_anew_for_each_batch_while_main_is_clean(
    run_batches: RunBatches, between: str, supervisors: int
) -> None:
    lines = returns(run_batches("return os.getppid()", between=between))
    assert len({line.split(" COMPLETED ")[1].split()[0] for line in lines}) == supervisors


def test_a_supervisor_that_was_forked_in_a_thread_outlives_it(run_app: RunApp, tmp_path: Path) -> None:
    """What the kernel ends with its parent ends with the thread that forked it: that may be none of main's."""
    setup = """
    def setup(self, **kwargs):
        def set_up():
            self.launcher = Plugins.instance().instantiate_launcher(**kwargs)
        thread = threading.Thread(target=set_up)
        thread.start()
        thread.join()
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that it is not forked anew
"""
    write_sweeper(tmp_path, BATCHES.format(between="        pass"))
    with (tmp_path / "hydra_plugins/own_sweeper.py").open("a") as file:
        file.write(setup)
    lines = returns(run_app(app("return os.getppid()"), *POOL, "hydra/sweeper=own"))
    assert ["COMPLETED" in line for line in lines] == [True] * 6
    assert len({line.split(" COMPLETED ")[1].split()[0] for line in lines}) == 1


def test_threads_in_main_at_setup_are_named_in_one_warning(run_app: RunApp) -> None:
    source = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='logger').start()\n"
    done = run_app(source + app("return 1"), *POOL, "+x=1,2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("another thread runs in the main process (logger)") == 1


# --- the right GPU ---


def test_resolvers_and_callbacks_see_the_slot_of_their_job(run_app: RunApp, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seen: ${oc.env:CUDA_VISIBLE_DEVICES}\nx: 0\nmine: ${mine:}\n")
    source = """
import os, hydra
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("mine", lambda: os.environ["CUDA_VISIBLE_DEVICES"])

class Seen(Callback):
    def on_job_start(self, config, **_):
        print("callback", os.environ["CUDA_VISIBLE_DEVICES"], config.seen)

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    print("task", cfg.seen, cfg.mine, os.environ["GPU_POOL_JOB_NUM"])

if __name__ == "__main__":
    main()
"""
    callback = "+hydra.callbacks.seen._target_=__main__.Seen"
    done = run_app(source, *POOL, "x=1,2", "hydra.launcher.gpus=[4,6]", callback, env={"HYDRA_FULL_ERROR": "1"})
    assert done.returncode == 0, done.stderr
    assert output(tmp_path, 0) == "callback 4 4\ntask 4 4 0\n"
    assert output(tmp_path, 1) == "callback 6 6\ntask 6 6 1\n"


def test_ids_are_indices_into_an_inherited_list(run_app: RunApp, tmp_path: Path) -> None:
    body = "return os.environ['CUDA_VISIBLE_DEVICES']"
    done = run_app(app(body), *POOL, "+x=1,2", "hydra.launcher.gpus=[1,2]", env={"CUDA_VISIBLE_DEVICES": "1,3,5,7"})
    assert done.returncode == 0, done.stderr
    assert [end["value"] for end in sorted(journal(tmp_path, "end"), key=lambda e: e["job"])] == ["3", "5"]


def test_threads_that_env_set_asks_for_are_the_users_choice_and_none_is_added(run_app: RunApp) -> None:
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GPU_POOL_THREADS"
    done = run_app(
        app(f"print([os.environ.get(name) for name in {names}])"),
        *POOL,
        "+x=1",
        "hydra.launcher.output=tee",
        "+hydra.job.env_set.OMP_NUM_THREADS='7'",
    )
    assert "['7', None, None]" in done.stdout


def test_a_visibility_variable_in_env_set_is_refused_and_others_arrive(run_app: RunApp, tmp_path: Path) -> None:
    refused = run_app(app("return 1"), *POOL, "+x=1", "+hydra.job.env_set.CUDA_VISIBLE_DEVICES=3")
    assert refused.returncode == 1
    assert "hydra.job.env_set.CUDA_VISIBLE_DEVICES=3" in refused.stderr.replace("'", "")
    assert "hydra.launcher.gpus" in refused.stderr
    assert not (tmp_path / "sweep/.gpu_pool").exists()
    done = run_app(app("return os.environ['PLAIN']"), *POOL, "+x=1", "+hydra.job.env_set.PLAIN=here")
    assert done.returncode == 0, done.stderr
    assert journal(tmp_path, "end")[0]["value"] == "here"


# --- bad input ---


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("hydra.launcher.per_gpu=0", "hydra.launcher.per_gpu=0: expected a whole number from 1 to 1000."),
        ("hydra.launcher.mode=dpp", "hydra.launcher.mode='dpp': expected one of single, ddp."),
        ("hydra.launcher.gpus_per_job=3", "gpus_per_job=3: there are only CPU slots; leave it at 1."),
        ("hydra.launcher.retry_on=[oops]", "hydra.launcher.retry_on=['oops']: expected a list of crash, oom,"),
        ("hydra.launcher.ddp.nnodes=2", "hydra.launcher.ddp.nnodes=2: only with hydra.launcher.mode: ddp."),
        ("hydra.launcher.gpu=1", "Key 'gpu' not in 'GpuPoolLauncherConf'"),
    ],
)
def test_a_bad_value_stops_the_sweep_before_the_first_job_with_one_sentence(
    run_app: RunApp, tmp_path: Path, argument: str, sentence: str
) -> None:
    done = run_app(app("return 1"), *POOL, "+x=1,2", argument)
    assert done.returncode == 1
    assert any(sentence in line for line in done.stderr.splitlines())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "sweep/.gpu_pool").exists()


# --- configuration in YAML ---


@pytest.fixture
def box(tmp_path: Path) -> Path:
    launchers = tmp_path / "conf/hydra/launcher"
    launchers.mkdir(parents=True)
    (launchers / "box.yaml").write_text("defaults: [gpu_pool]\ngpus: [0, 1]\nper_gpu: 2\n")
    (tmp_path / "conf/config.yaml").write_text("x: 0\n")
    (tmp_path / "conf/pooled.yaml").write_text(
        "defaults: [_self_, {override hydra/launcher: gpu_pool}]\nx: 0\nhydra: {launcher: {gpus: [5], per_gpu: 3}}\n"
    )
    return tmp_path


BOX_APP = app("return os.environ['GPU_POOL_SLOT']").replace(
    "config_path=None", "config_path='conf', config_name='config'"
)


def slots(tmp_path: Path) -> list[str]:
    return sorted(end["value"] for end in journal(tmp_path, "end"))


def test_a_launcher_config_of_the_users_builds_on_ours(run_app: RunApp, box: Path) -> None:
    done = run_app(BOX_APP, "-m", "hydra/launcher=box", "hydra.sweep.dir=sweep", "x=1,2,3,4")
    assert done.returncode == 0, done.stderr
    assert slots(box) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_users_launcher_config_takes_overrides_on_the_command_line(run_app: RunApp, box: Path) -> None:
    arguments = ("hydra/launcher=box", "hydra.sweep.dir=sweep", "x=1,2", "hydra.launcher.gpus=[7]")
    done = run_app(BOX_APP, "-m", *arguments)
    assert done.returncode == 0, done.stderr
    assert slots(box) == ["7.0", "7.1"]


def test_the_primary_config_may_choose_the_launcher_and_set_its_keys(run_app: RunApp, box: Path) -> None:
    done = run_app(BOX_APP, "-m", "--config-name", "pooled", "hydra.sweep.dir=sweep", "x=1,2,3")
    assert done.returncode == 0, done.stderr
    assert slots(box) == ["5.0", "5.1", "5.2"]


# --- what a person sees ---


def test_one_line_says_how_many_jobs_run_where_and_the_end_is_a_line_per_job(run_app: RunApp) -> None:
    done = run_app(app("return cfg.x / 3"), *POOL, "+x=1,2", "+lr=0.1", "hydra.launcher.gpus=[2,3]")
    assert done.stdout.count("gpu_pool: 2 jobs, 2 at once, on GPU 2, 3\n") == 1
    rows = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert rows[0] == ["#", "x", "status", "value", "seconds", "gpu.slot"]
    assert [row[:4] + row[5:] for row in rows[1:]] == [
        ["0", "1", "COMPLETED", "0.333333", "2.0"],
        ["1", "2", "COMPLETED", "0.666667", "3.0"],
    ]


def test_a_failure_is_told_when_it_happens_and_its_traceback_is_in_its_own_log(run_app: RunApp, tmp_path: Path) -> None:
    done = run_app(
        app("if cfg.x != 3: raise ValueError(f'bad {cfg.x}')"), *POOL, "+x=1,2,3,4", "hydra.launcher.cpu_slots=1"
    )
    lines = done.stdout.splitlines()
    for num, x in ((0, 1), (1, 2), (3, 4)):
        log = f"sweep/.gpu_pool/jobs/{num}/output.log"
        told = next(
            i
            for i, line in enumerate(lines)
            if line.endswith(f"job {num} (+x={x}) FAILED: ValueError: bad {x}; see {log}")
        )
        assert num == 3 or any(f"job {num + 1} (+x={x + 1}) started" in line for line in lines[told:])
        assert output(tmp_path, num).endswith(f"ValueError: bad {x}\n")
    assert output(tmp_path, 2) == ""


def test_jobs_that_end_well_are_told_as_they_end_and_the_end_is_counted(run_app: RunApp) -> None:
    done = run_app(app("return cfg.x / 4 if cfg.x != 2 else sys.exit('no')"), *POOL, "+x=1,2,3")
    assert "job 0 (+x=1) COMPLETED: 0.25\n" in done.stdout
    assert "job 2 (+x=3) COMPLETED: 0.75\n" in done.stdout
    assert "2 COMPLETED, 1 FAILED in 0:00:0" in done.stdout


def test_the_table_fits_80_columns_whatever_the_jobs_returned_or_raised(run_app: RunApp) -> None:
    body = "if cfg.x == 1: raise ValueError('x' * 3000)\nreturn 'y' * 3000"
    done = run_app(app(body), *POOL, "+x=1,2")
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["#", "x"])
    assert max(map(len, lines[header : header + 3])) <= 80


def test_a_logging_handler_of_the_app_that_fails_does_not_end_the_sweep(run_app: RunApp) -> None:
    source = """
import logging
class Broken(logging.Handler):
    def emit(self, record):
        if "started" in record.getMessage():
            raise RuntimeError("broken handler")

logging.getLogger("gpu_pool").addHandler(Broken())
"""
    done = run_app(source + app("return cfg.x"), *POOL, "+x=1,2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeError: broken handler") == 1


def test_a_used_directory_is_not_mistaken_for_this_sweep_however_large_the_request(
    run_app: RunApp, tmp_path: Path
) -> None:
    """Requests of more than a socket's buffer take several reads: between them, the old journal is still in place."""
    many = [f"+a{i}={'v' * 500}" for i in range(100)]
    for round_ in range(3):
        done = run_app(app(f"return cfg.x + {round_}"), *POOL, "+x=1,2,3,4,5,6", *many)
        assert done.returncode == 0, done.stderr
        assert sorted(end["value"] for end in journal(tmp_path, "end")) == [x + round_ for x in range(1, 7)]


def test_a_config_that_cannot_be_pickled_does_not_lose_the_value(run_batches: RunBatches) -> None:
    before = """
def store():
    from dataclasses import dataclass
    from hydra.core.config_store import ConfigStore
    @dataclass
    class Local:
        y: int = 3
    ConfigStore.instance().store(group="local", name="local", node=Local)
store()
"""
    lines = returns(run_batches("return cfg.l.y + cfg.x", "+local@l=local", before=before))
    assert [line.split(" COMPLETED ")[1] for line in lines] == [
        f"{x + 3} app ('{x - 1}', {x - 1})" for x in range(1, 7)
    ]


def test_threads_that_log_in_main_hang_no_job(run_app: RunApp) -> None:
    source = """
import logging, threading

def chatter():
    while True:
        logging.getLogger("chatter").info("x" * 100)

logging.basicConfig(filename="chatter.log", level=logging.INFO)
for _ in range(3):
    threading.Thread(target=chatter, daemon=True).start()
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def job(x):
    for handler in logging.getLogger().handlers:
        handler.flush()
    logging.getLogger("job").info("here")
    return x

for _ in range(12):
    pool = GpuPool(gpus=[], cpu_slots=2, progress="none")
    assert [o.value for o in pool.map(job, [dict(x=x) for x in range(4)])] == [0, 1, 2, 3]
print("done", flush=True)
"""
    assert "done" in run_app(source).stdout


def test_progress_none_says_nothing(run_app: RunApp) -> None:
    done = run_app(app("return 1"), *POOL, "+x=1,2", "hydra.launcher.progress=none", "hydra.launcher.gpus=[0]")
    assert done.returncode == 0, done.stderr
    assert "job" not in done.stdout.replace("gpu_pool: 2 jobs", "")


@pytest.mark.parametrize(("slots", "hints"), [(4, 1), (3, 0)])
def test_batches_that_leave_slots_idle_are_told_once(run_batches: RunBatches, slots: int, hints: int) -> None:
    done = run_batches("return 1", f"hydra.launcher.cpu_slots={slots}")
    assert done.stdout.count("stay idle in each batch") == hints


def test_jobs_print_to_their_logs_and_not_into_the_terminal(run_app: RunApp, tmp_path: Path) -> None:
    body = "for i in range(1000):\n    print(cfg.x, i)\n    os.write(1, b'raw\\n')"
    done = run_app(app(body), *POOL, "+x=1,2,3,4")
    assert "raw" not in done.stdout + done.stderr
    for num in range(4):
        lines = output(tmp_path, num).splitlines()
        assert [line for line in lines if line != "raw"] == [f"{num + 1} {i}" for i in range(1000)]
        assert lines.count("raw") == 1000


def test_hydra_lists_the_plugin(run_app: RunApp) -> None:
    done = run_app(app("pass"), "--info", "plugins")
    assert re.search(r"Launcher:\n(.*\n)*?.*GpuPoolLauncher", done.stdout), done.stdout


# --- the rest of Hydra ---


def test_configs_are_composed_job_by_job_not_all_before_the_first(run_app: RunApp, tmp_path: Path) -> None:
    """The first of many jobs ends before the last is composed: its composition sees the file that the first left."""
    source = app("open('first', 'w').close() if cfg.x == 0 else None\nreturn cfg.seen").replace(
        "config_path=None", "config_path='.', config_name='config'"
    )
    (tmp_path / "config.yaml").write_text("x: 0\nseen: ${exists:}\n")
    source = (
        "import os\nfrom omegaconf import OmegaConf\n"
        + ("OmegaConf.register_new_resolver('exists', lambda: os.path.exists('first'))\n")
        + source
    )
    done = run_app(source, *POOL, "x=range(0,8)", "hydra.launcher.cpu_slots=1")
    assert done.returncode == 0, done.stderr
    assert [end["value"] for end in journal(tmp_path, "end")][1:] == [True] * 7


def test_now_is_resolved_once_for_all_jobs(run_app: RunApp, tmp_path: Path) -> None:
    done = run_app(app("return cfg.x"), *POOL[:2], "hydra.sweep.dir=${now:%f}", "+x=1,2,3")
    assert done.returncode == 0, done.stderr
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_chdir_and_the_original_directory_work_in_jobs(run_app: RunApp, tmp_path: Path) -> None:
    body = "from hydra.utils import get_original_cwd\nreturn os.getcwd(), get_original_cwd()"
    done = run_app(app(body), *POOL, "+x=1", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stderr
    assert journal(tmp_path, "end")[0]["value"] == [str(tmp_path / "sweep/0"), str(tmp_path)]


def test_main_imports_nothing_heavy_that_the_app_did_not(run_app: RunApp) -> None:
    source = app("return 1") + "\nprint('HEAVY', sorted({'torch', 'numpy', 'rich', 'pynvml'} & sys.modules.keys()))\n"
    done = run_app(source, *POOL, "+x=1,2")
    assert "HEAVY []" in done.stdout


def test_a_job_that_imports_a_module_does_not_have_it_imported_elsewhere(run_app: RunApp, tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("print('imported')")
    run_app(app("import heavy"), *POOL, "+x=1,2")
    assert [output(tmp_path, num) for num in (0, 1)] == ["imported\n"] * 2


def test_unpicklable_globals_of_the_app_are_no_matter(run_app: RunApp) -> None:
    source = "import threading\nLOCK, LAMBDA = threading.Lock(), lambda x: x\n" + app("return LAMBDA(cfg.x)")
    assert run_app(source, *POOL, "+x=1,2").returncode == 0


def test_fork_warnings_as_errors_do_not_stop_a_sweep(run_app: RunApp) -> None:
    source = "import threading, warnings\nwarnings.simplefilter('error', DeprecationWarning)\n"
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    done = run_app(source + thread + app("return 1"), *POOL, "+x=1,2")
    assert done.returncode == 0, done.stderr


def test_the_public_configuration_has_the_defaults_that_are_checked() -> None:
    from omegaconf import OmegaConf

    from hydra_plugins.hydra_gpu_pool_launcher._settings import DEFAULTS
    from hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher import GpuPoolLauncherConf

    declared: Any = OmegaConf.to_container(OmegaConf.structured(GpuPoolLauncherConf))
    del declared["_target_"]
    assert declared == DEFAULTS
