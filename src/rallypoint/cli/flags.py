"""The flags of `rallypoint run`: torchrun's and ours, as a table in the order of the help text, and
what their values mean.

read_job.py interprets them; docs/torchrun-differences.md lists where a meaning differs from
torchrun's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rallypoint.cli.options import (
    HELP,
    Flag,
    Options,
    UsageError,
    integer,
    one_of,
    reader,
    seconds,
    text,
    whole,
)
from rallypoint.cluster.environments import KINDS
from rallypoint.launch.job import STOP_SIGNALS, TOKEN, OnHang
from rallypoint.launch.log_spec import StreamMap

PROGRAM = "rallypoint run"
STATIC = "static"


def _nnodes(text: str) -> tuple[int, int]:
    """``"2"`` or ``"2:4"``: the minimum and the maximum number of nodes."""
    fewest, colon, most = text.partition(":")
    found = integer(fewest, 1), integer(most if colon else fewest, 1)
    if found[0] > found[1]:
        raise ValueError(text)
    return found


read_nnodes = reader(
    _nnodes,
    "{name} is {text!r}; it must be a number of at least 1, or a minimum and a maximum, as in 2:4.",
)


def read_configuration(text: str, name: str = "--rdzv-conf") -> dict[str, str]:
    """``"key=value,..."`` as a dictionary."""
    found: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(
                f"{name}: {item.strip()!r} is not KEY=VALUE; separate several with commas."
            )
        found[key.strip()] = value.strip()
    return found


def read_texts(text: str, _: str = "") -> tuple[str, ...]:
    """``"a,b"`` as two texts; a double comma is one comma in a text."""
    parts = [part.split(",") for part in text.split(",,")]
    found = parts[0]
    for part in parts[1:]:
        found = [*found[:-1], f"{found[-1]},{part[0]}", *part[1:]]
    return tuple(found)


def read_token(path: str | None, environ: Mapping[str, str]) -> bytes | None:
    """The job token, which machines must know to take part, from the file that --token-file names,
    or else from RALLYPOINT_TOKEN; None if there is none.
    """
    if path is not None:
        from rallypoint.store.token import read_token as read_file

        return read_file(path)
    return os.fsencode(environ.get(TOKEN, "")) or None


def _read_signals(text: str, name: str) -> tuple[str, ...]:
    from rallypoint.launch.agent.signals import read_signals

    return read_signals(text, name)


def _read_hang_after(text: str, name: str) -> float:
    after_s = seconds(text, name)
    if not after_s:
        raise UsageError(
            f"{name} is 0, but every job waits briefly; to turn the watch off, use --on-hang off."
        )
    return after_s


def read_command(text: str, name: str) -> tuple[str, ...]:
    """The words of a command."""
    import shlex

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name} {text}: {error}.") from None
    if not words:
        raise UsageError(f"{name} is empty; give a command, or leave it out for ssh.")
    return words


_read_streams = reader(StreamMap.parse, "{name}: {error}")
_read_ranks = reader(
    lambda text: frozenset(map(integer, map(str.strip, text.split(",")))) if text else None,
    "{name} is {text!r}; it must be local ranks, as in 0,1.",
)
_read_on_hang = reader(OnHang, "{name} is {text!r}; it must be off, report, restart or stop.")
_read_handler = reader(
    {"null": False, "console": True, "dynamic_rendezvous": False}.__getitem__,
    "{name} is {text!r}; it must be null or console; to write events to a file, use --json-events"
    " FILE.",
)
TOKEN_FILE = Flag(
    f"file with the token that machines need to connect;\n{TOKEN} sets it too",
    "FILE",
    text,
    None,
)


# fmt: off
class _WorkerOptions(Options, title="Number of workers"):
    nproc_per_node = Flag(
        "workers on this machine: a number; 'cpu' for one per usable CPU;\n"
        "'gpu' or 'xpu' for one per device; 'auto' for one per device, or\n"
        "per CPU without devices (default 1)", "N", text, "1",
        completes="auto cpu gpu xpu", elsewhere=(
            *("-n", "-np", "--np", "-p", "--nproc", "--nprocs", "--ntasks", "--ntasks-per-node"),
            *("--num-gpus", "--num-processes", "--num-proc", "--num-procs", "--num-workers"),
            *("-ppn", "--ppn", "--gpus", "--devices"),
        ))
    nnodes = Flag("number of machines, or its minimum and maximum (default 1; with\n"
                  "--hosts all of them; MIN: is allowed)", "N|MIN:MAX", read_nnodes, (1, 1),
                  elsewhere=("-N", "--nodes", "--num-nodes", "--num-machines"))
    role = Flag("value of ROLE_NAME in the workers (default 'default')", "NAME",
                text, "default")


class _ProgramOptions(Options, title="What runs"):
    not_flags = MappingProxyType({
        "--backend": "the script names its backend, in init_process_group; --as-gloo runs gloo's"
        " groups on Rallypoint's engine."
    })  # fmt: skip
    module = Flag.switch("run SCRIPT as a module, as python -m does", "-m")
    no_python = Flag.switch("run SCRIPT as a program, without Python")
    run_path = Flag.switch("run SCRIPT with runpy.run_path inside the interpreter")
    as_gloo = Flag.switch("run PyTorch's gloo process groups on Rallypoint's engine; set it on\n"
                     "all machines (RALLYPOINT_AS_GLOO=1)")
    preload = Flag("import these modules once on each machine, and fork the workers from\n"
                   "there; 'auto': those that SCRIPT imports (default: each worker imports\n"
                   "them)", "MODULE,...", text, "", completes="auto torch")
    virtual_local_rank = Flag.switch("each worker sees only one device, as device 0, and has\n"
                                "LOCAL_RANK=0")
    numa_binding = Flag("bind workers to CPUs near their GPU: node, socket, exclusive (a\n"
                        "share of the node's cores) or core-complex (cores with one cache)",
                        "MODE", text, None, completes="node socket exclusive core-complex")
    start_method = Flag("ignored, for torchrun's sake: workers are always new interpreters",
                        "METHOD", one_of("spawn", "fork", "forkserver"), "spawn",
                        completes="spawn fork forkserver")


class _FailureOptions(Options, title="Failures and shutdown"):
    max_restarts = Flag("how many times to restart all workers after one fails\n"
                        "(default 0)", "N", whole, 0)
    spares = Flag("extra workers on each machine that wait to replace lost ones; only\n"
                  "for scripts that use rallypoint.elastic, not PyTorch's process\n"
                  "groups (default 0)", "N", whole, 0)
    shutdown_timeout = Flag("time for workers to end before they are killed (default 30)",
                            "SECONDS", seconds, None)
    on_hang = Flag("when the job hangs: 'report' prints the reason (default);\n"
                   "'restart' ends the workers as if one had failed; 'stop' ends the\n"
                   "job; 'off' does not watch for hangs", "WHAT", _read_on_hang, OnHang.REPORT,
                   completes="off report restart stop")
    hang_after = Flag("a job counts as hung when ranks have waited this long, or a tenth of\n"
                      "it if a signal stopped a rank (default: 30, or twice their second\n"
                      "longest wait so far, whichever is longer)", "SECONDS",
                      _read_hang_after, None)
    signals_to_handle = Flag("signals that stop the job and are forwarded to the workers\n"
                             "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)", "NAMES",
                             _read_signals, STOP_SIGNALS)
    monitor_interval = Flag("ignored, for torchrun's sake: workers are watched, not polled",
                            "SECONDS", seconds, 0.1)


class _LogOptions(Options, title="Output and logs"):
    log_dir = Flag("write logs to DIR/RUN-ID_RANDOM/attempt_N/LOCAL-RANK/; the link\n"
                   "DIR/latest points to the newest job's", "DIR", text, None)
    redirects = Flag("streams to write to stdout.log and stderr.log instead of here:\n"
                     "0 none, 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:1,1:3",
                     "WHICH", _read_streams, StreamMap(), short="-r", completes="0 1 2 3")
    tee = Flag("streams to write to files and also here, with a prefix (values as\n"
               "for --redirects)", "WHICH", _read_streams, StreamMap(), short="-t",
               completes="0 1 2 3")
    log_prefix = Flag("start each line shown here with FORMAT, which may use\n"
                      "{rank}, {local_rank}, {role} and {host}, as in '{host}:{rank}: '",
                      "FORMAT", text, None)
    log_line_prefix_template = Flag("start teed lines with TEMPLATE, which may use\n"
                                    "${rank}, ${local_rank}, ${role_name} and ${hostname}, as in\n"
                                    "'${hostname}:${rank}: '\n"
                                    "(default '[${role_name}${local_rank}]:')",
                                    "TEMPLATE", text, "")
    local_ranks_filter = Flag("show only the output of these local ranks, as in 0,1", "RANKS",
                              _read_ranks, None)
    duplicate_stdout_filters = Flag(
        "also write teed lines of stdout that contain one of these texts to\n"
        "attempt_N/filtered_stdout.log; ',,' stands for a comma", "TEXTS", read_texts, ())
    duplicate_stderr_filters = Flag("the same for stderr", "TEXTS", read_texts, ())
    logs_specs = Flag("for torchrun's sake: only 'default' is accepted", "NAME",
                      text, "default")
    quiet = Flag.switch("print only why the job ended", "-q")
    verbose = Flag.switch("print each decision and its reason", "-v")
    metrics = Flag("serve metrics of all your jobs here to Prometheus at this address, as\n"
                   "`rallypoint metrics` does, until the last job here has ended", "HOST:PORT",
                   text, "", completes="127.0.0.1:9431")
    metrics_public = Flag.switch("allow --metrics an address that other machines reach")
    page = Flag("serve a page of this job for your browser at this address or Unix\n"
                "socket, as `rallypoint page` does; port 0: a free one", "HOST:PORT|PATH",
                text, "", completes="127.0.0.1:0")
    kubeflow_status = Flag("report progress as the status of Kubeflow's TrainJob: 'auto' if the\n"
                           "program calls rallypoint.progress (default), 'on' or 'off'",
                           "WHEN", one_of("auto", "on", "off"), "auto", completes="auto on off")
    json_events = Flag("append events to FILE, one JSON object per line", "FILE", text, "")
    no_history = Flag.switch("keep nothing about the job after its end, for `rallypoint top`\n"
                             "(RALLYPOINT_HISTORY=off)")
    event_log_handler = Flag("'console' prints events as JSON on stderr; 'null' does not\n"
                             "(default null)", "NAME", _read_handler, False,
                             completes="null console")


class HostOptions(Options, title="Several machines, started from this one"):
    """For a launcher that starts launchers on other hosts; see cli/remote/."""

    hosts = Flag("start a launcher on each of these hosts by ssh; use names that all\n"
                 "hosts can resolve, optionally with --nproc-per-node, as in a,user@b:4",
                 "A,B:N,...", text, "",
                 elsewhere=("-H", "--host", "-hosts", "-w", "--nodelist"))
    hostfile = Flag("read the hosts from a file of lines HOST, HOST:N or HOST slots=N", "FILE",
                    text, "", elsewhere=("-f", "-hostfile", "--machinefile", "-machinefile"))
    rsh = Flag("command that runs a program on a host; the host's name replaces\n"
               "{host} or is appended (default: ssh)", "COMMAND", read_command, None)
    env = Flag("also pass this environment variable to the workers on all hosts; may\n"
               "be repeated (always passed: RALLYPOINT_*, OMP_*, NCCL_* and others;\n"
               "see docs/reference/environment.md)", "NAME", text, "", repeats=True)


class RayOptions(Options, title="Nodes of a Ray cluster, with --on ray"):
    """Resources that agents reserve on Ray; see cli/ray/."""

    cpus_per_node = Flag("CPUs to reserve on each node (default: one for each worker)", "N",
                         whole, None)
    gpus_per_node = Flag("GPUs to reserve on each node (default: one for each worker, if the\n"
                         "cluster has GPUs)", "N", whole, None)


class _MeetingOptions(Options, title="Several machines, each with its own launcher"):
    standalone = Flag.switch("run on one machine, without a rendezvous")
    on = Flag("read missing values from this environment only: slurm, flux,\n"
              "open-mpi, ...; 'here' for none (default: the detected one, which\n"
              "`rallypoint where` shows); 'ray': start a launcher on --nnodes nodes\n"
              "of a Ray cluster", "PLACE", text, "", completes=" ".join((*KINDS, "here", "ray")))
    node_rank = Flag("number of this machine, from 0 (default 0)", "N", whole, None,
                     elsewhere=("--machine-rank", "--rank"))
    master_addr = Flag("address of machine 0 (default 127.0.0.1)", "ADDRESS", text, "127.0.0.1",
                       elsewhere=("--main-process-ip", "--master", "--master-address"))
    master_port = Flag("port of the workers' store on machine 0 (default 29500; any free\n"
                       "port on one machine)", "PORT", whole, None,
                       elsewhere=("--main-process-port",))
    local_addr = Flag("name or address at which other machines reach this one", "ADDRESS",
                      text, None)
    rdzv_backend = Flag("rendezvous backend: static (default), c10d or etcd", "NAME",
                        text, STATIC, completes="static c10d etcd")
    rdzv_endpoint = Flag("rendezvous endpoint; static: machine 0's address and port; others:\n"
                         "one or more endpoints, tried in order; c10d also takes a directory\n"
                         "that all machines share: file:///PATH", "HOST:PORT,...", text, "")
    rdzv_id = Flag("the job's name, equal on all machines", "ID", text, None)
    rdzv_conf = Flag("options of the rendezvous, as in timeout=60", "KEY=VALUE,...",
                     read_configuration, dict[str, str]())
    token_file = TOKEN_FILE
    require_token = Flag.switch("refuse jobs of several machines that have no token")
    port_range = Flag("listen only on ports from A to B, also in the workers", "A-B",
                      text, "")


class JobOptions(
    _WorkerOptions, _ProgramOptions, _FailureOptions, _LogOptions, HostOptions, RayOptions,
    _MeetingOptions,
):
    """What a job is: for all commands that take the flags of `rallypoint run`."""


class RunOptions(JobOptions):
    """The flags of `rallypoint run`."""

    dry_run = Flag.switch("print the nodes, and the ranks, variables and command of each worker;\n"
                          "start nothing")
    help_all = Flag.switch("all flags, with more examples, variables and exit statuses")
    print_completion = Flag("print a script that completes these flags in a shell:\n"
                            "bash, zsh or tcsh", "SHELL", one_of("bash", "zsh", "tcsh"), "",
                            completes="bash zsh tcsh")
    help = HELP

    @property
    def launcher(self) -> Sequence[str]:
        """The arguments with which Python starts another such launcher."""
        return ("-m", "rallypoint", "run")


class LegacyOptions(RunOptions, title="Of torch.distributed.launch"):
    """The flags of `python -m rallypoint.launch`."""

    use_env = Flag.switch("do not give SCRIPT --local-rank=N; it reads LOCAL_RANK itself")

    @property
    def launcher(self) -> Sequence[str]:
        return ("-m", "rallypoint.launch")
# fmt: on
