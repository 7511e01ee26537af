"""The command that goes on with a sweep: main's own, with ``resume`` and the sweep's directory."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence

from hydra.errors import HydraException

from ._files import SweepFiles
from ._seen import Launch
from ._tail import one_line, plain

_RESUME, _SWEEP_DIR = "hydra.launcher.resume", "hydra.sweep.dir"

_BY_HYDRA = "hydra.mode=MULTIRUN"
"""What -m, or a sweeper's own default, adds to the overrides that Hydra says it was given."""


def command_to_resume(command: Sequence[str], given: Iterable[str] | None, sweep_dir: str) -> str | None:
    """A line for a shell that runs what has not completed, and nothing else.

    ``command``: the words that started main; ``given``: the overrides that Hydra says it was given, None where there is
    nothing to go on with: a sweeper that draws other points the next time, a map of GpuPool. Where these are not among
    the words, another program has put them together (an app with a launch() of its own, a notebook), and
    adding words would not do: None. None, too, for code that was itself a word (``python -c``), or came from stdin.
    """
    if given is None:
        return None
    words = list(command)
    given = set(given) - {_BY_HYDRA}
    directory = _override(_SWEEP_DIR, sweep_dir)
    if len(words) < 2 or directory is None or not given <= set(words) or {"-c", "-"} & set(words):
        return None
    replaced = [i for i, word in enumerate(words) if _key(word) in {_RESUME, _SWEEP_DIR}]
    # Hydra takes overrides that stand together: the new ones go where the last of the others is.
    last = max((i for i, word in enumerate(words) if word in given), default=len(words) - 1)
    before = [word for i, word in enumerate(words[: last + 1]) if i not in replaced]
    line = shlex.join([*before, f"{_RESUME}=true", directory, *words[last + 1 :]])
    return line if plain(line) == line and "\n" not in line else None  # what is shown of it would be another command


def resume_command(launch: Launch, files: SweepFiles, here: str | None = None) -> str | None:
    """What to type to go on with this sweep; None where no command does, or none that is known.

    ``here``: the directory in which it is typed; None: any.
    """
    if files.name != SweepFiles(files.sweep_dir).name:
        return None  # it was moved aside, and the command would go on with the sweep after it
    given: Sequence[str] | None = launch.given
    if not launch.says_given and _seems_hydras(launch, files):
        given = overrides_in(launch.command)
    text = command_to_resume(launch.command, given, files.sweep_dir)
    if text is None or here == launch.cwd:
        return text
    there = shlex.quote(launch.cwd)
    return f"cd {there} && {text}" if one_line(there) == there else None


def _seems_hydras(launch: Launch, files: SweepFiles) -> bool:
    """For a journal that does not say so; Hydra's basic sweeper leaves a file."""
    words = (part.startswith(("hydra/", "hydra.")) or part == "--multirun" for part in launch.command)
    return any(words) or os.path.exists(os.path.join(files.sweep_dir, "multirun.yaml"))


def overrides_in(command: Iterable[str]) -> list[str]:
    """What Hydra was given, as far as the words tell: for a journal that does not say."""
    return [word for word in command if "=" in word and not word.startswith("-")]


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _override(key: str, value: str) -> str | None:
    """In Hydra's grammar; None where it cannot be said in it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # which loads antlr

    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    for text in (value, f"'{quoted}'"):
        try:
            understood = OverridesParser.create().parse_override(f"{key}={text}").value()
        except HydraException:
            continue
        if str(understood) == value and "${" not in value:
            return f"{key}={text}"
    return None
