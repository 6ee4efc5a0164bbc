"""`rallypoint run`: from the command line to a `Job`, and on to the agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import read_port_range
from rallypoint.base.wording import printable
from rallypoint.base.worker_env import AS_GLOO, HANG_AFTER_S, SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S
from rallypoint.cli.flags import ENDINGS, GROUPS, USAGE
from rallypoint.cli.log_flags import notes_of, read_logs
from rallypoint.cli.nodes import read_place
from rallypoint.cli.number_flags import seconds, whole
from rallypoint.cli.options import FlagGroup, UsageError, describe_groups, inherited_note, parse
from rallypoint.cli.surroundings import fill_in
from rallypoint.cli.token_flag import VARIABLE, read_token
from rallypoint.cli.workers import bind_workers, count_workers, worker_program
from rallypoint.launch.job import STOP_SIGNALS, Job, OnHang, Talk

PROGRAM = "rallypoint run"
LAUNCHER = ("-m", "rallypoint", "run")
# Flags that no script has for itself.
_ONLY_OURS = ("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--standalone",
              "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf")  # fmt: skip
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # PyTorch's variable


def run(words: Sequence[str]) -> int:
    """Run `rallypoint run WORDS`; returns the exit status."""
    return perform(words, GROUPS, read_job)


def perform(
    words: Sequence[str],
    groups: Sequence[FlagGroup],
    read: Callable[[Mapping[str, str], Sequence[str], Mapping[str, str]], tuple[Job, list[str]]],
    launcher: Sequence[str] = LAUNCHER,
) -> int:
    """Launch the job that `read` makes of the flags; returns the exit status.

    `launcher`: the arguments with which Python starts another such launcher.
    """
    flags = [flag for group in groups for flag in group.flags]
    try:
        values, command = parse(words, flags, program=PROGRAM, environ=os.environ)
        if "--help" in values:
            print(USAGE, describe_groups(groups), ENDINGS, sep="\n", end="")
            return 0
        if "--print-completion" in values:
            from rallypoint.cli.completion import completion

            print(completion(values["--print-completion"], flags), end="")
            return 0
        elsewhere = _starter_elsewhere(values)
        if elsewhere is not None:
            return elsewhere(values, command, flags, read=read, launcher=launcher)
        job, notes = read(values, command, os.environ)
        if PORT_RANGE in job.environ:
            os.environ[PORT_RANGE] = job.environ[PORT_RANGE]  # for this process's own ports
        if job.talk is not Talk.QUIET:
            for note in [*notes, *note_on_threads(job), *_note_on_loopback(job)]:
                print(printable(f"{PROGRAM}: {note}"), file=sys.stderr)
        from rallypoint.launch.agent.loop import run as run_job

        return run_job(job)
    except (UsageError, InvalidArgumentError) as error:
        text = str(error).removeprefix(f"{PROGRAM}: ")
        note = inherited_note(text, words, flags, os.environ)
        print(printable(f"{PROGRAM}: {text}{note}"), file=sys.stderr)
        return 2
    except HostError as error:
        print(printable(f"{PROGRAM}: {error}"), file=sys.stderr)
        return 1


def _starter_elsewhere(values: Mapping[str, str]) -> Callable[..., int] | None:
    """The function that starts launchers on other machines, if the flags ask for that."""
    if values.get("--on") == "ray":
        from rallypoint.cli.ray.on_ray import run_on_ray

        return run_on_ray
    if "--hosts" in values or "--hostfile" in values:
        from rallypoint.cli.remote.starter import run_on_hosts

        return run_on_hosts
    return None


def read_job(
    values: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> tuple[Job, list[str]]:
    """The job, and a sentence for each flag that has no effect on it.

    Raises:
        UsageError, InvalidArgumentError: the flags are invalid.
    """
    for name in ("--rsh", "--env"):
        if name in values:
            raise UsageError(f"{PROGRAM}: {name} needs --hosts or --hostfile.")
    for name in ("--cpus-per-node", "--gpus-per-node"):
        if name in values:
            raise UsageError(f"{PROGRAM}: {name} is only for nodes of a Ray cluster; add --on ray.")
    token = read_token(values, environ)
    if token is None and "--require-token" in values:
        _refuse_without_token(values)
    if "--port-range" in values:
        read_port_range(values["--port-range"])
        environ = {**environ, PORT_RANGE: values["--port-range"]}
    if "--as-gloo" in values:
        environ = _as_gloo(environ)
    values, surroundings = fill_in(values, environ)
    place = read_place(values, token)
    workers = count_workers(values, environ)
    restarts, spares = whole(values, "--max-restarts", 0), whole(values, "--spares", 0)
    if spares and "--virtual-local-rank" in values:
        raise UsageError(
            f"{PROGRAM}: --spares cannot be used with --virtual-local-rank: a spare does not know "
            "its device before it has a place."
        )
    cpus, binding_note = bind_workers(values, workers, environ)
    logs = read_logs(values, environ)
    job = Job(
        command=worker_program(
            values, command, environ, is_run_once=workers == 1 and not restarts and not spares
        ),
        local_world_size=workers,
        role=values.get("--role", "default"),
        max_restarts=restarts,
        spares=spares,
        nodes=place.nodes,
        rendezvous=place.rendezvous,
        run_id=place.run_id,
        host=values.get("--local-addr") or os.uname().nodename,
        environ=environ,
        logs=logs,
        shutdown_timeout_s=_shutdown_timeout_s(values, environ),
        stop_signals=_stop_signals(values),
        has_virtual_local_rank="--virtual-local-rank" in values,
        cpus=cpus,
        talk=_talk(values),
        events_file=values.get("--json-events", ""),
        prints_events=_prints_events(values),
        on_hang=_on_hang(values),
        hang_after_s=_hang_after_s(values),
    )
    notes = [
        *surroundings,
        *place.notes,
        *notes_of(logs),
        *([binding_note] if binding_note else []),
    ]
    if behind := _behind(command):
        notes.insert(0, behind)
    meaningless = _meaningless(values)
    return job, [*notes, *meaningless] if job.talk is Talk.VERBOSE else notes


def _behind(command: Sequence[str]) -> str:
    """A note on launcher flags among the script's arguments, where they have no effect."""
    script, *arguments = command
    names = [word.partition("=")[0] for word in arguments]
    found = [name for name in names if name.replace("_", "-") in _ONLY_OURS]
    launcher = script.rpartition("/")[2].startswith(("rallypoint", "torchrun", "torch.distributed"))
    if not found or launcher:
        return ""
    listed = ", ".join(dict.fromkeys(found))
    return (
        f"{listed} {'is' if len(set(found)) == 1 else 'are'} behind {script}, and so passed to it;"
        f" write launcher flags before it, as in: {PROGRAM} {found[0]} ... {script}"
    )


def _as_gloo(environ: Mapping[str, str]) -> Mapping[str, str]:
    if environ.get(_AUTOLOAD, "1") != "1":
        raise UsageError(
            f"{PROGRAM}: --as-gloo needs PyTorch to load its installed backends, which"
            f" {_AUTOLOAD}={environ[_AUTOLOAD]} turns off; unset that variable."
        )
    return {**environ, AS_GLOO: "1"}


def note_on_threads(job: Job) -> list[str]:
    """A note if the OMP_NUM_THREADS=1 that workers get leaves CPUs idle."""
    cpus, workers = len(os.sched_getaffinity(0)), job.local_world_size
    if workers == 1 or "OMP_NUM_THREADS" in job.environ or cpus < 2 * workers:
        return []
    return [
        "each worker gets OMP_NUM_THREADS=1, as with torchrun; set it yourself, to"
        f" {cpus // workers} for {cpus} CPUs and {workers} workers, if one thread is too few"
    ]


def _note_on_loopback(job: Job) -> list[str]:
    """A note if the workers cannot reach their store: one that waits for it may say nothing."""
    if job.nodes.count > 1 or job.rendezvous is not None:
        return []
    from rallypoint.base.address import loopback_trouble

    trouble = loopback_trouble("127.0.0.1")
    return [trouble] if trouble else []


def _stop_signals(values: Mapping[str, str]) -> tuple[str, ...]:
    text = values.get("--signals-to-handle")
    if text is None:
        return STOP_SIGNALS
    from rallypoint.launch.agent.signals import read_signals

    return read_signals(text, "--signals-to-handle")


def _shutdown_timeout_s(values: Mapping[str, str], environ: Mapping[str, str]) -> float:
    default = seconds(environ, SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S)
    return seconds(values, "--shutdown-timeout", default)


def _refuse_without_token(values: Mapping[str, str]) -> None:
    nnodes = values.get("--nnodes", "1").rpartition(":")[2]
    if nnodes != "1" and "--standalone" not in values:
        raise UsageError(
            f"{PROGRAM}: --require-token: this job of several machines has no token; set the same"
            f" {VARIABLE}, or --token-file, on all of them."
        )


def _talk(values: Mapping[str, str]) -> Talk:
    if "--quiet" in values and "--verbose" in values:
        raise UsageError(f"{PROGRAM}: --quiet and --verbose cannot be combined; choose one.")
    if "--quiet" in values:
        return Talk.QUIET
    return Talk.VERBOSE if "--verbose" in values else Talk.NORMAL


def _prints_events(values: Mapping[str, str]) -> bool:
    name = values.get("--event-log-handler", "null")
    if name not in ("null", "console", "dynamic_rendezvous"):
        raise UsageError(
            f"{PROGRAM}: --event-log-handler is {name!r}; it must be null or console; to write "
            "events to a file, use --json-events FILE."
        )
    return name == "console"


def _on_hang(values: Mapping[str, str]) -> OnHang:
    name = values.get("--on-hang", OnHang.REPORT.value)
    known = [each.value for each in OnHang]
    if name not in known:
        raise UsageError(
            f"{PROGRAM}: --on-hang is {name!r}; it must be {', '.join(known[:-1])} or {known[-1]}."
        )
    return OnHang(name)


def _hang_after_s(values: Mapping[str, str]) -> float:
    after_s = seconds(values, "--hang-after", HANG_AFTER_S)
    if not after_s:
        raise UsageError(
            f"{PROGRAM}: --hang-after is 0, but every job waits briefly; to turn the watch off, "
            "use --on-hang off."
        )
    return after_s


def _meaningless(values: Mapping[str, str]) -> list[str]:
    """Notes on flags that torchrun's users often give, and that have no effect here."""
    notes = []
    method = values.get("--start-method", "spawn")
    if method not in ("spawn", "fork", "forkserver"):
        raise UsageError(
            f"{PROGRAM}: --start-method is {method!r}; it must be spawn, fork or forkserver."
        )
    if method != "spawn":
        notes.append(f"--start-method {method} has no effect: workers are always new interpreters")
    if seconds(values, "--monitor-interval", 0.1) != 0.1:
        notes.append("--monitor-interval has no effect: workers are watched, not polled")
    return notes
