"""The command line for Python programs: the names of torch.distributed.run that accelerate, Fabric
and others call. Exported by `rallypoint.launch`.

The parser is argparse's, because its callers inspect it; its flags come from the table in flags.py.
"""

from __future__ import annotations

import os
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint.cli.flags import PROGRAM, HostOptions, JobOptions, read_texts
from rallypoint.cli.options import Flag, UsageError
from rallypoint.cli.read_job import read_job
from rallypoint.cli.run import note_on_threads
from rallypoint.launch.agent.loop import perform
from rallypoint.launch.api.elastic_launch import raise_if_failed
from rallypoint.launch.api.launch_config import DefaultLogsSpecs, LaunchConfig, Std
from rallypoint.launch.job import Job, Verbosity
from rallypoint.launch.output.terminal import say

# The types of torchrun's parser; all other values are text, and None if they are not given.
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "--duplicate-stderr-filters": lambda text: list(read_texts(text)),
    "--duplicate-stdout-filters": lambda text: list(read_texts(text)),
    "--master-port": int,
    "--max-restarts": int,
    "--monitor-interval": float,
    "--node-rank": int,
    "--shutdown-timeout": int,
}
_DEFAULTS: Mapping[str, Any] = {
    "--duplicate-stderr-filters": [],
    "--duplicate-stdout-filters": [],
    "--event-log-handler": "null",
    "--local-ranks-filter": "",
    "--log-line-prefix-template": "",
    "--master-addr": "127.0.0.1",
    "--max-restarts": 0,
    "--monitor-interval": 0.1,
    "--nnodes": "1:1",
    "--node-rank": 0,
    "--nproc-per-node": "1",
    "--rdzv-backend": "static",
    "--rdzv-conf": "",
    "--rdzv-endpoint": "",
    "--rdzv-id": "none",
    "--redirects": "0",
    "--role": "default",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "--start-method": "spawn",
    "--tee": "0",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run `rallypoint run ARGS` in this process, with sys.argv's arguments if `args` is None.

    Raises:
        ChildFailedError, WorkersFailedError: a worker failed, as for `elastic_launch`.
        RallypointError: the job cannot be launched in this way.
        SystemExit: the command line is invalid.
    """
    run(parse_args(args))


def get_args_parser() -> ArgumentParser:
    """A parser of torchrun's flags and ours; the PET_ variables set the defaults."""
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Launch a distributed job.",
        allow_abbrev=False,
    )
    for flag in JobOptions.flags.values():
        if flag.name not in HostOptions.flags:
            _add(parser, flag)
    parser.add_argument("training_script", help="the program to start, and its arguments")
    parser.add_argument("training_script_args", nargs=REMAINDER)
    return parser


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line, sys.argv's if `args` is None.

    Raises:
        SystemExit: the command line is invalid.
    """
    return get_args_parser().parse_args(args)


def run(args: Namespace) -> None:
    """Launch what `args` describes, which has the attributes of `get_args_parser`'s results, and
    wait for the end.

    Raises:
        ChildFailedError, WorkersFailedError: a worker failed, as for `elastic_launch`.
        RallypointError: the job cannot be launched in this way.
    """
    job, notes = _job_of(args)
    if job.verbosity is not Verbosity.QUIET:
        for note in notes:
            say(note)
    raise_if_failed(perform(job), args.training_script)


def config_from_args(args: Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """The arguments for `elastic_launch`: configuration, program, and the program's arguments.

    Raises:
        RallypointError: the job cannot be launched in this way.
    """
    job, _ = _job_of(args)
    nodes, rendezvous = job.nodes, job.rendezvous
    endpoint = f"{nodes.master_addr}:{nodes.master_port}"
    configs: dict[str, Any] = {"timeout": int(nodes.join_timeout_s), "rank": nodes.node_rank}
    if rendezvous is not None:
        endpoint, configs = args.rdzv_endpoint, dict(rendezvous.configuration)
        if rendezvous.node_rank is not None:
            configs["rank"] = rendezvous.node_rank
    logs = job.logs
    config = LaunchConfig(
        min_nodes=nodes.count if rendezvous is None else rendezvous.min_nodes,
        max_nodes=nodes.count if rendezvous is None else rendezvous.max_nodes,
        nproc_per_node=job.local_world_size,
        logs_specs=DefaultLogsSpecs(
            logs.directory,
            Std.from_str(args.redirects),
            Std.from_str(args.tee),
            None if logs.shown is None else set(logs.shown),
        ),
        run_id=job.run_id,
        role=job.role,
        rdzv_endpoint=endpoint if nodes.master_port or rendezvous is not None else "",
        rdzv_backend="static" if rendezvous is None else rendezvous.backend,
        rdzv_configs=configs,
        max_restarts=job.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=args.log_line_prefix_template or None,
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        numa_options=args.numa_binding,
        signals_to_handle=",".join(job.stop_signals),
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=job.has_virtual_local_rank,
        shutdown_timeout=job.shutdown_timeout_s,
        token=nodes.token,
    )
    return config, job.command[0], list(job.command[1:])


def _job_of(args: Namespace) -> tuple[Job, list[str]]:
    values = {}
    for flag in JobOptions.flags.values():
        given = getattr(args, _attribute(flag), None)
        if given is None or given is False or given == _DEFAULTS.get(flag.name):
            continue
        if isinstance(given, list):
            given = ",".join(text.replace(",", ",,") for text in given)
        values[flag.name] = "1" if given is True else str(given)
    command = [args.training_script, *args.training_script_args]
    try:
        job, notes = read_job(JobOptions(values), command, os.environ)
    except UsageError as error:
        raise UsageError(f"{PROGRAM}: {error}") from None
    return job, [*notes, *note_on_threads(job)]


def _add(parser: ArgumentParser, flag: Flag[object, object]) -> None:
    names = dict.fromkeys([flag.short, flag.name, "--" + _attribute(flag)])
    words = [name for name in names if name]
    inherited = os.environ.get(flag.variable, "")
    text = flag.help.replace("%", "%%")
    if not flag.takes_value:
        parser.add_argument(*words, action="store_true", default=inherited == "1", help=text)
        return
    read = _TYPES.get(flag.name, str)
    parser.add_argument(
        *words,
        type=read,
        default=inherited or _DEFAULTS.get(flag.name),  # argparse converts text
        metavar=flag.value,
        help=text,
    )


def _attribute(flag: Flag[object, object]) -> str:
    return flag.name.removeprefix("--").replace("-", "_")
