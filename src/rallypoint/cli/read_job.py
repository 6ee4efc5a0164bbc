"""From the flags of `rallypoint run` to a `Job`: its nodes and their rendezvous, its workers, and
where their output goes.

As in torchrun, --standalone overrides all --rdzv flags, and a static job of one machine needs none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import read_port_range
from rallypoint.base.record import Record
from rallypoint.base.worker_env import AS_GLOO, SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S
from rallypoint.cli.flags import PROGRAM, STATIC, JobOptions, LegacyOptions, read_token
from rallypoint.cli.options import UsageError, is_whole, seconds
from rallypoint.cli.surroundings import fill_in
from rallypoint.launch.job import (
    HISTORY,
    LOCAL_RANK_MACRO,
    TOKEN,
    Job,
    Nodes,
    Rendezvous,
    Verbosity,
)
from rallypoint.launch.log_spec import STDERR, STDOUT, LogSpec, translate_template
from rallypoint.rendezvous.job.round import Endpoint

BACKENDS = (STATIC, "c10d", "etcd", "etcd-v2")
DEFAULT_PORTS = {STATIC: 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}
# Flags that no script has for itself.
_ONLY_OURS = ("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--standalone",
              "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf")  # fmt: skip
# Those that --standalone overrides.
_OTHERS = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--node-rank", "--master-addr",
           "--master-port")  # fmt: skip
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # PyTorch's variable
# The variable that torchrun reads if --log-line-prefix-template is not given.
_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NOUNS = {"--module": "module", "--no-python": "program"}
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def read_job(
    options: JobOptions, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[Job, list[str]]:
    """The job, and a sentence for each flag that has no effect on it."""
    if isinstance(options, LegacyOptions) and not options.use_env:
        if options.no_python:
            raise UsageError(
                "--no-python needs --use-env here, because a program that is not a Python script"
                " may not accept --local-rank."
            )
        if command:
            command = [command[0], f"--local-rank={LOCAL_RANK_MACRO}", *command[1:]]
    for name in ("--rsh", "--env"):
        if name in options:
            raise UsageError(f"{name} needs --hosts or --hostfile.")
    for name in ("--cpus-per-node", "--gpus-per-node"):
        if name in options:
            raise UsageError(f"{name} is only for nodes of a Ray cluster; add --on ray.")
    token = read_token(options.token_file, environ)
    if options.require_token and token is None:
        _refuse_without_token(options)
    if "--port-range" in options:
        read_port_range(options.port_range)
        environ = {**environ, PORT_RANGE: options.port_range}
    if options.as_gloo:
        environ = _as_gloo(environ)
    options, surroundings = fill_in(options, environ)
    place = read_place(options, token)
    workers = count_workers(options.nproc_per_node, environ)
    restarts, spares = options.max_restarts, options.spares
    if spares and options.virtual_local_rank:
        raise UsageError(
            "--spares cannot be used with --virtual-local-rank: a spare does not know its device"
            " before it has a rank."
        )
    cpus, binding_note = _bind_workers(options.numa_binding, workers, environ)
    logs = read_logs(options, environ)
    is_run_once = workers == 1 and not restarts and not spares
    program = worker_program(options, command, environ, is_run_once=is_run_once)
    preload, preload_note = _preload(options.preload, program, environ)
    job = Job(
        command=program,
        local_world_size=workers,
        role=options.role,
        max_restarts=restarts,
        spares=spares,
        preload=preload,
        nodes=place.nodes,
        rendezvous=place.rendezvous,
        run_id=place.run_id,
        host=options.local_addr or os.uname().nodename,
        environ=environ,
        logs=logs,
        shutdown_timeout_s=_shutdown_timeout_s(options, environ),
        stop_signals=options.signals_to_handle,
        has_virtual_local_rank=options.virtual_local_rank,
        cpus=cpus,
        verbosity=_talk(options),
        events_file=options.json_events,
        keeps_history=not options.no_history and _read_history(environ),
        prints_events=options.event_log_handler,
        on_hang=options.on_hang,
        hang_after_s=options.hang_after,
    )
    notes = [*_behind(command), *surroundings, *place.notes]
    if logs.filters and not logs.tee:
        notes += ["--duplicate-*-filters apply only to teed lines, and --tee names none"]
    notes += [note for note in (binding_note, preload_note) if note]
    meaningless = _meaningless(options, job)
    return job, [*notes, *meaningless] if job.verbosity is Verbosity.VERBOSE else notes


def _read_history(environ: Mapping[str, str]) -> bool:
    value = environ.get(HISTORY, "on")
    if value not in ("on", "off"):
        raise UsageError(f"{HISTORY} is {value!r}; it must be on or off.")
    return value == "on"


def _behind(command: Sequence[str]) -> list[str]:
    """A note on launcher flags among the script's arguments, where they have no effect."""
    script, *arguments = command
    names = [word.partition("=")[0] for word in arguments]
    found = [name for name in names if name.replace("_", "-") in _ONLY_OURS]
    launcher = script.rpartition("/")[2].startswith(("rallypoint", "torchrun", "torch.distributed"))
    if not found or launcher:
        return []
    listed = ", ".join(dict.fromkeys(found))
    return [
        f"{listed} {'is' if len(set(found)) == 1 else 'are'} after {script} and passed to it;"
        f" write launcher flags before it, as in: {PROGRAM} {found[0]} ... {script}"
    ]


def _as_gloo(environ: Mapping[str, str]) -> Mapping[str, str]:
    if environ.get(_AUTOLOAD, "1") != "1":
        raise UsageError(
            f"--as-gloo needs PyTorch to load its installed backends, which"
            f" {_AUTOLOAD}={environ[_AUTOLOAD]} turns off; unset that variable."
        )
    return {**environ, AS_GLOO: "1"}


def _shutdown_timeout_s(options: JobOptions, environ: Mapping[str, str]) -> float:
    default = SHUTDOWN_TIMEOUT_S
    if SHUTDOWN_TIMEOUT in environ:
        default = seconds(environ[SHUTDOWN_TIMEOUT], SHUTDOWN_TIMEOUT)
    given = options.shutdown_timeout
    return default if given is None else given


def _refuse_without_token(options: JobOptions) -> None:
    if options.nnodes[1] != 1 and not options.standalone:
        raise UsageError(
            "--require-token: this job of several machines has no token; set the same"
            f" {TOKEN}, or --token-file, on all of them."
        )


def _talk(options: JobOptions) -> Verbosity:
    if options.quiet and options.verbose:
        raise UsageError("--quiet and --verbose cannot be combined; choose one.")
    if options.quiet:
        return Verbosity.QUIET
    return Verbosity.VERBOSE if options.verbose else Verbosity.NORMAL


def _meaningless(options: JobOptions, job: Job) -> list[str]:
    """Notes on flags, mostly those that torchrun's users often give, that have no effect here."""
    notes, method = [], options.start_method
    if job.preload and not job.has_template:
        notes.append("--preload has no effect on one worker without restarts")
    if method != "spawn":
        notes.append(f"--start-method {method} has no effect: workers are always new interpreters")
    if options.monitor_interval != 0.1:
        notes.append("--monitor-interval has no effect: workers are watched, not polled")
    return notes


def read_logs(options: JobOptions, environ: Mapping[str, str]) -> LogSpec:
    """Where the workers' output goes."""
    if options.logs_specs != "default":
        raise UsageError(
            f"--logs-specs {options.logs_specs}: only 'default' is accepted; leave it out, and"
            " configure the logs with --log-dir, --redirects, --tee and --log-prefix."
        )
    texts = {STDOUT: options.duplicate_stdout_filters, STDERR: options.duplicate_stderr_filters}
    template = options.log_line_prefix_template or environ.get(_TEMPLATE)
    return LogSpec(
        directory=options.log_dir,
        redirects=options.redirects,
        tee=options.tee,
        shown=options.local_ranks_filter,
        filters=MappingProxyType({stream: each for stream, each in texts.items() if each}),
        prefix=options.log_prefix,
        **({"tee_prefix": translate_template(template)} if template else {}),
    )


def _preload(
    text: str, program: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], str]:
    if not text:
        return (), ""
    from rallypoint.cli.preload import read_preload

    return read_preload(text, program, environ)


def count_workers(text: str, environ: Mapping[str, str]) -> int:
    """The number of workers that --nproc-per-node asks for."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "xpu", "auto"):
        return _count_devices(text, environ)
    if not is_whole(text) or not int(text):
        raise UsageError(
            f"--nproc-per-node is {text!r}; it must be 1 or more, 'auto', 'cpu', 'gpu' or 'xpu'."
        )
    return int(text)


def _count_devices(kind: str, environ: Mapping[str, str]) -> int:
    from rallypoint.cluster.devices import count_gpus, count_xpus

    if kind == "auto":
        devices = count_gpus(environ) or count_xpus(environ)
        return devices or len(os.sched_getaffinity(0))
    count = count_gpus(environ) if kind == "gpu" else count_xpus(environ)
    if not count:
        variable = "CUDA_VISIBLE_DEVICES" if kind == "gpu" else "ZE_AFFINITY_MASK"
        hides = f", or {variable} hides them" if environ.get(variable) is not None else ""
        raise UsageError(
            f"--nproc-per-node {kind}: this machine has no such devices{hides}; give "
            "the number of workers, or 'cpu' for one per CPU."
        )
    return count


def _bind_workers(
    mode: str | None, workers: int, environ: Mapping[str, str]
) -> tuple[tuple[frozenset[int], ...], str]:
    """By local rank, the CPUs that --numa-binding assigns to a worker, and a note on them."""
    if mode is None:
        return (), ""
    from rallypoint.cluster.affinity import bind, read_topology

    binding = bind(mode, read_topology(environ), workers)
    return binding.cpus, binding.note


def worker_program(
    options: JobOptions, command: Sequence[str], environ: Mapping[str, str], *, is_run_once: bool
) -> tuple[str, ...]:
    """The complete command of a worker. `is_run_once`: one worker runs it, and never restarts."""
    flags = [name for name in ("--run-path", "--module", "--no-python") if name in options]
    if flags == ["--run-path", "--no-python"]:
        flags = ["--run-path"]  # as torchrun documents it
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} cannot be combined; choose one.")
    flag = flags[0] if flags else ""
    if not command:
        example = {"--module": "-m my_package.train", "--no-python": "--no-python ./train"}
        raise UsageError(
            f"no {_NOUNS.get(flag, 'script')} given; name one, as in:"
            f" {PROGRAM} {example.get(flag, 'train.py')}"
        )
    _check_script(command, flag, is_run_once=is_run_once)
    if command[0].startswith("-") and command[0] != "-" and flag in ("", "--run-path"):
        command = [f"./{command[0]}", *command[1:]]  # Python would take it as an option
    if flag == "--no-python":
        return tuple(command)
    # -u as in torchrun, so that what a worker printed before it died is not lost.
    python = (environ.get("PYTHON_EXEC") or sys.executable, "-u")
    if flag == "--module":
        return (*python, "-m", *command)
    if flag == "--run-path":
        return (*python, "-c", _RUN_PATH, *command)
    return (*python, *command)


def _cure(command: Sequence[str], flag: str) -> str:
    """What to do about a script that does not exist."""
    script = command[0]
    program, *words = script.split(" ")
    if flag == "" and program.rpartition("/")[2].startswith("python"):
        rest = " ".join([*words, *command[1:]]) or "train.py"
        return f"; the launcher starts Python itself: leave that word out, as in: {PROGRAM} {rest}"
    if words and os.path.exists(program):
        return f"; leave out the quotation marks, as in: {PROGRAM} {script}"
    import difflib

    directory = os.path.dirname(script)
    try:
        others = os.listdir(directory or ".")
    except OSError:
        return "; check its path."
    near = difflib.get_close_matches(os.path.basename(script), others, n=1, cutoff=0.8)
    return f"; did you mean {os.path.join(directory, near[0])}?" if near else "; check its path."


def _check_script(command: Sequence[str], flag: str, *, is_run_once: bool) -> None:
    script = command[0]
    if flag == "--module" or LOCAL_RANK_MACRO in script:
        return
    if flag == "--no-python" and "/" not in script:  # looked up in PATH
        return
    if flag == "" and script == "-":
        if not is_run_once:
            raise UsageError(
                "'-' is standard input, which only one worker can read, and only once;"
                " save the script in a file."
            )
        return
    if not os.path.exists(script):
        raise UsageError(
            f"{_NOUNS.get(flag, 'script')} {script!r} does not exist{_cure(command, flag)}"
        )
    if flag != "--no-python" and os.path.isdir(script):
        main = os.path.join(script, "__main__.py")
        if not os.path.exists(main):
            raise UsageError(f"{script!r} is a directory without a __main__.py; name a script.")


class LaunchPlace(Record):
    """Where a job runs; `notes` names the flags that have no effect there."""

    nodes: Nodes
    rendezvous: Rendezvous | None
    run_id: str
    notes: tuple[str, ...] = ()


def read_place(options: JobOptions, token: bytes | None = None) -> LaunchPlace:
    """Read the flags. `token` is the secret that all machines must know."""
    fewest, most = options.nnodes
    backend = options.rdzv_backend
    if backend not in BACKENDS:
        _check_plug_in(backend)
    configuration = options.rdzv_conf
    endpoints = read_endpoints(options.rdzv_endpoint, backend)
    if options.standalone:
        if most != 1:
            raise UsageError(f"--standalone means one machine; leave out --nnodes {most}.")
        # No other node has to know the name, and torchrun generates a new one here too.
        return LaunchPlace(Nodes(token=token), None, new_run_id(), _standalone_notes(options))
    if backend == STATIC:
        if len(endpoints) > 1:
            raise UsageError(
                f"--rdzv-endpoint names {len(endpoints)} endpoints; the static rendezvous takes"
                " one."
            )
        return _static(options, endpoints, token)
    run_id = options.rdzv_id or "none"
    if most == 1 and backend == "c10d":
        # A single machine has no others to find: only the endpoint's port matters.
        port = next((each.port for each in endpoints if _is_here(each.host)), 0)
        return LaunchPlace(Nodes(master_port=port, token=token), None, run_id, _unused(options))
    rendezvous = Rendezvous(
        backend=backend,
        endpoints=endpoints,
        run_id=run_id,
        min_nodes=fewest,
        max_nodes=most,
        configuration=MappingProxyType(configuration),
        node_rank=options.node_rank,
        local_addr=options.local_addr,
        token=token,
    )
    return LaunchPlace(Nodes(token=token), rendezvous, run_id, _unused(options))


def _check_plug_in(backend: str) -> None:
    """Refuse a backend that neither this package nor another one provides."""
    # Slow, and only for others' names.
    from rallypoint.rendezvous.api.rendezvous_handler import plug_ins

    names = dict.fromkeys([*BACKENDS, *sorted(plug_ins())])
    if backend not in names:
        raise UsageError(f"--rdzv-backend is {backend!r}; it must be one of {', '.join(names)}.")


def _static(options: JobOptions, endpoints: Sequence[Endpoint], token: bytes | None) -> LaunchPlace:
    fewest, most = options.nnodes
    if fewest != most:
        raise UsageError(
            f"--nnodes {fewest}:{most}: the number of static machines cannot change; give one"
            " number, or another --rdzv-backend."
        )
    if endpoints:
        host, port = endpoints[0].host, endpoints[0].port
    else:
        host, given = options.master_addr.strip("[]"), options.master_port
        port = (0 if most == 1 else DEFAULT_PORTS[STATIC]) if given is None else given
    nodes = Nodes(
        count=most,
        node_rank=options.node_rank or 0,
        master_addr=host,
        master_port=port,
        join_timeout_s=_timeout_s(options.rdzv_conf),
        local_addr=options.local_addr if most > 1 else None,
        token=token,
    )
    # As in torchrun: machines that are started one by one cannot agree on a random name.
    default = new_run_id() if most == 1 and not port else "none"
    run_id = options.rdzv_id
    return LaunchPlace(nodes, None, default if run_id is None else run_id)


def read_endpoints(text: str, backend: str) -> tuple[Endpoint, ...]:
    """Parse ``"HOST:PORT"``, or several with commas between them; a port may be left out.

    ``"file:///PATH"`` is a directory that all machines share.
    """
    if text.startswith("file:"):
        return (_read_directory(text, backend),)
    try:
        return Endpoint.parse_all(text, DEFAULT_PORTS.get(backend, 29400), name="--rdzv-endpoint")
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from None


def _read_directory(text: str, backend: str) -> Endpoint:
    path = os.path.normpath(text.removeprefix("file://"))
    if not text.startswith("file:///") or "," in text:
        raise UsageError(
            f"--rdzv-endpoint is {text!r}; a directory that all machines share is one "
            "absolute path, as in file:///shared/run."
        )
    if backend != "c10d":
        raise UsageError(
            f"--rdzv-endpoint {text}: a directory as endpoint needs --rdzv-backend c10d; add that."
        )
    return Endpoint(host=path, port=0)


def _timeout_s(configuration: Mapping[str, str]) -> float:
    text = configuration.get("timeout", "600")
    if not is_whole(text):
        raise UsageError(f"--rdzv-conf: timeout is {text!r}; it must be a number of seconds.")
    return float(text)


def _is_here(host: str) -> bool:
    return host in ("", "localhost", "127.0.0.1", "::1", os.uname().nodename)


def _standalone_notes(options: JobOptions) -> tuple[str, ...]:
    given = [name for name in _OTHERS if name in options]
    return (f"--standalone overrides {', '.join(given)}",) if given else ()


def _unused(options: JobOptions) -> tuple[str, ...]:
    given = [name for name in ("--master-addr", "--master-port") if name in options]
    note = f"--rdzv-backend {options.rdzv_backend} does not use {', '.join(given)}"
    return (note,) if given else ()


def new_run_id() -> str:
    """A random UUID, generated by hand because importing the uuid module costs 8 ms."""
    digits = bytearray(os.urandom(16))
    digits[6] = digits[6] & 0x0F | 0x40
    digits[8] = digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
