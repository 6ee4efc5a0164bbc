"""Which process of its job this is, by the variables of each launcher alone; and the traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.cluster.test_environments import BATCH

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.environments import (
    STARTERS,
    LaunchedProcess,
    find_process,
    recognize_process,
)
from rallypoint.pytorch.autoload import STARTERS as SIGNS

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-box-12@1",
    "PMIX_RANK": "3",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
FLUX = {
    "FLUX_JOB_ID": "f1",
    "FLUX_TASK_RANK": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
}
# By kind: the variables; then place, rank, size, local rank, local size, what passes on.
KNOWN: dict[str, tuple[Mapping[str, str], tuple[Any, ...]]] = {
    "open-mpi": (OPEN_MPI, ("Open MPI", 3, 4, 1, 2, "PMIX_NAMESPACE")),
    "hydra": (HYDRA, ("Hydra's mpiexec", 1, 4, 1, 2, "PMI_FD")),
    "mvapich2": (
        {
            "MV2_COMM_WORLD_RANK": "0",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "0",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            **HYDRA,
        },
        ("MVAPICH2", 0, 2, 0, 2, "PMI_FD"),
    ),
    "pals": (
        {
            "PALS_RANKID": "3",
            "PALS_LOCAL_RANKID": "1",
            "PALS_LOCAL_SIZE": "2",
            "PMI_RANK": "3",
            "PMI_SIZE": "8",
        },
        ("PALS", 3, 8, 1, 2, ""),
    ),
    "jsrun": (
        {
            "JSM_NAMESPACE_RANK": "1",
            "JSM_NAMESPACE_SIZE": "6",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "PMIX_NAMESPACE": "1",
        },
        ("jsrun", 1, 6, 1, None, "PMIX_NAMESPACE"),
    ),
    "flux": (FLUX, ("Flux job f1", 2, 4, 0, None, "PMI_FD")),
    "slurm": (STEP, ("Slurm step 1234.0", 3, 5, 1, 2, "")),
}


def numbers(process: LaunchedProcess) -> tuple[Any, ...]:
    return (
        process.place,
        process.rank,
        process.size,
        process.local_rank,
        process.local_size,
        process.passes_on,
    )


def found(environ: Mapping[str, str], **given: int) -> LaunchedProcess:
    process = find_process(environ, **given)
    assert process is not None
    return process


def test_every_kind_that_starts_processes_is_here() -> None:
    kinds = {kind.replace("_", "-") for level in STARTERS for kind in level}
    assert kinds == set(KNOWN)


def test_pytorchs_plug_in_looks_for_each_of_them() -> None:
    assert {names[0] for level in STARTERS for names in level.values()} == set(SIGNS)


@pytest.mark.parametrize("kind", KNOWN)
def test_each_value_has_a_variable(kind: str) -> None:
    environ, expected = KNOWN[kind]
    process = found(environ)
    assert numbers(process) == expected
    assert process.wrong == ""
    assert process == recognize_process(environ, kind)
    named = [each for source in process.sources.values() for each in source.split(", ") if each]
    assert {process.by, *named} <= set(environ)


def test_what_is_set_for_programs() -> None:
    assert found(HYDRA).to_environ() == {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    assert "LOCAL_WORLD_SIZE" not in found(FLUX).to_environ()
    assert found({**FLUX, "FLUX_JOB_NNODES": "1"}).local_size == 4


def test_a_step_meets_at_its_first_node() -> None:
    process = found(STEP)
    assert process.run_id == "slurm-1234.0.0"
    assert process.endpoints[0] == "n01:25539"
    assert len(set(process.endpoints)) == 8
    assert {each.rpartition(":")[0] for each in process.endpoints} == {"n01"}
    others = {**STEP, "SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
    assert found(others).endpoints == process.endpoints
    assert found(others).local_size == 1
    assert found({**STEP, "SLURM_RESTART_COUNT": "1"}).run_id == "slurm-1234.0.1"


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = [found({**STEP, "SLURM_STEP_ID": str(step)}).endpoints for step in range(1000)]
    assert len({each for some in ports for each in some}) == 8000


def test_a_step_of_one_node_needs_no_name() -> None:
    one = {
        **STEP, "SLURM_STEP_NODELIST": "n7", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "5",
    }  # fmt: skip
    process = found(one)
    assert process.endpoints[0].startswith("127.0.0.1:")
    assert process.is_local


# Who counts.


def test_who_sets_all_four_variables_has_said_it() -> None:
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for environ, _ in KNOWN.values():
        assert find_process({**environ, **said}) is None
    assert find_process({**HYDRA, **said, "RANK": ""}, rank=1) is None


@pytest.mark.parametrize("near", [OPEN_MPI, HYDRA])
@pytest.mark.parametrize("far", [STEP, BATCH])
def test_mpirun_is_nearer_than_slurm(near: Mapping[str, str], far: Mapping[str, str]) -> None:
    assert found({**far, **near}) == found(near)


def test_flux_is_nearer_than_the_slurm_that_it_was_started_in() -> None:
    assert found({**STEP, **FLUX}) == found(FLUX)


def test_sruns_own_pmi_is_no_mpirun() -> None:
    assert found({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5", "PMI_FD": "9"}) == found(STEP)


def test_a_containers_rank_is_not_enough() -> None:
    assert found({**STEP, "RANK": "3", "LOCAL_RANK": "1"}) == found(STEP)


def test_a_pod_and_a_cloud_start_no_processes() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    assert find_process(pod) is None
    assert find_process({**pod, **HYDRA}) == found(HYDRA)
    assert find_process({**pod, **HYDRA, "RALLYPOINT_CLUSTER": "indexed-job"}) is None


def test_a_worker_of_a_launch_has_inherited_its_launchers() -> None:
    assert find_process({**STEP, "TORCHELASTIC_RUN_ID": "slurm-1234.0"}) is None


@pytest.mark.parametrize("value", ["none", "here"])
def test_a_variable_switches_it_off(value: str) -> None:
    assert find_process({**HYDRA, "RALLYPOINT_CLUSTER": value}) is None


def test_a_variable_chooses() -> None:
    both = {**STEP, **HYDRA}
    assert found({**both, "RALLYPOINT_CLUSTER": "slurm"}).place == "Slurm step 1234.0"
    assert found({**both, "RALLYPOINT_CLUSTER": "auto"}).place == "Hydra's mpiexec"


def test_a_batch_script_without_srun_has_no_rank() -> None:
    process = found(BATCH)
    assert "start it with srun -n N or `rallypoint run`" in process.wrong


def test_rank_0_must_be_where_the_others_look() -> None:
    process = found({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert "not on the step's first node (SLURM_NODEID is 1)" in process.wrong


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({**HYDRA, "RANK": "2"}, {}, r"RANK is 2, but Hydra's mpiexec says 1 \(PMI_RANK, PMI_S"),
        ({**HYDRA, "WORLD_SIZE": "8"}, {}, "WORLD_SIZE is 8, but Hydra's mpiexec says 4"),
        (HYDRA, {"rank": 0}, "RANK is 0, but Hydra's mpiexec says 1"),
        (HYDRA, {"rank": 1, "world_size": 2}, "WORLD_SIZE is 2"),
        ({**HYDRA, "PMI_RANK": "x"}, {}, "PMI_RANK is 'x'.*RALLYPOINT_CLUSTER=none ignores it"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, {}, "OMPI_COMM_WORLD_LOCAL_RANK is"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": ""}, {}, "SLURM_STEP_NUM_TASKS is not set"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6"}, {}, r"SLURM_STEP_NUM_TASKS \(6\) contradict"),
        ({**STEP, "SLURM_NODEID": "3"}, {}, r"SLURM_NODEID \(3\)"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, {}, "which is not a list of hosts"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(xx)"}, {}, "not a list such as"),
        (
            {**HYDRA, "RALLYPOINT_CLUSTER": "slurm"},
            {},
            "RALLYPOINT_CLUSTER slurm: this is not slurm: SLURM_JOB_ID is not set",
        ),
        ({**HYDRA, "RALLYPOINT_CLUSTER": "slrum"}, {}, "'slrum' is not a known environment"),
        (
            {**OPEN_MPI, **KNOWN["jsrun"][0]},
            {},
            "could be open-mpi .* or jsrun .*RALLYPOINT_CLUSTER=none",
        ),
    ],
)
def test_what_contradicts_is_named(
    environ: Mapping[str, str], given: dict[str, int], expected: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=expected) as caught:
        find_process(environ, **given)
    assert "--on here" not in str(caught.value)
