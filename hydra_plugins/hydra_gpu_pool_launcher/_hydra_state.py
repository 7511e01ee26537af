"""What Hydra and OmegaConf keep beside the app, taken in main and put in its place in a fresh interpreter.

Hydra's own Singleton.get_state() carries all or nothing, by plain pickle: one lambda for a resolver, and there is no
sweep. Here each thing goes by itself, and what cannot go is missed only where the app's import does not bring it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig
from omegaconf.basecontainer import BaseContainer

from . import _carry
from ._errors import ConfigurationError
from ._exceptions import described

try:
    _policy: Any = importlib.import_module("hydra._internal.execution_policy")  # Hydra 1.4
except ImportError:
    _policy = None


@dataclass(frozen=True)
class Pickled:
    """One thing, or the reason why it cannot go along."""

    content: bytes | None
    why_not: str = ""


def _pickled(thing: object) -> Pickled:
    try:
        return Pickled(_carry.pickled(thing))
    except Exception as error:
        return Pickled(None, described(error))


@dataclass(frozen=True)
class HydraState:
    """``singletons``: those that a job asks; ``store``: the entries of ConfigStore, by path; ``resolvers``: by name.

    ``whitelist``: what Hydra 1.4 lets a config name as a target, as given to hydra.main; None before it.
    """

    singletons: tuple[object, ...]
    store: Mapping[tuple[str, ...], Pickled]
    resolvers: Mapping[str, Pickled]
    whitelist: object

    @classmethod
    def taken(cls) -> HydraState:
        """As it is in this process. Runs in main."""
        return cls(
            singletons=tuple(kind.instance() for kind in (HydraConfig, JobRuntime, VersionBase, GlobalHydra)),
            store={path: _pickled(node) for path, node in _entries(ConfigStore.instance().repo)},
            resolvers=_resolvers(),
            whitelist=_whitelist(),
        )

    @classmethod
    def of_job(cls) -> HydraState:
        """What a job has of its own, for its ranks. Runs in the job's process."""
        return cls((HydraConfig.instance(), JobRuntime.instance()), {}, _resolvers(), _whitelist())

    def put(self) -> None:
        """In a fresh interpreter, after the app's import. Raises ConfigurationError, which names what is missing."""
        Plugins.instance()  # finds the plugins by itself, and stores their configs
        for singleton in self.singletons:
            instances: Any = Singleton._instances
            instances[type(singleton)] = singleton
        for path, entry in self.store.items():
            self._put_entry(path, entry)
        for name, resolver in self.resolvers.items():
            if name not in BaseContainer._resolvers:
                BaseContainer._resolvers[name] = _loaded(f"The resolver {name!r}", resolver)
        if _policy is not None:
            _policy.execution_whitelist(self.whitelist, reset=True).__enter__()  # for as long as the process lives

    def _put_entry(self, path: tuple[str, ...], entry: Pickled) -> None:
        group: Any = ConfigStore.instance().repo
        for name in path[:-1]:
            group = group.setdefault(name, {})
        if entry.content is not None or path[-1] not in group:
            group[path[-1]] = _loaded(f"The ConfigStore's entry {'/'.join(path)}", entry)


def _resolvers() -> dict[str, Pickled]:
    return {name: _pickled(resolver) for name, resolver in BaseContainer._resolvers.items()}


def _whitelist() -> object:
    return None if _policy is None else _policy._get_active_execution_whitelist()


def settle(config: object) -> None:
    """Resolve what asks a resolver, here and not in each rank: one that keeps its answer, as ``now`` does, has it then.

    What cannot be resolved is left for whoever asks for it.
    """
    if not isinstance(config, (DictConfig, ListConfig)):
        return
    keys: Any = config if isinstance(config, DictConfig) else range(len(config))
    for key in keys:
        with contextlib.suppress(Exception):
            settle(config[key])


def _entries(repo: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, node in repo.items():
        if isinstance(node, dict):
            yield from _entries(node, (*path, name))
        else:
            yield (*path, name), node


def _loaded(name: str, thing: Pickled) -> Any:
    if thing.content is None:
        raise ConfigurationError(
            f"{name} is not there when the app is imported again, as start_method: forkserver and spawn do, and cannot "
            f"be carried over ({thing.why_not}); register it above `if __name__ == '__main__':`."
        )
    return _carry.Parts({name: thing.content})[name]
