"""What each kind of place says of this node, by its variables alone; and the traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.environments import KINDS, HostFacts, Reading, recognize

HOST = HostFacts("box")
POD = HostFacts(
    "train-1",
    "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"
    "10.0.0.6\ttrain-1.peers.team.svc.cluster.local\ttrain-1\n",
)
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-04]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
# As sbatch gives them to a script on two nodes, without srun.
BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LWS = {
    "LWS_LEADER_ADDRESS": "lm-0.lm.team",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "3",
}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
DSTACK = {
    "DSTACK_NODES_IPS": "10.0.0.5\n10.0.0.6",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_RUN_ID": "r-1",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.5\nfd00::6\n",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_TASK_ID": "sky-1",
}

COMPLETE: dict[str, tuple[Mapping[str, str], HostFacts, dict[str, Any]]] = {
    "slurm": (
        STEP,
        HOST,
        {
            "place": "Slurm step 1234.0",
            "by": "SLURM_STEP_NODELIST",
            "node_rank": 2,
            "nodes": 4,
            "endpoints": ("n01:25539", "n02:25539", "n03:25539"),
            "run_id": "slurm-1234.0",
        },
    ),
    "leader-worker-set": (
        LWS,
        HOST,
        {
            "place": "LeaderWorkerSet",
            "by": "LWS_WORKER_INDEX",
            "node_rank": 3,
            "nodes": 4,
            "endpoints": ("lm-0.lm.team:29400",),
            "run_id": "lm-0",
        },
    ),
    "volcano": (
        {
            "VC_TASK_INDEX": "1",
            "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j",
            "VC_WORKER_NUM": "2",
        },
        HOST,
        {
            "place": "Volcano",
            "by": "VC_TASK_INDEX",
            "node_rank": 1,
            "nodes": 2,
            "endpoints": ("j-worker-0.j:29400", "j-worker-1.j:29400"),
        },
    ),
    "indexed-job": (
        INDEXED,
        POD,
        {
            "place": "Indexed Job",
            "by": "JOB_COMPLETION_INDEX",
            "node_rank": 1,
            "nodes": None,
            "endpoints": tuple(
                f"train-{number}.peers.team.svc.cluster.local:29400" for number in range(3)
            ),
            "run_id": "train",
        },
    ),
    "aws-batch": (
        {
            "AWS_BATCH_JOB_ID": "j",
            "AWS_BATCH_JOB_NODE_INDEX": "1",
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.5",
        },
        HOST,
        {
            "place": "AWS Batch job j",
            "by": "AWS_BATCH_JOB_NODE_INDEX",
            "node_rank": 1,
            "nodes": 2,
            "endpoints": ("10.0.0.5:29400",),
        },
    ),
    "sagemaker": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
        HOST,
        {
            "place": "SageMaker",
            "by": "SM_CURRENT_HOST",
            "node_rank": 1,
            "nodes": 2,
            "endpoints": ("algo-1:29400", "algo-2:29400"),
        },
    ),
    "skypilot": (
        SKYPILOT,
        HOST,
        {
            "place": "SkyPilot",
            "by": "SKYPILOT_NODE_RANK",
            "node_rank": 0,
            "nodes": 2,
            "endpoints": ("10.0.0.5:29400", "[fd00::6]:29400"),
            "run_id": "sky-1",
        },
    ),
    "dstack": (
        DSTACK,
        HOST,
        {
            "place": "dstack",
            "by": "DSTACK_NODE_RANK",
            "node_rank": 1,
            "nodes": 2,
            "endpoints": ("10.0.0.5:29400", "10.0.0.6:29400"),
            "run_id": "r-1",
        },
    ),
}
# Those say who this is, and not where the others are.
INCOMPLETE: dict[str, tuple[Mapping[str, str], int, int]] = {
    "open-mpi": (OPEN_MPI, 1, 2),
    "hydra": (HYDRA, 1, 4),
    "mvapich2": ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, 0, 2),
    "pals": ({"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "8"}, 3, 8),
    "jsrun": ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "6", "LSB_JOBID": "7"}, 1, 6),
    "flux": (
        {
            "FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2",
            "FLUX_JOB_NNODES": "2", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9",
        },
        1,
        2,
    ),
}  # fmt: skip


def test_every_kind_is_here() -> None:
    assert sorted([*COMPLETE, *INCOMPLETE]) == sorted(KINDS)


@pytest.mark.parametrize("kind", COMPLETE)
def test_all_that_a_job_needs(kind: str) -> None:
    environ, host, expected = COMPLETE[kind]
    found = recognize(environ, host)
    assert found is not None
    assert {name: getattr(found, name) for name in Reading._fields if name != "sources"} == {
        "run_id": "", "wrong": "", "note": "", **expected,
    }  # fmt: skip
    assert found == recognize(environ, host, kind)
    named = {each for source in found.sources.values() for each in source.split(", ")}
    assert named - {"/etc/hosts", "host name"} <= set(environ)


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_who_this_is_but_not_where_the_others_are(kind: str) -> None:
    environ, rank, size = INCOMPLETE[kind]
    found = recognize(environ, HOST)
    assert found is not None
    assert (found.node_rank, found.nodes, found.endpoints) == (rank, size, ())
    assert "--rdzv-endpoint" in found.wrong or "--nproc-per-node" in found.wrong
    assert found == recognize(environ, HOST, kind)


def test_nothing_to_recognise() -> None:
    assert recognize({"RANK": "0", "WORLD_SIZE": "2", "PMI_FD": "7"}, HOST) is None


@pytest.mark.parametrize("on", ["here", "none"])
def test_it_can_be_switched_off(on: str) -> None:
    assert recognize(STEP, HOST, on) is None


def test_only_what_was_asked_for() -> None:
    both = {**STEP, **LWS}
    found = recognize(both, HOST, "leader-worker-set")
    assert found is not None
    assert found.place == "LeaderWorkerSet"
    found = recognize({**SKYPILOT, **DSTACK}, HOST, "dstack")
    assert found is not None
    assert found.place == "dstack"
    with pytest.raises(InvalidArgumentError, match="not dstack: DSTACK_NODE_RANK and DSTACK_NODES"):
        recognize(both, HOST, "dstack")
    with pytest.raises(
        InvalidArgumentError, match="'slrum' is not a known environment; choose one of here"
    ):
        recognize(both, HOST, "slrum")


# Traps.


def test_a_requeued_step_meets_elsewhere() -> None:
    ports = set()
    for attempt in ("", "0", "1", "2"):
        found = recognize({**STEP, "SLURM_RESTART_COUNT": attempt}, HOST)
        assert found is not None
        ports.add(found.endpoints[0])
    assert len(ports) == 3


def test_a_batch_script_without_srun_is_one_machine() -> None:
    found = recognize(BATCH, HOST)
    assert found is not None
    assert (found.nodes, found.endpoints, found.wrong) == (1, (), "")
    assert "this uses one of the 2 nodes of Slurm job 1234" in found.note
    assert "srun --ntasks-per-node=1 rallypoint run" in found.note


def test_a_batch_script_on_one_node_says_nothing() -> None:
    found = recognize({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, HOST)
    assert found is not None
    assert found.note == ""


def test_mpirun_inside_an_allocation_is_nearer() -> None:
    for near, name in ((OPEN_MPI, "Open MPI"), (HYDRA, "Hydra's mpiexec")):
        found = recognize({**BATCH, **near}, HOST)
        assert found is not None
        assert found.place == name


def test_mvapich2_is_started_by_a_hydra() -> None:
    found = recognize({**INCOMPLETE["mvapich2"][0], **HYDRA}, HOST)
    assert found is not None
    assert found.place == "MVAPICH2"


def test_sruns_own_pmi_is_no_mpirun() -> None:
    found = recognize({**STEP, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9"}, HOST)
    assert found is not None
    assert found.place == "Slurm step 1234.0"


def test_a_containers_rank_means_nothing() -> None:
    pyxis = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}
    assert recognize({**STEP, **pyxis}, HOST) == recognize(STEP, HOST)


def test_a_worker_has_inherited_its_launchers() -> None:
    worker = {**STEP, "TORCHELASTIC_RUN_ID": "slurm-1234.0", "RANK": "0"}
    assert recognize(worker, HOST) is None
    assert recognize(worker, HOST, "slurm") is not None


@pytest.mark.parametrize("tasks", ["8(x4)", "1(x3),2"])
def test_several_tasks_on_a_node_are_not_what_this_needs(tasks: str) -> None:
    found = recognize({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks}, HOST)
    assert found is not None
    most = max(tasks[0], tasks[-1] if tasks[-1].isdigit() else "")
    assert f"srun starts {most} tasks on a node" in found.wrong
    assert f"srun --ntasks-per-node=1 rallypoint run --nproc-per-node {most}" in found.wrong


def test_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    ports = set()
    for step in range(200):
        found = recognize({**STEP, "SLURM_STEP_ID": str(step)}, HOST)
        assert found is not None
        ports.add(int(found.endpoints[0].rpartition(":")[2]))
    assert len(ports) == 200
    assert 20000 <= min(ports) <= max(ports) < 32768


def test_several_processes_of_mpirun_on_a_machine() -> None:
    found = recognize({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, HOST)
    assert found is not None
    assert "mpirun --map-by ppr:1:node rallypoint run --nproc-per-node 2" in found.wrong


def test_one_process_of_mpirun_is_one_machine() -> None:
    found = recognize({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, HOST)
    assert found is not None
    assert (found.nodes, found.wrong) == (1, "")


def test_a_pod_without_a_service_has_no_name() -> None:
    found = recognize(INDEXED, HostFacts("train-1", "10.0.0.6 train-1\n"))
    assert found is not None
    assert "headless Service" in found.wrong


def test_the_main_node_of_aws_batch_is_where_it_is() -> None:
    main = {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_NUM_NODES": "2"}
    found = recognize(main, HOST)
    assert found is not None
    assert found.endpoints == ("box:29400",)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**SKYPILOT, **DSTACK}, r"could be skypilot \(SKYPILOT_NODE_RANK\) or dstack \(DSTACK_N"),
        ({**STEP, "SLURM_NODEID": ""}, "SLURM_NODEID is not set"),
        ({**STEP, "SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'"),
        ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID is 4, but SLURM_STEP_NODELIST has 4 hosts"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST is 'n\\[1-', which is not"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, "NUM_NODES is 3, but SLURM_STEP_NODELIST has 4"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": ""}, "TASKS_PER_NODE is '', which is not a list"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "not a JSON list of hosts"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, r"SM_CURRENT_HOST \(b\) in it"),
        ({"VC_TASK_INDEX": "0", "VC_A_HOSTS": "a", "VC_B_HOSTS": "b"}, "VC_A_HOSTS, VC_B_HOSTS"),
        ({**LWS, "LWS_GROUP_SIZE": "0"}, "LWS_GROUP_SIZE is '0'"),
    ],
)
def test_wrong_surroundings_are_named(environ: Mapping[str, str], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected) as caught:
        recognize(environ, HOST)
    assert "--on here" in str(caught.value)
