"""Launching from Python: functions reach workers, results and exceptions come back."""

from __future__ import annotations

import os
import signal
import sys
import textwrap

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system


def program(launch: Launch, body: str) -> str:
    return launch.script(textwrap.dedent(body), "program.py")


def run(launch: Launch, body: str) -> int:
    return launch.start(launcher=(program(launch, body),)).wait(120)


@pytest.mark.everyday
def test_elastic_launch_returns_what_the_workers_return(launch: Launch) -> None:
    status = run(
        launch,
        """
        import os, signal
        from rallypoint.launch import LaunchConfig, elastic_launch
        def work(base, word):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return f"{word} {base + int(os.environ['RANK'])} of {os.environ['WORLD_SIZE']}"
        if __name__ == "__main__":
            config = LaunchConfig(nproc_per_node=2, max_restarts=1, role="trainer")
            print(elastic_launch(config, work)(40, "x"))
        """,
    )
    assert status == 0
    assert "{0: 'x 40 of 2', 1: 'x 41 of 2'}\n" in launch.out
    assert "restart 1 of 1" in launch.err


@pytest.mark.everyday
def test_elastic_launch_raises_when_the_job_fails(launch: Launch) -> None:
    status = run(
        launch,
        """
        import os, time, rallypoint
        from rallypoint.launch import LaunchConfig, elastic_launch
        def work():
            if os.environ["RANK"] == "1":
                raise KeyError("lost")
            time.sleep(600)
        if __name__ == "__main__":
            try:
                elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), work)()
            except rallypoint.WorkersFailedError as error:
                print(error.status, sorted(error.failures), error.failures[1].traceback[-17:-1])
        """,
    )
    assert status == 0, launch.err
    assert "1 [1] KeyError: 'lost'\n" in launch.out
    assert "rank 1 raised KeyError: 'lost'" in launch.err


def test_roles_of_several_nodes(launch: Launch, free_port: int) -> None:
    status = run(
        launch,
        f"""
        import os, subprocess, sys
        from rallypoint.launch import LaunchConfig, elastic_launch
        def work():
            names = "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK", "WORLD_SIZE"
            return [os.environ[name] for name in names]
        if __name__ == "__main__":
            rank = int(sys.argv[1]) if len(sys.argv) > 1 else 0
            if rank == 0:
                other = subprocess.Popen([sys.executable, __file__, "1"])
            config = LaunchConfig(
                min_nodes=2, max_nodes=2, nproc_per_node=1 + rank, max_restarts=0,
                role=("reader", "trainer")[rank], rdzv_endpoint="127.0.0.1:{free_port}",
                rdzv_backend="static", rdzv_configs=dict(rank=rank),
            )
            for values in elastic_launch(config, work)().values():
                os.write(1, (" ".join(values) + chr(10)).encode())
            if rank == 0:
                sys.exit(other.wait())
        """,
    )
    assert status == 0, launch.err
    assert sorted(launch.out.splitlines()) == [
        "reader 0 1 0 3",
        "trainer 0 2 1 3",
        "trainer 1 2 2 3",
    ]


@pytest.mark.everyday
def test_spawn_runs_a_function_in_each_process(launch: Launch) -> None:
    status = run(
        launch,
        """
        import os, rallypoint
        def work(i, word):
            os.write(1, f"{word} {i}\\n".encode())
        if __name__ == "__main__":
            assert rallypoint.spawn(work, args=("x",), nprocs=3) is None
            context = rallypoint.spawn(work, args=("y",), nprocs=2, join=False)
            assert len(set(context.pids())) == 2
            while not context.join(timeout=0.01):
                pass
        """,
    )
    assert status == 0, launch.err
    assert sorted(launch.out.split("\n")) == ["", "x 0", "x 1", "x 2", "y 0", "y 1"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param(
            "raise KeyError('lost')",
            "process 1 raised an exception KeyError('lost')",
            marks=pytest.mark.everyday,
        ),
        ("os._exit(3)", "process 1 exited with code 3 None"),
        ("os.abort()", "process 1 was killed by SIGABRT None"),
    ],
)
def test_spawn_raises_what_a_process_raised(launch: Launch, how: str, told: str) -> None:
    status = run(
        launch,
        f"""
        import os, time, rallypoint
        def work(i):
            if i == 1:
                {how}
            time.sleep(600)
        if __name__ == "__main__":
            try:
                rallypoint.spawn(work, nprocs=3)
            except rallypoint.WorkersFailedError as error:
                print(str(error).partition(",")[0], repr(error.__cause__))
                assert error.__cause__ is None or "in work" in str(error)
        """,
    )
    assert status == 0, launch.err
    assert told + "\n" in launch.out
    launch.expect_nothing_left()


@pytest.mark.everyday
def test_spawns_children_do_not_outlive_their_parent(launch: Launch) -> None:
    body = """
        import os, pathlib, time, rallypoint
        def work(i):
            pathlib.Path(f"up.{i}").touch()
            time.sleep(600)
        if __name__ == "__main__":
            rallypoint.spawn(work, nprocs=2)
    """
    process = launch.start(launcher=(program(launch, body),))
    launch.wait_for("up.*", 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    launch.expect_nothing_left()
    assert launch.left_files() == []


def test_record_writes_torchs_error_file(launch: Launch) -> None:
    # -S: no site, and so no hook of ours in the worker.
    script = launch.script("""
import sys
sys.path[:0] = sys.argv[1].split(":")
import rallypoint
@rallypoint.record
def main():
    raise KeyError("lost")
main()
""")
    python = ("--no-python", sys.executable, "-S", script)
    assert launch.run(*python, ":".join(sys.path)) == 1
    assert "job failed: rank 0 raised KeyError: 'lost'" in launch.err
    assert launch.err.count("in main") == 2  # Python's own traceback, and the launcher's


def test_a_function_that_imports_what_is_not_there_is_restarted(launch: Launch) -> None:
    status = run(
        launch,
        """
        import os
        from rallypoint.launch import LaunchConfig, elastic_launch
        def work():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                import no_such_module
        if __name__ == "__main__":
            elastic_launch(LaunchConfig(1, 1, 1, max_restarts=1), work)()
        """,
    )
    assert status == 0, launch.err
