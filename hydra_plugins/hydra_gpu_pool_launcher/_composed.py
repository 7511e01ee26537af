"""The configs that a sweeper composes in main, kept for the jobs: none of them composes its own a second time.

Hydra's basic sweeper composes the config of each job, to see that it can be, and throws it away. To compose takes about
half of the time of a job that does nothing; and a config file that is edited during the sweep changes nothing now.
"""

from __future__ import annotations

import contextlib
import enum
import io
import operator
import os
import pickle
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

_MOST_BYTES = 64 << 20
"""Of all configs of a launch, compressed, some thousands of them: what comes after that is composed by its job."""

_Key = tuple[str, str, tuple[str, ...], tuple[str, ...]]


class Composed:
    """What the loader has composed for the jobs of a sweep since ``clear``. A fork has what there is at that moment.

    ``config``: the sweep's, which those of its jobs are made from.
    """

    def __init__(self, loader: ConfigLoader, config: DictConfig) -> None:
        before = loader.load_sweep_config
        earlier = getattr(before, "__self__", None)
        self._compose: Callable[[DictConfig, list[str]], DictConfig] = (
            earlier._compose if isinstance(earlier, Composed) else before
        )
        self._config = config
        self._kept: dict[_Key, bytes] = {}
        self._size = 0
        self._surroundings = _Surroundings.now()
        loader.load_sweep_config = self._compose_and_keep  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Of one that goes along with a loader, to another process say: what is kept is for forks of this one alone."""
        return {**vars(self), "_kept": {}, "_size": 0, "_surroundings": _Surroundings({}, [])}

    def _compose_and_keep(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """In the place of the loader's own method, with its signature."""
        config = self._compose(master_config, sweep_overrides)
        if master_config is self._config:
            self.forget_what_is_old()
            key = self._key(sweep_overrides)
            self._size -= len(self._kept.pop(key, b""))  # whatever becomes of this one: that is not to be run any more
            with contextlib.suppress(Exception):  # it holds what has an identity of its own: the job composes it
                content = zlib.compress(_pickled(config), level=1)
                if self._size + len(content) <= _MOST_BYTES:
                    self._size += len(content)
                    self._kept[key] = content
        return config

    def take(self, overrides: Sequence[str]) -> DictConfig:
        """The config of a job, as the loader would compose it here. Raises what the loader raises."""
        config = self._loaded(overrides)
        if config is None:
            return self._compose(self._config, list(overrides))
        OmegaConf.copy_cache(self._config, config)  # as it is now: what has been resolved since is not resolved again
        return config

    def _loaded(self, overrides: Sequence[str]) -> DictConfig | None:
        content = self._kept.get(self._key(overrides))
        with contextlib.suppress(Exception):
            config = None if content is None else pickle.loads(zlib.decompress(content))
            return config if isinstance(config, DictConfig) else None
        return None

    def forget_what_is_old(self) -> None:
        """What was composed with another environment, or other configs in Hydra's ConfigStore. Runs in main.

        The next composition might be another one. Of config files, nobody could say so in time.
        """
        now = _Surroundings.now()
        if not now.are(self._surroundings):
            self.clear()
            self._surroundings = now

    def clear(self) -> None:
        """Forget them: what was composed for the jobs of one launch is not for those of the next."""
        self._kept.clear()
        self._size = 0

    def _key(self, overrides: Sequence[str]) -> _Key:
        """All that a config depends on and that can change from one launch to the next."""
        of_hydra: Any = OmegaConf.to_container(self._config.hydra.overrides.hydra)
        return os.getcwd(), str(self._config.hydra.job.config_name), tuple(of_hydra), tuple(overrides)


@dataclass(frozen=True)
class _Surroundings:
    """What a composition may ask for, beside config files and what is in its key."""

    environ: dict[str, str]
    store: list[object]

    @classmethod
    def now(cls) -> _Surroundings:
        return cls(dict(os.environ), list(_nodes(ConfigStore.instance().repo)))

    def are(self, other: _Surroundings) -> bool:
        same_store = len(self.store) == len(other.store) and all(map(operator.is_, self.store, other.store))
        return same_store and self.environ == other.environ


def _nodes(tree: Mapping[str, Any]) -> Iterator[object]:
    for each in tree.values():
        yield from _nodes(each) if isinstance(each, dict) else (each,)


class _Pickler(pickle.Pickler):
    """Of values alone: an object of the user's would come back as another one, and a fork has the very same.

    Classes, functions and members of an Enum go by their names, and are the same.
    """

    def reducer_override(self, obj: Any) -> Any:
        module = type(obj).__module__.partition(".")[0]
        named = isinstance(obj, (type, enum.Enum, types.FunctionType, types.GenericAlias, types.UnionType))
        if named or module in _OF_VALUES:
            return NotImplemented
        raise pickle.PicklingError(f"an object of {type(obj)}")


_OF_VALUES = {"collections", "omegaconf", "pathlib", "typing"}
"""Where the types are from of which a config is made, beside those that pickle knows by itself."""


def _pickled(config: DictConfig) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(config)
    return buffer.getvalue()


def without_keeping(loader: ConfigLoader) -> ConfigLoader:
    """The loader as it is without a Composed, for another process; the very same one where there is none."""
    keeps = vars(loader).get("load_sweep_config")
    if not isinstance(getattr(keeps, "__self__", None), Composed):
        return loader
    plain = object.__new__(type(loader))
    vars(plain).update(vars(loader))
    del plain.load_sweep_config
    return plain
