"""`LaunchConfig` has torch's fields, and each means something to the job."""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, WorkersFailedError
from rallypoint.launch import DefaultLogsSpecs, LaunchConfig, Std
from rallypoint.launch.agent.final_reports import JobResult
from rallypoint.launch.api.elastic_agent import WorkerSpec
from rallypoint.launch.api.elastic_launch import elastic_launch, job_of, name_of, raise_if_failed
from rallypoint.launch.api.handler import create_handler
from rallypoint.launch.api.launch_config import cpus_of
from rallypoint.launch.api.spawn import spawn
from rallypoint.launch.api.store_handler import DynamicRendezvousHandler
from rallypoint.launch.log_spec import Destination, translate_template
from rallypoint.rendezvous import RendezvousParameters
from rallypoint.store.local_store import HashStore

# torch 2.15's, in its order: what positional arguments mean.
TORCHS = [
    *("min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint"),
    *("rdzv_backend", "rdzv_configs", "rdzv_timeout", "max_restarts", "monitor_interval"),
    *("start_method", "log_line_prefix_template", "metrics_cfg", "local_addr"),
    *("event_log_handler", "numa_options", "signals_to_handle", "duplicate_stdout_filters"),
    *("duplicate_stderr_filters", "virtual_local_rank", "shutdown_timeout"),
]


def test_the_fields_are_torchs() -> None:
    ours = [each.name for each in dataclasses.fields(LaunchConfig) if not each.kw_only]
    assert ours == TORCHS
    launcher = pytest.importorskip("torch.distributed.launcher.api")
    theirs = {each.name: each for each in dataclasses.fields(launcher.LaunchConfig)}
    assert list(theirs) == TORCHS
    for each in dataclasses.fields(LaunchConfig):
        if each.name in list(theirs)[3:]:
            assert each.default == theirs[each.name].default, each.name


def test_torchs_arguments_make_a_job(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), {0: Std.ALL}, Std.OUT, {1})
    config = LaunchConfig(
        2, 2, 4, logs, "job7", "trainer", "host:1234", "static", {"rank": 1}, 60, max_restarts=2
    )
    config.signals_to_handle = "SIGTERM,SIGUSR1"
    config.log_line_prefix_template = "${hostname}:${rank} "
    config.duplicate_stdout_filters = ["loss"]
    job = job_of(config, ("x",))
    assert (job.local_world_size, job.role, job.max_restarts) == (4, "trainer", 2)
    assert (job.nodes.count, job.nodes.node_rank, job.nodes.join_timeout_s) == (2, 1, 60.0)
    assert (job.nodes.master_addr, job.nodes.master_port) == ("host", 1234)
    assert job.stop_signals == ("SIGTERM", "SIGUSR1")
    assert [job.logs.destination_of(0, stream) for stream in (1, 2)] == [
        Destination.FILE,
        Destination.FILE,
    ]
    assert [job.logs.destination_of(1, stream) for stream in (1, 2)] == [
        Destination.TEE,
        Destination.INHERITED,
    ]
    assert job.logs.prefix_of(rank=3, local_rank=1, role="r", host="h") == "h:3 "
    assert dict(job.logs.filters) == {1: ("loss",)}
    assert job.logs.directory == str(tmp_path)


def test_one_node_needs_no_rendezvous() -> None:
    assert job_of(LaunchConfig(1, 1, 2), ("x",)).rendezvous is None
    job = job_of(LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0"), ("x",))
    assert (job.rendezvous, job.nodes.master_port) == (None, 0)


def test_static_nodes_meet_at_the_endpoint() -> None:
    def where(nodes: int, endpoint: str) -> tuple[str, int]:
        config = LaunchConfig(nodes, nodes, 1, rdzv_backend="static", rdzv_endpoint=endpoint)
        place = job_of(config, ("x",)).nodes
        return place.master_addr, place.master_port

    assert [where(nodes, "") for nodes in (1, 2)] == [("127.0.0.1", 0), ("127.0.0.1", 29500)]
    assert [where(nodes, "[::2]") for nodes in (1, 2)] == [("::2", 0), ("::2", 29500)]
    assert [where(nodes, "h:5") for nodes in (1, 2)] == [("h", 5), ("h", 5)]


def test_several_nodes_that_come_and_go() -> None:
    config = LaunchConfig(1, 3, 2, rdzv_backend="c10d", rdzv_endpoint="host,b:1", rdzv_timeout=9)
    rendezvous = job_of(config, ("x",)).rendezvous
    assert rendezvous is not None
    assert (rendezvous.min_nodes, rendezvous.max_nodes) == (1, 3)
    assert [str(each) for each in rendezvous.endpoints] == ["host:29400", "b:1"]
    assert rendezvous.configuration["timeout"] == "9"


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_endpoint_that_is_none_is_refused(backend: str, nodes: int) -> None:
    config = LaunchConfig(nodes, nodes, 1, rdzv_backend=backend, rdzv_endpoint="::1:5")
    with pytest.raises(InvalidArgumentError, match="rdzv_endpoint is '::1:5'; it must be HOST:"):
        job_of(config, ("x",))


def test_torchs_log_directory_of_its_own_making_is_none() -> None:
    made_up = SimpleNamespace(root_log_dir="/tmp/torchelastic_x1", _redirects=0, _tee=0)
    assert not job_of(LaunchConfig(1, 1, 1, made_up), ("x",)).logs.are_kept


def test_numa_options_are_taken_by_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mode(Enum):
        NODE = "node"

    config = LaunchConfig(1, 1, 2, numa_options=SimpleNamespace(affinity_mode=Mode.NODE))
    assert len(cpus_of(config)) == 2
    config.numa_options = None
    assert cpus_of(config) == ()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="shutdown_timeout=-1; it must be 0 or more"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)
    with pytest.raises(InvalidArgumentError, match="'SIGNONE' is not a signal"):
        job_of(LaunchConfig(1, 1, 1, signals_to_handle="SIGNONE"), ("x",))
    with pytest.raises(InvalidArgumentError, match="event_log_handler='mine'"):
        job_of(LaunchConfig(1, 1, 1, event_log_handler="mine"), ("x",))


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("[${role_name}${local_rank}]:", "[r1]:"),
        ("${hostname}:$rank: ", "h:3: "),
        ("{x} $$ ${other}", "{x} $ ${other}"),
    ],
)
def test_torchs_templates(template: str, prefix: str) -> None:
    ours = translate_template(template)
    assert ours.format(rank=3, local_rank=1, role="r", host="h") == prefix


def test_streams_are_read_as_torch_reads_them() -> None:
    for text in ("0", "3", "0:1,1:3"):
        ours = Std.from_str(text)
        torchs = pytest.importorskip("torch.distributed.elastic.multiprocessing").Std.from_str(text)
        assert ours == torchs


def succeed() -> int:
    return 1


def test_calls_that_cannot_be_made_are_refused() -> None:
    config = LaunchConfig(1, 1, 1)
    with pytest.raises(InvalidArgumentError, match="health_check_server works only with torch's"):
        elastic_launch(config, succeed, health_check_server=object())
    with pytest.raises(InvalidArgumentError, match="min_nodes=1 and max_nodes=2 differ"):
        job_of(LaunchConfig(1, 2, 1, rdzv_backend="static"), ("x",))
    with pytest.raises(InvalidArgumentError, match="nprocs=0; it must be 1 or more"):
        spawn(succeed, nprocs=0)


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (succeed, (), "succeed"),
        (SimpleNamespace(), (), "SimpleNamespace"),
        ("prog", ("a.py",), "prog"),
        (sys.executable, ("-u", "a.py", "b"), "a.py"),
        (sys.executable, ("-V",), sys.executable),
    ],
)
def test_what_errors_call_it(entrypoint: Any, args: tuple[str, ...], name: str) -> None:
    assert name_of(entrypoint, args) == name


def test_a_job_that_was_stopped_did_not_fail_by_its_workers() -> None:
    raise_if_failed(JobResult(status=0), "x")
    with pytest.raises(WorkersFailedError, match="the job ended with status 143; the") as raised:
        raise_if_failed(JobResult(status=143), "x")
    assert raised.value.status == 143


def test_an_agent_needs_something_to_run(tmp_path: Path) -> None:
    parameters = RendezvousParameters("c10d", str(tmp_path / "s"), "r", 1, 1, store_type="file")
    handler = create_handler(parameters)
    with pytest.raises(InvalidArgumentError, match="a WorkerSpec needs an entrypoint"):
        WorkerSpec("role", 1, handler)
    assert WorkerSpec("role", 1, handler, fn=succeed).entrypoint is succeed
    handler.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store_type": "tape"}, "store_type is 'tape'; it must be tcp or file"),
        ({"store_type": " FILE "}, "store_type=file needs an endpoint: the path of a file"),
    ],
)
def test_stores_that_are_none(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        create_handler(RendezvousParameters("c10d", "", "r", 1, 1, **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": ""}, "a rendezvous needs a run id"),
        ({"keep_alive_interval": 0}, "keep_alive_interval is 0 and keep_alive_max_attempt 5; both"),
        ({"keep_alive_max_attempt": -1}, "and keep_alive_max_attempt -1; both must be positive"),
        ({"store": {}}, "a rendezvous needs a store of rallypoint, not a dict"),
        ({"min_nodes": 3}, "max"),
    ],
)
def test_handlers_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    named = {"run_id": "r", "store": HashStore(), "backend": "b", "min_nodes": 1, "max_nodes": 2}
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=message):
        DynamicRendezvousHandler.from_backend(**{**named, **changes})
