"""The launcher-worker contract: what one side writes, the other reads, and nonsense is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import WorkerEnv, read_silence

MINIMAL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_four_variables_are_enough() -> None:
    env = WorkerEnv.from_environ(MINIMAL)
    assert (env.rank, env.world_size, env.master_addr, env.master_port) == (1, 2, "host", 29500)
    assert env.local_rank is None
    assert env.run_id is None
    assert not env.use_agent_store
    assert env.restart_count == 0


def test_to_environ_uses_torchruns_names_and_spelling() -> None:
    env = WorkerEnv(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        group_rank=1,
        group_world_size=2,
        role_name="default",
        role_rank=3,
        role_world_size=4,
        master_addr="127.0.0.1",
        master_port=1234,
        run_id="x",
        use_agent_store=True,
        error_file="/tmp/e",
    )
    assert env.to_environ() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/tmp/e",
    }


@given(
    world_size=st.integers(1, 10**6),
    data=st.data(),
    port=st.integers(1, 65535),
    run_id=st.none() | st.text(),
    agent_store=st.booleans(),
    restarts=st.integers(0, 1000),
)
def test_what_is_written_is_read(
    world_size: int,
    data: st.DataObject,
    port: int,
    run_id: str | None,
    agent_store: bool,
    restarts: int,
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    env = WorkerEnv(
        rank=rank,
        world_size=world_size,
        master_addr="h",
        master_port=port,
        local_rank=data.draw(st.none() | st.just(rank)),
        local_world_size=data.draw(st.none() | st.just(world_size)),
        run_id=run_id,
        use_agent_store=agent_store,
        restart_count=restarts,
    )
    assert WorkerEnv.from_environ(env.to_environ()) == env


@pytest.mark.parametrize("name", list(MINIMAL))
def test_a_missing_variable_is_named(name: str) -> None:
    for environ in ({k: v for k, v in MINIMAL.items() if k != name}, {**MINIMAL, name: ""}):
        with pytest.raises(InvalidArgumentError, match=f"^{name} is not set"):
            WorkerEnv.from_environ(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "1_0"),
        ("RANK", "9" * 30),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "2.0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "\u0661"),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("GROUP_RANK", "one"),
        ("TORCHELASTIC_RESTART_COUNT", "many"),
    ],
)
def test_an_ill_formed_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} is "):
        WorkerEnv.from_environ({**MINIMAL, name: value})


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="MASTER_ADDR is empty"):
        WorkerEnv(rank=0, world_size=1, master_addr="", master_port=29500)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 5), ("", 5), ("1", 1), ("1.5", 2), ("30", 30), ("3600", 3600)]
)
def test_how_long_a_host_may_be_silent(text: str | None, seconds: int) -> None:
    assert read_silence({} if text is None else {"RALLYPOINT_SILENCE": text}) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "3601", "soon", "nan", "inf", "1e400", "5 s"])
def test_what_is_no_silence(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"RALLYPOINT_SILENCE is '{text}' .* 1 to 3600"):
        read_silence({"RALLYPOINT_SILENCE": text})
