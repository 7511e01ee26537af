"""Configs that a sweeper composed in main and that jobs take over: they are those that Hydra itself would compose."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from support import RunApp, write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import _composed
from hydra_plugins.hydra_gpu_pool_launcher._composed import Composed, without_keeping

CONFIG = """
defaults: [db: mysql, _self_]
lr: 0.1
twice: ${lr}
now: ${now:%f}
home: ${oc.env:SOMEWHERE,nowhere}
"""
DB = {"mysql": "name: my\nport: 1\n", "pg": "name: pg\nport: 2\n"}
OVERRIDES = (["lr=1"], ["lr=2", "db=pg"], ["+new=[1,2]", "hydra.job.chdir=true"], ["~db"], ["++db.port=${lr}"])


class Counted(ConfigLoaderImpl):
    """Hydra's own loader, which counts what it composes for jobs."""

    composed = 0

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        self.composed += 1
        return super().load_sweep_config(master_config, sweep_overrides)


def initialize(directory: str) -> initialize_config_dir:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra 1.4's, of version_base
        return initialize_config_dir(directory, version_base=None)


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[Counted]:
    (tmp_path / "db").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG)
    for name, text in DB.items():
        (tmp_path / f"db/{name}.yaml").write_text(text)
    with initialize(str(tmp_path)):
        yield Counted(GlobalHydra.instance().config_loader().get_search_path())


@pytest.fixture
def config(loader: Counted) -> DictConfig:
    """That of the sweep."""
    return loader.load_configuration("config", ["lr=7", "hydra.verbose=true"], RunMode.MULTIRUN)


def everything(config: DictConfig) -> Any:
    """What is in a config, with all that is not seen in its values: flags, types, and what resolvers have given."""
    parts: list[Any] = [OmegaConf.to_container(config, resolve=False)]
    for node in (config, config.hydra, config.hydra.runtime, config.get("db")):
        if node is not None:
            parts.append((node._metadata.flags, node._metadata.ref_type, node._metadata.object_type))
    return parts, config._metadata.resolver_cache


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_a_job_takes_over_the_config_that_hydra_would_compose_and_composes_none(
    loader: Counted, config: DictConfig, overrides: list[str]
) -> None:
    assert config.now
    own = loader.load_sweep_config(config, overrides)
    composed = Composed(loader, config)
    loader.load_sweep_config(config, overrides)
    before = loader.composed
    taken = composed.take(overrides)
    assert loader.composed == before
    assert everything(taken) == everything(own)
    assert OmegaConf.to_container(taken, resolve=False) == OmegaConf.to_container(own, resolve=False)
    assert taken.now == own.now == config.now
    assert taken is not composed.take(overrides)


def test_what_is_resolved_once_after_the_sweeper_has_composed_is_not_resolved_again(
    loader: Counted, config: DictConfig
) -> None:
    composed = Composed(loader, config)
    loader.load_sweep_config(config, ["lr=1"])
    resolved = config.now
    assert composed.take(["lr=1"]).now == resolved


def test_a_resolver_without_a_memory_is_asked_by_the_job(
    loader: Counted, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = Composed(loader, config)
    assert loader.load_sweep_config(config, ["lr=1"]).home == "nowhere"
    monkeypatch.setenv("SOMEWHERE", "here")
    assert composed.take(["lr=1"]).home == "here"


@pytest.mark.parametrize(
    "what",
    ["nothing was composed", "another directory", "another sweep", "hydra's overrides", "another file", "cleared"],
)
def test_what_was_composed_for_something_else_is_composed_anew(
    loader: Counted, config: DictConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    composed = Composed(loader, config)
    if what != "nothing was composed":
        other = pickle.loads(pickle.dumps(config)) if what == "another sweep" else config
        loader.load_sweep_config(other, ["lr=1"])
    if what == "another directory":
        monkeypatch.chdir(tmp_path / "db")
    elif what == "hydra's overrides":
        config.hydra.overrides.hydra.append("hydra.job.name=other")
    elif what == "another file":
        (tmp_path / "other.yaml").write_text(CONFIG)
        config.hydra.job.config_name = "other"
    elif what == "cleared":
        composed.clear()
    before = loader.composed
    taken = composed.take(["lr=1"])
    assert loader.composed == before + 1
    assert (taken.lr, taken.hydra.runtime.cwd) == (1, os.getcwd())


@pytest.mark.parametrize("what", ["the environment", "a stored config", "another stored config"])
def test_what_was_composed_before_something_else_changed_that_a_composition_may_ask_for_is_composed_anew(
    loader: Counted, config: DictConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    store.store(group="db", name="stored", node={"name": "first"})
    composed = Composed(loader, config)
    loader.load_sweep_config(config, ["db=stored"])
    composed.forget_what_is_old()
    before = loader.composed
    assert composed.take(["db=stored"]).db.name == "first"
    assert loader.composed == before
    if what == "the environment":
        monkeypatch.setenv("ASKED_FOR", "by env_copy, say")
    else:
        name = "stored" if what == "a stored config" else "other"
        store.repo["db"].pop(f"{name}.yaml", None)  # Hydra 1.4 warns of one that takes another's place
        store.store(group="db", name=name, node={"name": "second"})
    loader.load_sweep_config(config, ["lr=1"])
    composed.take(["lr=1"])
    assert loader.composed == before + 1
    assert composed.take(["db=stored"]).db.name == ("second" if what == "a stored config" else "first")
    assert loader.composed == before + 2
    monkeypatch.setenv("ASKED_FOR", "later")
    composed.forget_what_is_old()
    assert not composed._kept


def test_a_config_that_cannot_be_pickled_is_composed_by_its_job(loader: Counted, config: DictConfig) -> None:
    composed = Composed(loader, config)

    def compose(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        made = Counted.load_sweep_config(loader, master_config, sweep_overrides)
        made._set_flag("allow_objects", True)
        made._set_flag("struct", False)
        made.thing = lambda: None
        return made

    composed._compose = compose
    assert callable(loader.load_sweep_config(config, ["lr=1"]).thing)
    assert callable(composed.take(["lr=1"]).thing)


class Odd(Exception):
    """It pickles, and does not unpickle."""

    def __init__(self, what: str, more: str) -> None:
        super().__init__(what)
        self.more = more


@pytest.mark.parametrize(
    "thing",
    [object(), Odd("a", "b"), SimpleNamespace(a=1), ValueError("x")],
    ids=["plain", "odd", "namespace", "exception"],
)
def test_an_object_in_a_config_is_the_very_same_one_in_its_job(
    loader: Counted, config: DictConfig, thing: object
) -> None:
    composed = Composed(loader, config)

    def compose(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        made = Counted.load_sweep_config(loader, master_config, sweep_overrides)
        made._set_flag(["allow_objects", "struct"], [True, False])
        made.things = [thing]
        return made

    composed._compose = compose
    loader.load_sweep_config(config, ["lr=1"])
    assert composed.take(["lr=1"]).things[0] is thing


@pytest.mark.parametrize("why", ["full", "odd"])
def test_of_a_config_that_was_composed_again_the_first_one_is_never_run(
    loader: Counted, config: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    composed = Composed(loader, config)
    loader.load_sweep_config(config, ["lr=1"])
    (tmp_path / "db/mysql.yaml").write_text("name: edited\nport: 1\n")
    if why == "full":
        monkeypatch.setattr(_composed, "_MOST_BYTES", 0)
    else:
        monkeypatch.setattr(_composed, "_pickled", lambda _: pickle.dumps(lambda: None))
    loader.load_sweep_config(config, ["lr=1"])
    assert composed.take(["lr=1"]).db.name == "edited"


def test_what_cannot_be_loaded_is_composed(loader: Counted, config: DictConfig) -> None:
    composed = Composed(loader, config)
    loader.load_sweep_config(config, ["lr=1"])
    composed._kept = dict.fromkeys(composed._kept, b"nonsense")
    assert composed.take(["lr=1"]).lr == 1


def test_what_is_kept_has_a_bound_in_memory(
    loader: Counted, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = Composed(loader, config)
    loader.load_sweep_config(config, ["lr=0"])
    monkeypatch.setattr(_composed, "_MOST_BYTES", 2 * composed._size + 100)
    for lr in (0, 0, 0, 1, 2):
        loader.load_sweep_config(config, [f"lr={lr}"])
    before = loader.composed
    assert [composed.take([f"lr={lr}"]).lr for lr in range(3)] == [0, 1, 2]
    assert loader.composed == before + 1


def test_the_loader_of_a_later_sweep_keeps_for_that_alone_and_can_be_carried_to_another_process(
    loader: Counted, config: DictConfig
) -> None:
    first = Composed(loader, config)
    second = Composed(loader, config)
    before = loader.composed
    loader.load_sweep_config(config, ["lr=1"])
    assert loader.composed == before + 1
    assert not first._kept
    assert len(second._kept) == 1
    assert pickle.loads(pickle.dumps(second))._kept == {}
    assert pickle.loads(pickle.dumps(second))._surroundings.store == []
    plain = without_keeping(loader)
    assert "load_sweep_config" not in vars(plain)
    assert vars(plain) == {name: value for name, value in vars(loader).items() if name != "load_sweep_config"}
    assert without_keeping(plain) is plain


# --- sweeps ---

APP = """
import os
import hydra
from omegaconf import OmegaConf
import hydra._internal.config_loader_impl as impl

compose, main_process = impl.ConfigLoaderImpl.load_sweep_config, os.getpid()

def counted(*args, **kwargs):
    if os.getpid() != main_process:
        print("COMPOSED IN A JOB", flush=True)
    return compose(*args, **kwargs)

impl.ConfigLoaderImpl.load_sweep_config = counted

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    open("config.yaml", "w").write("x: 0\\ny: edited\\n")
    return cfg.y

if __name__ == "__main__":
    main()
"""


def values(tmp_path: Path) -> list[Any]:
    lines = (tmp_path / "sweep/.gpu_pool/journal.jsonl").read_text().splitlines()
    return [event["value"] for event in map(json.loads, lines) if event["event"] == "end"]


def test_a_config_file_that_is_edited_while_a_sweep_runs_changes_none_of_its_jobs(
    run_app: RunApp, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("x: 0\ny: as it was\n")
    done = run_app(
        APP, "-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "x=1,2,3", "hydra.launcher.cpu_slots=1"
    )
    assert done.returncode == 0, done.stderr
    assert values(tmp_path) == ["as it was"] * 3
    logs = [(tmp_path / f"sweep/.gpu_pool/jobs/{num}/output.log").read_text() for num in range(3)]
    assert not any("COMPOSED" in log for log in logs)


def test_jobs_of_a_sweeper_that_composes_nothing_compose_their_own(run_app: RunApp, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x: 0\ny: as it was\n")
    write_sweeper(tmp_path, "return self.launcher.launch([['x=1'], ['x=2']], initial_job_idx=0)")
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra/sweeper=own")
    done = run_app(APP, *arguments, "hydra.launcher.cpu_slots=1")
    assert done.returncode == 0, done.stderr
    assert values(tmp_path) == ["as it was", "edited"]
    assert "COMPOSED" in (tmp_path / "sweep/.gpu_pool/jobs/0/output.log").read_text()


def test_what_a_sweeper_sets_in_the_environment_before_it_launches_is_in_the_jobs_configs(
    run_app: RunApp, tmp_path: Path
) -> None:
    write_sweeper(
        tmp_path,
        """
        body = self.launcher._sweep._body
        body._hydra_context.config_loader.load_sweep_config(body._config, ["x=1"])
        __import__("os").environ["COPIED"] = "since"
        return self.launcher.launch([["x=1"]], initial_job_idx=0)
        """,
    )
    (tmp_path / "config.yaml").write_text("x: 0\ny: 1\n")
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra/sweeper=own")
    source = APP.replace("return cfg.y", "return HydraConfig.get().job.env_copy, os.environ['COPIED']")
    source = source.replace("import hydra\n", "import hydra\nfrom hydra.core.hydra_config import HydraConfig\n", 1)
    done = run_app(source, *arguments, "hydra.job.env_copy=[COPIED]", env={"COPIED": "before"})
    assert done.returncode == 0, done.stderr
    assert values(tmp_path)[0][1] == "since"


def test_a_supervisor_that_serves_a_second_launch_does_not_run_the_configs_of_the_first(
    run_app: RunApp, tmp_path: Path
) -> None:
    write_sweeper(
        tmp_path,
        """
        import threading
        for batch in (0, 1):
            open("config.yaml", "w").write(f"x: 0\\ny: batch {batch}\\n")
            body = self.launcher._sweep._body
            body._hydra_context.config_loader.load_sweep_config(body._config, ["x=1"])
            self.launcher.launch([["x=1"]], initial_job_idx=batch)
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        """,
    )
    (tmp_path / "config.yaml").write_text("x: 0\ny: before\n")
    arguments = ("-m", "hydra/launcher=gpu_pool", "hydra.sweep.dir=sweep", "hydra/sweeper=own")
    done = run_app(APP.replace('    open("config.yaml", "w").write("x: 0\\ny: edited\\n")\n', ""), *arguments)
    assert done.returncode == 0, done.stderr
    assert values(tmp_path) == ["batch 0", "batch 1"]
