"""Kills random processes of sweeps at random moments, has the sweeps resumed, and checks what was promised.

    python tests/chaos.py --minutes 20

A round is one sweep directory: sweeps that are attacked, each resumed by the next, until one ends by itself. After each
of them: nothing that it started is alive; what had completed is still there, unchanged, and did not run again; whatever
came back to main is in order and right; and a job that nobody attacked has completed, where the sweep ended by itself.

Every process that is attacked is a descendant of this one, and is held by a pidfd while it is looked at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chaos_app
from support import write_sweeper

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors, _pidfd, _process

SLOTS = 3
GRACE_S = 0.5
GONE_WITHIN_S = 40.0
"""From the end of main to the last process: the grace, twice the bound of what cannot be killed, and slow machines."""
OF_JOBS = {"job", "rank", "child"}
"""Attacked, these leave the sweep to end by itself."""
HANGS_AFTER_S = 120.0
"""A sweep of some seconds that takes longer hangs: that is a violation too."""

SWEEP = """
import hashlib, json
import __main__ as app

def told(ret):
    value = ret._return_value
    error = isinstance(value, BaseException)
    return {
        "overrides": list(ret.overrides),
        "status": ret.status.name,
        "value": None if error or value is None else app.digest(value),
        "error": f"{type(value).__name__}: {value}" if error else None,
    }

jobs, batches = int(os.environ["CHAOS_JOBS"]), int(os.environ["CHAOS_BATCHES"])
returns = []
for batch in range(batches):
    numbers = range(jobs * batch // batches, jobs * (batch + 1) // batches)
    returns += self.launcher.launch([[f"+n={n}"] for n in numbers], initial_job_idx=numbers.start)
with open("returns.json.new", "w") as file:
    json.dump([told(ret) for ret in returns], file)
os.replace("returns.json.new", "returns.json")  # main may be killed here, too
"""


# --- processes ---


def stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time; None: there is no such process."""
    try:
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent), int(rest[17])


def descendants() -> dict[int, tuple[int, int]]:
    """Parent and start time of every live process below this one, by pid."""
    found = {pid: stat(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    below: dict[int, tuple[int, int]] = {}
    front = {os.getpid()}
    while front:
        front = {pid for pid, facts in found.items() if facts is not None and facts[1] in front}
        below.update({pid: (facts[1], facts[2]) for pid in front if (facts := found[pid]) is not None})
    return {pid: facts for pid, facts in below.items() if (now := found[pid]) is not None and now[0] not in "ZX"}


def send(pid: int, started: int, signum: int) -> bool:
    """Signal the process that had this pid and start time; False where it is gone."""
    try:
        pidfd = _pidfd.pidfd_open(pid)
    except OSError:
        return False
    try:
        facts = stat(pid)  # the pidfd holds the process that has the pid now: is it still the same?
        if facts is None or facts[0] in "ZX" or facts[2] != started:
            return False
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(pidfd, signum)
        else:
            os.kill(pid, signum)
    except ProcessLookupError:
        return False
    else:
        return True
    finally:
        os.close(pidfd)


def reap() -> None:
    """Take what has ended and fell to this process."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def wait_until_none_is_left(within_s: float) -> dict[int, str]:
    """Block until no descendant lives; the commands of those that do when the time is over."""
    deadline = time.monotonic() + within_s
    while True:
        reap()
        left = descendants()
        if not left or time.monotonic() > deadline:
            return {pid: command(pid) for pid in left}
        try:
            pidfd = _pidfd.pidfd_open(next(iter(left)))
        except OSError:
            continue
        _descriptors.wait_readable([pidfd], 0.05)
        os.close(pidfd)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def kill_all() -> None:
    """SIGKILL to everything below this process, until nothing new appears."""
    while left := descendants():
        for pid, (_, started) in left.items():
            send(pid, started, signal.SIGKILL)
        reap()


# --- what is on disk ---


@dataclass(frozen=True)
class Disk:
    """What a sweep directory says, read without the package's own readers."""

    sweep: Path
    ran: Path

    def journal(self) -> list[dict[str, Any]]:
        path = self.sweep / ".gpu_pool/journal.jsonl"
        events = []
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                events.append(json.loads(line))
            except ValueError:  # cut by a SIGKILL
                continue
        return events

    def completed(self) -> dict[int, str]:
        """The digest of the return of each job that has ended by itself as COMPLETED, and was not stopped before."""
        stopped: set[int] = set()
        for event in self.journal():
            if event["event"] == "stop":
                stopped.add(event["job"])
            elif event["event"] == "start":
                stopped.discard(event["job"])
        found = {}
        for job in (self.sweep / ".gpu_pool/jobs").glob("*"):
            try:
                outcome = json.loads((job / "outcome.json").read_bytes())
                payload = (job / "return.pickle").read_bytes()
            except (OSError, ValueError):
                continue
            sha = hashlib.sha256(payload).hexdigest()
            if outcome["status"] == "COMPLETED" and outcome["sha256"] == sha and int(job.name) not in stopped:
                found[int(job.name)] = sha
        return found

    def runs(self) -> Counter[int]:
        """How often each job has run."""
        return Counter({n: lines.count("run") for n, lines in self._records()})

    def done(self) -> set[int]:
        """The jobs that came to the end of their task function at least once."""
        return {n for n, lines in self._records() if "done" in lines}

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        for path in self.ran.iterdir():
            yield int(path.name), [line.split()[0] for line in path.read_text().splitlines()]

    def returns(self) -> list[dict[str, Any]] | None:
        """What came back to main; None: nothing did."""
        path = self.sweep.parent / "returns.json"
        found: list[dict[str, Any]] | None = json.loads(path.read_text()) if path.exists() else None
        return found


# --- one sweep under attack ---


@dataclass
class Figures:
    """What is told at the end."""

    rounds: int = 0
    sweeps: int = 0
    runs: int = 0
    completed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@dataclass
class Round:
    """One sweep directory, and all that happens to it."""

    name: str
    chance: random.Random
    directory: Path
    resume: bool
    figures: Figures
    jobs: int = 0
    batches: int = 1
    start_method: str = "fork"
    max_retries: int = 0
    ranks: int = 0  # 0: no group
    violations: list[str] = field(default_factory=list)
    _attacked: set[int] = field(default_factory=set)  # pids of jobs
    _hit: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.jobs, self.batches = self.chance.randint(4, 14), self.chance.randint(1, 3)
        self.start_method = self.chance.choices(["fork", "forkserver", "spawn"], [4, 1, 1])[0]
        self.max_retries = self.chance.choice([0, 0, 1])  # after a crash, as by default
        self.ranks = self.chance.choice([0, 0, 2]) if find_spec("torch") else 0
        self.disk = Disk(self.directory / "sweep", self.directory / "ran")
        self.disk.ran.mkdir(parents=True)
        shutil.copy(chaos_app.__file__, self.directory / "app.py")
        write_sweeper(self.directory, SWEEP)

    def run(self) -> None:
        """Sweep after sweep, until one ends by itself; at most five that are attacked."""
        for attempt in range(6 if self.resume else 1):
            kills = self.chance.choice([1, 1, 2, 3]) if attempt < 5 else 0
            if self._sweep(kills) or self.violations:
                break
        self.figures.rounds += 1
        self.figures.runs += sum(self.disk.runs().values())
        self.figures.completed += len(self.disk.completed())
        self.figures.violations += [f"{self.name}: {text}" for text in self.violations]

    def _sweep(self, kills: int) -> bool:
        """One sweep; True where it ended by itself."""
        before, runs = self.disk.completed(), self.disk.runs()
        self._attacked.clear()
        self._hit.clear()
        (self.directory / "returns.json").unlink(missing_ok=True)
        log = (self.directory / "main.log").open("a")
        main = subprocess.Popen(
            [sys.executable, "app.py", "-m", "hydra/launcher=gpu_pool", "hydra/sweeper=own", "hydra.sweep.dir=sweep"]
            + [f"hydra.launcher.cpu_slots={SLOTS}", "hydra.launcher.gpus=[]", f"hydra.launcher.kill_grace_s={GRACE_S}"]
            + [f"hydra.launcher.start_method={self.start_method}", f"hydra.launcher.max_retries={self.max_retries}"]
            + (["hydra.launcher.resume=true"] if self.resume else [])
            + (["hydra.launcher.mode=ddp", f"hydra.launcher.ddp.nproc_per_node={self.ranks}"] if self.ranks else []),
            cwd=self.directory,
            env={
                **os.environ,
                "CHAOS_SEED": self.name,
                "CHAOS_RAN": str(self.disk.ran),
                "CHAOS_JOBS": str(self.jobs),
                "CHAOS_BATCHES": str(self.batches),
                "CHAOS_RANKS": str(self.ranks),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.figures.sweeps += 1
        main_pidfd = _pidfd.pidfd_open(main.pid)
        for kill in range(kills):
            early, late = self.chance.uniform(0, 0.8), self.chance.uniform(0.7, 2)  # some 0.7 s are for Hydra's imports
            late += 2 if self.ranks else 0  # and torch's
            wait = early if kill else self.chance.choice([early, late, late])
            if _descriptors.wait_readable([main_pidfd], wait):
                break
            self._attack(main.pid)
        if not _descriptors.wait_readable([main_pidfd], HANGS_AFTER_S):
            self.violations.append(f"the sweep hangs: {list(map(command, descendants()))}")
            kill_all()
        os.close(main_pidfd)
        main.wait()
        if main.returncode and not self._hit.keys() - OF_JOBS:
            self.violations.append(f"main ended with {main.returncode}, and only jobs had been attacked")
        left = wait_until_none_is_left(GONE_WITHIN_S)
        if left:
            self.violations.append(f"alive after the end: {left}")
            kill_all()
        by_itself = not (self._hit.keys() - OF_JOBS)
        self._check(before, runs, by_itself)
        return by_itself

    def _attack(self, main: int) -> None:
        """One blow, at whatever is there now."""
        below = descendants()
        line = ("main", "guard", "supervisor", "job", *(["rank"] if self.ranks else []), "child")
        kinds: dict[str, list[int]] = {kind: [main] if kind == "main" else [] for kind in line}
        for pid in below:
            depth, at = 0, pid
            while at != main and at in below:
                depth, at = depth + 1, below[at][0]
            if at == main and depth:
                kinds[line[min(depth, len(line) - 1)]].append(pid)
        # Where both are killed, nobody is left to end what their jobs have started.
        for one, other in (("guard", "supervisor"), ("supervisor", "guard")):
            if self._hit[one]:
                kinds[other] = []
        weights = {"main": 5, "guard": 2, "supervisor": 3, "job": 8, "rank": 8, "child": 3, "all": 2, "all politely": 1}
        there = [kind for kind in weights if kind.startswith("all") or kinds.get(kind)]
        kind = self.chance.choices(there, [weights[kind] for kind in there])[0]
        if kind == "all":
            kill_all()
            self._note(kind, signal.SIGKILL)
        elif kind == "all politely":
            for pid, (_, started) in below.items():
                send(pid, started, signal.SIGTERM)
            self._note(kind, signal.SIGTERM)
        else:
            pid = self.chance.choice(sorted(kinds[kind]))
            signum = self.chance.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [6, 3, 1])[0]
            if pid in below and send(pid, below[pid][1], signum):
                self._note(kind, signum)
                if kind in {"job", "rank"}:
                    self._attacked.add(pid if kind == "job" else below[pid][0])

    def _note(self, kind: str, signum: signal.Signals) -> None:
        self._hit[kind] += 1
        self.figures.kills[f"{kind} {signum.name}"] += 1

    def _check(self, before: dict[int, str], runs: Counter[int], by_itself: bool) -> None:
        completed, ran, done, returns = self.disk.completed(), self.disk.runs(), self.disk.done(), self.disk.returns()
        wrong = self.violations.append
        for n, sha in before.items():
            if ran[n] != runs[n]:
                wrong(f"job {n} had completed, and ran again")
            if completed.get(n) != sha:
                wrong(f"job {n} had completed, and its result {'differs' if n in completed else 'is gone'}")
        for n in completed.keys() - done:
            wrong(f"job {n} is on disk as completed, and never was")
        if by_itself and returns is None:
            wrong("the sweep ended by itself, and main got nothing")
        if returns is None:
            return
        if [ret["overrides"] for ret in returns] != [[f"+n={n}"] for n in range(self.jobs)]:
            wrong(f"the returns are not those of the jobs, in order: {returns}")
            return
        pids = {event["job"]: event["pid"] for event in self.disk.journal() if event["event"] == "start"}
        for n, ret in enumerate(returns):
            right = chaos_app.digest(chaos_app.value(self.name, n))
            if ret["status"] == "COMPLETED" and (n not in completed or ret["value"] != right):
                wrong(f"job {n} came back as completed, and is not, or with another value: {ret}")
            if ret["status"] != "COMPLETED" and n in completed:
                wrong(f"job {n} has completed, and came back as failed: {ret}")
            if by_itself and ret["status"] != "COMPLETED" and pids.get(n) not in self._attacked:
                if chaos_app.kind(self.name, n) != "failing":
                    wrong(f"job {n} was not attacked, and did not complete: {ret}")
                elif ret["error"] != f"ValueError: job {n} fails":
                    wrong(f"job {n} failed in another way than its own: {ret}")


def main() -> int:
    """Rounds until the time is over; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--no-resume", action="store_true", help="one sweep a round, in a directory of its own")
    parser.add_argument("--dir", help="where the rounds' directories are made; those with a violation are kept")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    _process.become_subreaper()
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir=arguments.dir))
    figures, deadline = Figures(), time.monotonic() + 60 * arguments.minutes
    try:
        while time.monotonic() < deadline and len(figures.violations) < 10:
            name = f"{arguments.seed}.{figures.rounds}"
            before, sweeps = figures.kills.copy(), figures.sweeps
            one = Round(name, random.Random(name), root / name, not arguments.no_resume, figures)
            one.run()
            kills = ", ".join((figures.kills - before).elements()) or "none"
            verdict = f"VIOLATED, kept in {one.directory}: {'; '.join(one.violations)}" if one.violations else "ok"
            print(
                f"round {name}: {one.jobs} jobs by {one.start_method}{' in ranks' if one.ranks else ''}, "
                f"{figures.sweeps - sweeps} sweeps, "
                f"kills: {kills}: {verdict}",
                flush=True,
            )
            if not one.violations:
                shutil.rmtree(one.directory)
    except KeyboardInterrupt:
        pass  # the figures so far
    finally:
        kill_all()
    print(
        f"{figures.rounds} rounds, {figures.sweeps} sweeps, {figures.runs} runs of jobs, {figures.completed} of them "
        f"completed, {figures.kills.total()} kills, {len(figures.violations)} violations; seed {arguments.seed}"
    )
    for kind, count in sorted(figures.kills.items()):
        print(f"  {count:5d}  {kind}")
    if figures.violations:
        return 1
    root.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
