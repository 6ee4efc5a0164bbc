"""Disturbs a job whose ranks go on in place, for as long as is wished, and checks what must hold.

    python -m tests.chaos one-host [--minutes 60] [--seed N]     four ranks and a spare
    python -m tests.chaos hosts [--minutes 60] [--seed N]        two ranks on each of three hosts

Ranks are killed and stopped, and so are launchers and guardians; hosts are frozen, cut off, or
killed with all that runs there. The training is tests/system/in_place.py. At any time

- no step has two digests of the state, and no process does a step twice;
- a new process begins with a step that comes next: nobody begins anew while others have a state;
- a process that nobody has disturbed does not end;
- the next step comes within a minute.

`make check-long` runs each for an hour.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.hosts import Hosts, why_not
from tests.system.nodes import Agents, alive_on, children, is_zombie
from tests.system.test_in_place import PROGRAM
from tests.system.test_in_place_hosts import RALLYPOINT, WATCHFUL, WORKER

PATIENCE_S = 60.0  # longer than anybody waits in docs/timeouts.md for a rank that is not lost
CALM_S = 12.0  # after a disturbance of a process, until nothing can follow from it any more
KEPT_STEPS = 20_000
READ_S = 5.0  # within which all that was told by then has been read, on a busy machine
AFTERWARDS_S = 3.0  # until launchers have reported what they know of a broken promise
PER_HOST = 10_000_000  # in_place.py's numbers of processes
PROGRAM_WORDS = ("1000000000", "0.005", "until", "shape=512", "timeout_s=30")


class BrokenPromiseError(Exception):
    """What must hold does not."""


class History:
    """What the ranks have told, by step and by process; checked as it is read."""

    def __init__(self, directory: Path, is_alive: Callable[[int], bool]) -> None:
        self.newest = 0
        self.newest_at = time.monotonic()
        self.longest_gap_s = 0.0
        self.sizes: Counter[int] = Counter()
        self.disturbed: dict[int, float] = {}  # until when
        # By host: until when its processes may tell late of what they did before they were stopped.
        self.late: dict[int, float] = {}
        self.last: dict[int, tuple[int, float]] = {}  # step and time, of processes that live
        self._newer: deque[tuple[float, int]] = deque()  # when a step was the newest
        self._digests: dict[int, str] = {}
        self._read: dict[Path, int] = {}
        self._directory, self._is_alive = directory, is_alive

    def read(self) -> None:
        """Take up what is new.

        Raises:
            BrokenPromiseError: it must not be.
        """
        lines = []
        for path in self._directory.glob("*.log"):
            process = int(path.stem)
            is_alive = self._is_alive(process)
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rpartition("\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                step, digest, _, size, at_s, _ = line.split(" ")
                lines.append((float(at_s), process, int(step), digest, int(size)))
            if not is_alive:
                self._ended(process)
                path.unlink()
                del self._read[path]
        for told in sorted(lines):
            self._take(*told)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """A later process may have the number of one that has ended, and is not disturbed by it."""
        for process in self.disturbed.keys() - self.last.keys():
            # Its log, if there is one, is yet to be read to its end.
            if not (self._is_alive(process) or (self._directory / f"{process}.log").exists()):
                del self.disturbed[process]

    def _take(self, at_s: float, process: int, step: int, digest: str, size: int) -> None:
        if self._digests.setdefault(step, digest) != digest:
            raise BrokenPromiseError(f"step {step} has two states; one is that of {process}")
        is_late = at_s < self.late.get(process // PER_HOST, 0.0)
        if process not in self.last and step < self._newest_by(at_s - READ_S) - 1 and not is_late:
            raise BrokenPromiseError(f"{process} begins with step {step} after {self.newest}")
        if process in self.last and step <= self.last[process][0]:
            raise BrokenPromiseError(f"{process} does step {step} after {self.last[process][0]}")
        self.last[process] = step, at_s
        if at_s > self.disturbed.get(process, at_s) + CALM_S:
            del self.disturbed[process]
        if step > self.newest:
            self.longest_gap_s = max(self.longest_gap_s, at_s - self.newest_at)
            self.newest, self.newest_at = step, at_s
            self._newer.append((at_s, step))
            self.sizes[size] += 1
            self._digests.pop(step - KEPT_STEPS, None)

    def _newest_by(self, at_s: float) -> int:
        """The newest step then."""
        while len(self._newer) > 1 and self._newer[1][0] <= at_s:
            self._newer.popleft()
        return self._newer[0][1] if self._newer and self._newer[0][0] <= at_s else 0

    def _ended(self, process: int) -> None:
        # One that began as its host was disturbed was not known then.
        with_host = time.monotonic() < self.late.get(process // PER_HOST, 0.0)
        if process in self.last and process not in self.disturbed and not with_host:
            raise BrokenPromiseError(f"{process} has ended, and nobody has disturbed it")
        self.last.pop(process, None)

    def trained(self, within_s: float = 1.0) -> list[int]:
        """The processes that have made one of the newest steps, and whom nobody has disturbed."""
        since = time.monotonic() - within_s
        return sorted(
            process
            for process, (_, at_s) in self.last.items()
            if at_s > since and process not in self.disturbed
        )


class Chaos:
    """A job, and what is done to it.

    Args:
        pid_of: of a process that has told of itself; 0: it is gone.
        check: raises BrokenPromiseError if the launchers are not as they should be.
    """

    def __init__(
        self,
        directory: Path,
        chance: random.Random,
        pid_of: Callable[[int], int],
        check: Callable[[], None],
    ) -> None:
        self.chance = chance
        self.history = History(directory, lambda process: pid_of(process) != 0)
        self.done: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=60)
        self._pid_of, self._check = pid_of, check
        self._began = time.monotonic()

    def note(self, what: str, whom: object) -> None:
        """It is done now."""
        self.done[what] += 1
        self.story.append(f"{time.monotonic() - self._began:9.2f} {what} {whom}")

    def pause(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Watch for so long, or until something is so.

        Raises:
            BrokenPromiseError: something does not hold.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            time.sleep(0.02)
            self.history.read()
            self._check()
            if time.monotonic() - self.history.newest_at > PATIENCE_S:
                raise BrokenPromiseError(f"no step after {self.history.newest}")

    def await_steps(self, size: int) -> None:
        """Until so many undisturbed processes train.

        Raises:
            BrokenPromiseError: they do not.
        """
        self.pause(2 * PATIENCE_S, until=lambda: len(self.history.trained()) >= size)
        if len(self.history.trained()) < size:
            raise BrokenPromiseError(f"no {size} ranks train any more")

    def signal(self, process: int, number: signal.Signals, what: str = "") -> None:
        """Send it to a rank."""
        self.history.disturbed[process] = math.inf
        if pid := self._pid_of(process):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.note(what or number.name, process)

    def hold(self, pid: int, seconds: float, what: str) -> None:
        """Stop a process for so long."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.note(what, f"{pid} for {seconds:.2f} s")
            try:
                self.pause(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)

    def disturb_rank(self, kept: int) -> None:
        """Kill one or several, or stop one; so many that train remain."""
        candidates = self.history.trained()
        how = self.chance.choices(
            ("kill", "kill two", "SIGSEGV", "stop", "long stop"), (50, 15, 5, 20, 3)
        )[0]
        victims = 2 if how == "kill two" else 1
        if len(candidates) < kept + victims:
            return
        chosen = self.chance.sample(candidates, victims)
        if how == "kill two":
            self.signal(chosen[0], signal.SIGKILL)
            time.sleep(self.chance.choice((0, 0, 0.002, 0.01, 0.05)))
            self.signal(chosen[1], signal.SIGKILL)
        elif how in ("kill", "SIGSEGV"):
            self.signal(chosen[0], signal.SIGSEGV if how == "SIGSEGV" else signal.SIGKILL)
        else:
            seconds = 12.0 if how == "long stop" else self.chance.uniform(0.02, 3.0)
            self.signal(chosen[0], signal.SIGSTOP, how)
            self.pause(seconds)
            if pid := self._pid_of(chosen[0]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.history.disturbed[chosen[0]] = time.monotonic()

    def report(self) -> None:
        """What was done, and what it did."""
        history = self.history
        print(f"{history.newest} steps, by so many ranks: {dict(sorted(history.sizes.items()))}")
        print(f"done: {dict(self.done.most_common())}")
        print(f"longest time without a step: {history.longest_gap_s:.2f} s", flush=True)


@contextmanager
def one_host(
    directory: Path, chance: random.Random
) -> Iterator[tuple[Chaos, list[Callable[[], None]]]]:
    """The job, and what may be done to it, each equally often."""
    flags = ["--nproc-per-node", "4", "--spares", "1", "--max-restarts", "1000000"]
    command = [*RALLYPOINT, "run", *flags, PROGRAM, str(directory), *PROGRAM_WORDS]
    output = directory / "output"
    with output.open("wb") as file:
        agent = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "TMPDIR": str(directory)}
        )

    def check() -> None:
        if agent.poll() is not None:
            raise BrokenPromiseError(f"the launcher has ended with status {agent.returncode}")

    chaos = Chaos(directory, chance, lambda process: 0 if is_zombie(process) else process, check)

    def guardian() -> int:
        return children(agent.pid)[0]

    def kill_standby() -> None:
        waiting = sorted({*children(guardian())} - {*chaos.history.last})
        if waiting:
            victim = chance.choice(waiting)
            chaos.history.disturbed[victim] = math.inf
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                chaos.note("kill a newcomer", victim)

    ways: list[Callable[[], None]] = [lambda: chaos.disturb_rank(1)] * 16
    ways += [kill_standby] * 2
    ways += [lambda: chaos.hold(agent.pid, chance.uniform(0.02, 2.5), "stop the launcher")]
    ways += [lambda: chaos.hold(guardian(), chance.uniform(0.02, 2.5), "stop the guardian")]
    try:
        chaos.await_steps(4)
        yield chaos, ways
        (directory / "enough").touch()
        if agent.wait(PATIENCE_S) != 0:
            raise BrokenPromiseError(f"the launcher has ended with status {agent.returncode}")
    except BaseException:
        print(output.read_text()[-10_000:])
        raise
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()


@contextmanager
def three_hosts(
    directory: Path, chance: random.Random
) -> Iterator[tuple[Chaos, list[Callable[[], None]]]]:
    """The same on three hosts, of which one at a time is disturbed as a whole."""
    flags = ("--nnodes", "2:3", "--max-restarts", "1000000", *WATCHFUL)
    words = " ".join(PROGRAM_WORDS[3:])
    with Hosts(3) as hosts, Agents(hosts, directory) as agents:
        text = WORKER.replace(
            '"1000000", "0.005"', ", ".join(f'"{each}"' for each in PROGRAM_WORDS[:2])
        )
        (directory / "worker.py").write_text(text)
        pids: dict[int, int] = {}

        def pid_of(process: int) -> int:
            if process not in pids:
                number = process // PER_HOST
                for outside in alive_on(hosts[number]):
                    with suppress(OSError):
                        status = Path(f"/proc/{outside}/status").read_text()
                        inside = status.partition("NSpid:")[2].partition("\n")[0].split()[-1]
                        pids[number * PER_HOST + int(inside)] = outside
            if is_zombie(pids.get(process, 0)):
                pids.pop(process, None)
            return pids.get(process, 0)

        def check() -> None:
            for number in (1, 2, 3):
                if number not in away and not agents.runs(number):
                    raise BrokenPromiseError(f"the launcher of host {number} has ended")

        away: set[int] = set()
        chaos = Chaos(directory, chance, pid_of, check)

        def those_of(number: int) -> list[int]:
            return [each for each in chaos.history.last if each // PER_HOST == number]

        @contextmanager
        def disturbed(number: int) -> Iterator[None]:
            """Until all are together again."""
            chaos.history.disturbed |= dict.fromkeys(those_of(number), math.inf)
            chaos.history.late[number] = math.inf
            yield
            since = time.monotonic()
            chaos.pause(PATIENCE_S, until=lambda: len(those_after(since)) >= 5)
            if len(those_after(since)) < 5:
                raise BrokenPromiseError(f"host {number} does not come back")
            chaos.history.disturbed |= dict.fromkeys(those_of(number), time.monotonic())
            chaos.history.late[number] = time.monotonic() + CALM_S

        def those_after(since: float) -> list[int]:
            return [each for each, (_, at_s) in chaos.history.last.items() if at_s > since]

        def some_seconds() -> float:
            return chance.choice((chance.uniform(0.1, 1.0), chance.uniform(1.0, 8.0)))

        def cut_off() -> None:
            number, seconds = chance.choice((1, 2, 3)), some_seconds()
            with disturbed(number):
                chaos.note("cut off", f"host {number} for {seconds:.2f} s")
                hosts.pull_cable(number)
                try:
                    chaos.pause(seconds)
                finally:
                    hosts.plug_cable(number)

        def freeze() -> None:
            number, seconds = chance.choice((1, 2, 3)), some_seconds()
            with disturbed(number):
                stopped, agent = alive_on(hosts[number]), agents.pid(number)
                chaos.note("freeze", f"host {number} for {seconds:.2f} s")
                send(stopped, signal.SIGSTOP)
                try:
                    chaos.pause(seconds)
                finally:
                    agents.send(number, signal.SIGCONT)
                    send([pid for pid in stopped if pid != agent], signal.SIGCONT)

        def kill_host() -> None:
            number = chance.choice((1, 2, 3))
            with disturbed(number):
                away.add(number)
                chaos.note("kill all on", f"host {number}")
                agents.end_all(number)
                chaos.pause(chance.uniform(0.0, 2.0))
                start(number)
                away.discard(number)

        def send(pids: list[int], number: signal.Signals) -> None:
            for pid in chance.sample(pids, len(pids)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        def start(number: int) -> None:
            agents.start(number, *flags, workers=2, environ={"OPTIONS": words})

        ways: list[Callable[[], None]] = [lambda: chaos.disturb_rank(2)] * 14
        ways += [cut_off, freeze, kill_host] * 2
        for number in (1, 2, 3):
            start(number)
        try:
            chaos.await_steps(6)
            yield chaos, ways
            (directory / "enough").touch()
            for number in (1, 2, 3):
                if agents.ended(number, within_s=PATIENCE_S) != 0:
                    raise BrokenPromiseError(f"the launcher of host {number} has failed")
        except BaseException:
            print(agents.story()[-20_000:])
            raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=("one-host", "hosts"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    if options.where == "hosts" and (reason := why_not()):
        raise SystemExit(f"needs test hosts: {reason}")
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    job = one_host if options.where == "one-host" else three_hosts
    end = time.monotonic() + 60 * options.minutes
    told = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    with job(scratch, chance) as (chaos, ways):
        try:
            while time.monotonic() < end:
                chaos.pause(chance.expovariate(1 / 0.5))
                chance.choice(ways)()
                if time.monotonic() - told > 300:
                    chaos.report()
                    told = time.monotonic()
        except BrokenPromiseError:
            print("\n".join(chaos.story))
            time.sleep(AFTERWARDS_S)
            print(f"what the launchers and ranks wrote is in {scratch}")
            columns = ["-eo", "pid,ppid,stat,etimes,wchan:20,args", "--cols", "160"]
            subprocess.run(["ps", *columns], check=False)
            raise
        finally:
            chaos.report()
    shutil.rmtree(scratch)
    print("everything held")


if __name__ == "__main__":
    main()
