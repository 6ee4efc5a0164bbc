"""Functions that other processes cannot import, of a notebook or of a function, run in workers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

SPAWN = """
import rallypoint
rallypoint.spawn(work, args=(Point(7),), nprocs=2)
"""
ELASTIC = """
from rallypoint.launch import LaunchConfig, elastic_launch
results = elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=2), work)(5, Point(7))
assert [type(each) for each in results.values()] == [Point] * 2
print(sorted(each.x for each in results.values()))
"""
# As in a notebook's cells: a main module without a file.
CELLS = """
import os
class Point:
    def __init__(self, x):
        self.x = x
def work(number, point):
    os.write(2, f"{number} {point.x}\\n".encode())
    return Point(number + point.x)
"""


@pytest.mark.parametrize(
    ("call", "told", "is_local"),
    [
        (SPAWN, ["0 7", "1 7"], True),
        pytest.param(ELASTIC, ["5 7", "5 7"], False, marks=pytest.mark.everyday),
    ],
    ids=["spawn, in a function", "elastic, in a notebook"],
)
def test_run_where_cloudpickle_is_installed(
    launch: Launch, call: str, told: list[str], is_local: bool
) -> None:
    text = CELLS + call
    if is_local:  # in a script, whose main module can be imported
        body = f"def main():\n{textwrap.indent(text, '    ')}\nif __name__ == '__main__': main()"
        launcher: tuple[str, ...] = (launch.script(body, "program.py"),)
    else:
        launcher = ("-c", text)
    assert launch.start(launcher=launcher).wait(120) == 0, launch.err
    for line in told:
        assert launch.err.splitlines().count(line) == told.count(line)
    assert ("[12, 12]\n" in launch.out) is (call is ELASTIC)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("call", "is_local"),
    [(SPAWN, True), (ELASTIC, False)],
    ids=["spawn, in a function", "elastic, in a notebook"],
)
def test_are_refused_in_a_sentence_where_it_is_not(
    launch: Launch, call: str, is_local: bool
) -> None:
    absent = "import sys; sys.modules['cloudpickle'] = None\n"
    body = f"def main():\n{textwrap.indent(CELLS + call, '    ')}\nmain()" if is_local else None
    program = absent + (body or CELLS + call)
    assert launch.start(launcher=("-c", program)).wait(60) == 1
    last = launch.err.splitlines()[-1]
    assert last.startswith("rallypoint.base.errors.InvalidArgumentError: ")
    assert "work or its arguments cannot be passed to other processes: " in last
    assert last.endswith("or install cloudpickle (pip install cloudpickle)")


UNREADABLE = """
import sys, rallypoint
from rallypoint.launch import LaunchConfig, elastic_launch
class Odd:
    def __reduce__(self):
        return int, ("no number",)
def work(*_):
    pass
if __name__ == "__main__":
    try:
        if sys.argv[1] == "spawn":
            rallypoint.spawn(work, args=(Odd(),), nprocs=2)
        else:
            elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=5), work)(Odd())
    except rallypoint.WorkersFailedError as error:
        print("no number" in str(error))
"""


@pytest.mark.parametrize("how", ["spawn", "elastic"])
def test_what_workers_cannot_read_is_not_tried_again(launch: Launch, how: str) -> None:
    path = launch.script(UNREADABLE, "program.py")
    assert launch.start(how, launcher=(path,)).wait(60) == 0, launch.err
    assert launch.out == "True\n"
    if how == "elastic":
        assert "UnreadableCallError: the function or its arguments cannot be loaded" in launch.err
        assert "a retry would fail in the same way" in launch.err
    assert "restart 1" not in launch.err


def test_a_main_module_that_workers_cannot_import_is_not_tried_again(launch: Launch) -> None:
    body = """
    import os
    if "RANK" in os.environ:
        import not_there
    from rallypoint.launch import LaunchConfig, elastic_launch
    def work():
        pass
    if __name__ == "__main__":
        elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=5), work)()
    """
    path = Path(launch.script(textwrap.dedent(body), "program.py"))
    assert launch.start(launcher=(str(path),)).wait(60) == 1
    assert "program.py cannot be imported: No module named 'not_there'" in launch.err
    assert "restart 1" not in launch.err


MISTAKES = {
    "no guard": (
        "rallypoint.spawn(work, nprocs=2)",
        "InvalidArgumentError: the script starts processes when it is imported, which each of these"
        ' does; put that call below `if __name__ == "__main__":`',
    ),
    "not launched": (
        "if __name__ == '__main__': rallypoint.spawn(form, nprocs=2)",
        "InvalidArgumentError: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set",
    ),
    "an exception": (
        "if __name__ == '__main__': rallypoint.spawn(work, args=({},), nprocs=2)",
        "KeyError: 'lost'",
    ),
    "a loss": (
        "if __name__ == '__main__': rallypoint.spawn(os._exit, nprocs=2)",
        "WorkersFailedError: process 1 exited with code 1, and the others were terminated",
    ),
    "an odd exception": (
        "if __name__ == '__main__': rallypoint.spawn(odd, nprocs=2)",
        "Odd: <exception str() failed>",
    ),
}


@pytest.mark.exact
@pytest.mark.everyday
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_last_once_and_briefly(launch: Launch, mistake: str) -> None:
    call, told = MISTAKES[mistake]
    text = f"""
import os, rallypoint
class Odd(Exception):
    def __str__(self):
        raise ValueError("no text")
def odd(number):
    raise Odd()
def form(number):
    rallypoint.init_process_group()
def work(number, found={{}}):
    return found["lost"]
{call}
"""
    assert launch.start(launcher=(launch.script(text, "program.py"),)).wait(60) == 1
    lines = launch.err.splitlines()
    assert told in lines[-1]
    assert len(lines) <= 15
    assert sum("/rallypoint/" in line for line in lines) <= 1
