"""What goes along into a fresh interpreter, how it is pickled in main, and how a fork becomes that interpreter.

Values go by plain pickle, which says a class by its name: so they come back as what main knows. A function goes by its
name where there is one, and by its code, through cloudpickle, where there is none.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NoReturn, Protocol

from hydra.core.config_store import ConfigStore

from . import _descriptors, _process, _reimport
from ._body import Body
from ._errors import ConfigurationError
from ._exceptions import described
from ._reimport import Preparation

_FRESH = "hydra_plugins.hydra_gpu_pool_launcher._fresh"

_LONGEST_CHAIN = 100
"""Decorators around a function; more than that is a ring of ``__wrapped__``."""


class CarriedBody(Body, Protocol):
    """A body that can be made again in a fresh interpreter."""

    def parts(self) -> Mapping[str, object]:
        """What ``from_parts`` needs, by the name that a message has for each. Runs in main."""

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> CarriedBody:
        """The body, in the fresh interpreter; a part is loaded when it is asked for."""

    @property
    def function(self) -> Callable[..., Any]:
        """The user's, which ``run`` has called."""

    def settle(self, *arguments: object) -> None:
        """Let what the arguments of the function say be the same in each rank. Runs in the job's process."""

    def renewed(self) -> Mapping[str, object]:
        """Those of the parts that the job has changed before it calls the function. Runs in the job's process."""

    def begin_another_launch(self) -> None:
        """Forget what was kept for the jobs of the last one. Runs in main after each launch, and in the supervisor.

        There it runs before each launch but the first: that may have been kept for before the fork.
        """

    def begin_rank(self, rank: int) -> None:
        """What the job's own process has done for its function, in the fresh interpreter of a rank."""


@dataclass(frozen=True)
class Carried:
    """What a fresh interpreter needs to be like main: how to import the app again, and the rest as bytes.

    ``app``: the ``App`` without its body, pickled; ``parts``: what ``body_class`` makes the body from, each pickled.
    """

    preparation: Preparation
    app: bytes
    body_class: type[CarriedBody]
    parts: Mapping[str, bytes]


def carried(app: Any, body: CarriedBody) -> Carried:
    """An ``App`` and its body, pickled as they are now. Runs in main.

    Raises ConfigurationError, which names what cannot go along.
    """
    preparation = _reimport.preparation()
    parts = {name: _named(name, part) for name, part in body.parts().items()}
    return Carried(preparation, pickle.dumps(replace(app, body=None)), type(body), parts)


ARGUMENTS = "What the task function is called with"
"""The name of a part: positional and keyword arguments, in a fresh interpreter that is a rank."""


def carried_on(carried: Carried, body: CarriedBody, arguments: object) -> Carried:
    """For the ranks of a job that is a fresh interpreter itself: with the job's state, and ``ARGUMENTS``.

    Runs in the job's process. Raises ConfigurationError, which names what cannot go along.
    """
    parts = {name: _named(name, part) for name, part in {**body.renewed(), ARGUMENTS: arguments}.items()}
    return replace(carried, parts={**carried.parts, **parts})


def _named(name: str, part: object) -> bytes:
    try:
        return pickled(part)
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot be carried into a fresh interpreter, as start_method: forkserver and spawn must do "
            f"({described(error)}); let it hold only what can be pickled, or use start_method: fork."
        ) from error


def pickled(part: object) -> bytes:
    """The bytes; what can be called may go by its code. Raises whatever pickle raises."""
    names = _reimport.main_can_be_imported()
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, names).dump(part)
    except Exception:
        if not callable(part):
            raise
        return _by_code(part, names)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Plain pickle, for which a function need not be what its name says: a decorator may stand there instead."""

    def __init__(self, file: io.BytesIO, main_has_names: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main_has_names = main_has_names
        # Hydra's config loader refers to it: the fresh interpreter has its own, to which main's entries go one by one.
        self.dispatch_table = {**copyreg.dispatch_table, ConfigStore: lambda _: (ConfigStore, ())}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType):
            return NotImplemented
        found = _found(obj, self._main_has_names)
        if found == (obj.__module__, obj.__qualname__, 0):
            return NotImplemented
        return (_function, found) if found is not None else (pickle.loads, (_by_code(obj, self._main_has_names),))


def _by_code(part: object, main_has_names: bool) -> bytes:
    """Through cloudpickle, but for what the app's main module has under a name: it would become another class there."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            of_main = getattr(obj, "__module__", None) == "__main__"
            if isinstance(obj, FunctionType) or (isinstance(obj, type) and of_main):
                found = _found(obj, main_has_names)
                if found is not None and (of_main or found[2]):
                    return _function, found
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(part)
    return buffer.getvalue()


def _found(obj: Any, main_has_names: bool) -> tuple[str, str, int] | None:
    """Where the function or class is to be found again: a module, a name in it, so many ``__wrapped__`` below that."""
    for module in dict.fromkeys((obj.__module__, "__main__")):
        if module not in sys.modules or (module == "__main__" and not main_has_names):
            continue
        try:
            if _attribute(module, obj.__qualname__) is obj:
                return module, obj.__qualname__, 0
        except AttributeError:  # made in a function, or under another name: then it may still be found below
            pass
        for name, value in list(vars(sys.modules[module]).items()):
            steps = 0
            while value is not None and value is not obj and steps < _LONGEST_CHAIN:
                value, steps = _wrapped(value), steps + 1
            if value is obj:
                return module, name, steps
    return None


def _attribute(module: str, qualified_name: str) -> Any:
    value: Any = sys.modules[module]
    for name in qualified_name.split("."):
        value = getattr(value, name)
    return value


def _wrapped(value: object) -> Any:
    """What a decorator of functools's kind stands for; no attribute is asked for that an object might make up."""
    try:
        return object.__getattribute__(value, "__dict__").get("__wrapped__")
    except (AttributeError, TypeError):
        return None


def _function(module: str, qualified_name: str, steps: int) -> Any:
    """In the fresh interpreter: the function again."""
    __import__(module)
    value = _attribute(module, qualified_name)
    for _ in range(steps):
        value = value.__wrapped__
    return value


class Parts(Mapping[str, Any]):
    """The parts of a body in the fresh interpreter, each loaded when it is first asked for.

    Raises ConfigurationError where one cannot be: what it is made of is not there when the app is imported.
    """

    def __init__(self, pickled: Mapping[str, bytes]) -> None:
        self._pickled = pickled
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            content = self._pickled[name]
            try:
                self._loaded[name] = pickle.loads(content)
            except Exception as error:
                raise ConfigurationError(
                    f"{name} cannot be loaded in a fresh interpreter, as start_method: forkserver and spawn must do "
                    f"({described(error)}); define what it is made of above `if __name__ == '__main__':`, where an "
                    "import finds it."
                ) from error
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pickled)

    def __len__(self) -> int:
        return len(self._pickled)


def become_fresh(carried: int, role: object, keep: Iterable[int], environ: Mapping[str, str]) -> NoReturn:
    """This process, a fork of main, becomes a fresh interpreter, which runs ``_fresh.main``: the same pid, new code.

    ``carried``: descriptor of a file with ``packed``; ``role``: what it is to be, pickled here; ``keep``: descriptors
    that it needs. Raises OSError where the system refuses.
    """
    with open(f"/proc/self/fd/{carried}", "rb") as file:  # opened anew: the offset is shared with other jobs
        command = pickle.load(file)
        content = file.read()
    summons = _descriptors.unnamed_file(content + pickle.dumps(role))
    code = (
        "import sys;sys.path[:]=filter(None,sys.path);"  # nothing in the current directory is taken for pickle
        f"import pickle;f=open('/proc/self/fd/{summons}','rb');sys.path[:]=pickle.load(f);"
        f"from {_FRESH} import main;main(f,{summons})"
    )
    _process.execute([*command, "-c", code], {summons, *keep}, environ)


def packed(carried: Carried) -> bytes:
    """For ``become_fresh``: the command of the interpreter, its sys.path, and then what is carried."""
    command, path = _reimport.interpreter(), carried.preparation.data["sys_path"]
    return b"".join(map(pickle.dumps, (command, path, carried)))
