"""The app's import in a fresh interpreter: what main tells it for that, how it is watched, and what is refused in it.

It is multiprocessing's import: the main module runs under the name ``__mp_main__``, so that what is behind
``if __name__ == "__main__":`` does not.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._errors import ConfigurationError
from ._exceptions import described

_LONGEST_TRACEBACK = 20_000
"""Characters; it has to fit into the channel's buffer."""


@dataclass(frozen=True)
class Preparation:
    """How the app is imported again. ``data``: for multiprocessing.spawn.prepare; ``app``: its name in a message.

    ``start_method``: multiprocessing's, where the app has set one.
    """

    data: dict[str, Any]
    app: str
    start_method: str | None


def preparation() -> Preparation:
    """That of this process, main. Raises ConfigurationError where there is no file to import."""
    import multiprocessing.context
    import multiprocessing.process

    main: Any = sys.modules["__main__"]
    # Not get_preparation_data, which asks for multiprocessing's start method, and so fixes it for the app.
    current: Any = multiprocessing.process.current_process()
    original: Any = getattr(multiprocessing.process, "ORIGINAL_DIR", None)
    data: dict[str, Any] = {
        "sys_path": [original or "." if path == "" else path for path in sys.path],
        "sys_argv": list(sys.argv),
        "orig_dir": original,
        "authkey": bytes(current.authkey),
    }
    name, path = _name_and_path(main, original)
    if name is not None:
        data["init_main_from_name"] = name
    elif path is not None and os.path.isfile(path):
        data["init_main_from_path"] = path
    else:
        raise ConfigurationError(
            "start_method: forkserver and spawn import the app again, and this one has no file to import (python -c, "
            "stdin, a notebook); put it into a file, or use start_method: fork."
        )
    sys.modules.setdefault("__mp_main__", main)  # results name their classes so
    context: Any = multiprocessing.context._default_context
    method = context._actual_context and context._actual_context.get_start_method()
    return Preparation(data, name or os.path.basename(path or ""), method)


def _name_and_path(main: Any, original: str | None) -> tuple[str | None, str | None]:
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if path is not None:
        path = os.path.normpath(os.path.join(original or "", path))
    return name, path


def main_can_be_imported() -> bool:
    """False where main's module is a package's ``__main__``: multiprocessing does not import it again, nor do we."""
    name, _ = _name_and_path(sys.modules["__main__"], None)
    return name is None or not (name == "__main__" or name.endswith(".__main__"))


def interpreter() -> list[str]:
    """The command that starts an interpreter like this one, before its ``-c``. Raises ConfigurationError."""
    from multiprocessing import spawn, util

    executable = spawn.get_executable()
    if not executable:
        raise ConfigurationError(
            "start_method: forkserver and spawn start a new Python interpreter, and this process does not know where "
            "its own is (sys.executable is empty); use start_method: fork."
        )
    return [os.fsdecode(executable), *util._args_from_interpreter_flags()]  # type: ignore[attr-defined]


# --- in the fresh interpreter ---


class _NoGuard(BaseException):
    """The app starts its sweep when it is imported. No Exception: an app may catch those around its main function."""


@dataclass
class Watch:
    """The import that is under way: who changed the answer of ``state``, and whether the app began a sweep.

    ``sets``: the variables of the environment of these names that it has set.
    """

    state: Callable[[], str | None]
    sensitive: frozenset[str]
    culprit: str | None = None
    unguarded: bool = False
    sets: str | None = None

    def ask(self, name: str) -> None:
        """Right after the module of this name was executed: those that it imports itself were asked for before it."""
        if self.culprit is None and self.state() is not None:
            self.culprit = name


_now: Watch | None = None
_heard: list[Watch] = []  # audit hooks stay for ever: one for all


def under_way() -> bool:
    """True while this process is a fresh interpreter that imports the app."""
    return _now is not None


def refuse_sweep() -> None:
    """To be called where a sweep begins. While the app is imported, the import ends here: it has no guard."""
    if _now is not None:
        _now.unguarded = True
        raise _NoGuard


def _run_hydra(*_: object, **__: object) -> None:
    refuse_sweep()


@contextlib.contextmanager
def watched(preparation: Preparation, state: Callable[[], str | None], sensitive: frozenset[str]) -> Iterator[Watch]:
    """Import the app; what is in the ``with`` counts as part of it. One import in a process.

    Raises ConfigurationError, in one sentence and with the app's traceback, where the app cannot be imported, ends the
    interpreter, or starts its sweep.
    """
    global _now
    hydra_main: Any = sys.modules.get("hydra.main")
    true = getattr(hydra_main, "_run_hydra", None)
    _now = watch = Watch(state, sensitive)
    finder = _Finder(watch)
    sys.meta_path.insert(0, finder)
    if true is not None:
        hydra_main._run_hydra = _run_hydra
    sys.addaudithook(_hear)
    _heard.append(watch)
    try:
        _import(preparation)
        yield watch
    except ConfigurationError as error:
        raise (_no_guard(preparation) if watch.unguarded else error) from error.__cause__
    except BaseException as error:
        if watch.unguarded:
            raise _no_guard(preparation) from None
        raise ConfigurationError(
            f"{preparation.app} cannot be imported again, as start_method: forkserver and spawn must do: "
            f"{described(error)}; see to it that it can, or use start_method: fork.\n\n{_traceback(error)}"
        ) from None
    else:
        if watch.unguarded:  # and the app went on all the same
            raise _no_guard(preparation)
    finally:
        _now = None
        _heard.clear()
        if true is not None:
            hydra_main._run_hydra = true
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)


def _no_guard(preparation: Preparation) -> ConfigurationError:
    return ConfigurationError(
        f"{preparation.app} has no `if __name__ == '__main__':` guard: it starts its sweep when it is imported, and "
        "start_method: forkserver and spawn import it again; put what starts the sweep below such a line, or use "
        "start_method: fork."
    )


def _traceback(error: BaseException) -> str:
    """Without the frames that lead to the app's own."""
    tb = error.__traceback__
    names = (__name__, "multiprocessing.spawn", "runpy", "importlib._bootstrap", "importlib._bootstrap_external")
    while tb is not None and tb.tb_frame.f_globals.get("__name__") in names:
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
    return text.rstrip()[-_LONGEST_TRACEBACK:]


def _import(preparation: Preparation) -> None:
    import multiprocessing.context
    import multiprocessing.spawn

    multiprocessing.spawn.prepare(preparation.data)
    context: Any = multiprocessing.context._default_context
    if preparation.start_method is not None and context._actual_context is None:  # set below the guard
        multiprocessing.set_start_method(preparation.start_method)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.putenv" and _heard and threading.current_thread() is threading.main_thread():
        name = os.fsdecode(arguments[0])
        if name in _heard[0].sensitive:
            _heard[0].sets = name


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find, and has the watch ask after each module that is executed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        own = getattr(loader, "__dict__", {})
        if execute is None or isinstance(loader, type) or "exec_module" in own:
            return  # a class serves every built-in module; one that serves several files may be wrapped already

        def exec_module(module: ModuleType) -> Any:
            own.pop("exec_module", None)
            try:
                return execute(module)
            finally:
                self._watch.ask(module.__name__)

        with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes: then it is not watched
            loader.exec_module = exec_module
