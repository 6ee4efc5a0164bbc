"""An endpoint of this machine that another program holds."""

from __future__ import annotations

import subprocess

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

# It answers like a web server, or closes at once, or says nothing.
HOLDER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
open("listening", "w").close()
kept = []
while True:
    connection, _ = server.accept()
    if sys.argv[2] == "answers":
        connection.sendall(b"HTTP/1.0 400 Bad request syntax, whatever it was\\r\\n" * 4)
    if sys.argv[2] != "is silent":
        connection.close()
    kept.append(connection)
"""


@pytest.mark.parametrize(
    "how", [pytest.param("answers", marks=pytest.mark.everyday), "closes", "is silent"]
)
def test_who_holds_it_is_told(how: str, launch: Launch, free_port: int) -> None:
    holder = launch.script(HOLDER, "holder.py")
    other = subprocess.Popen(["python3", holder, str(free_port), how], cwd=launch.directory)
    try:
        launch.wait_for_file("listening")
        flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
        process = launch.start(*flags, "--nnodes", "2", launch.script(""))
        wait_until(lambda: "which does not answer as an agent of this job" in launch.err)
        process.terminate()
        process.wait(100)
    finally:
        other.kill()
        other.wait()
    told = f"the endpoint 127.0.0.1:{free_port} is held by process {other.pid} ("
    assert launch.err.count(told) == 1, launch.err
