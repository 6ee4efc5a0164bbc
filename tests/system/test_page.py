"""`rallypoint page` on real jobs: what it prints and serves, what it saves, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.pages import blocks_tested_by
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.nodes import launches
from tests.system.test_jobs import rallypoint, start_waiting_job
from tests.system.test_top import SLOW, followers, sleeps_between, start_slow_job

pytestmark = pytest.mark.system

PAGE = (sys.executable, "-m", "rallypoint", "page")


class Served:
    """A page, as a browser that was given its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#([\w-]{22})", self.url)
        assert found is not None, self.url
        self.port, self.token = int(found[1]), found[2]

    def ask(self, target: str) -> http.client.HTTPResponse:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        client.request("GET", target, headers={"Authorization": f"Bearer {self.token}"})
        return client.getresponse()

    def get(self, target: str = "/data") -> bytes:
        answer = self.ask(target)
        assert answer.status == 200
        return answer.read()

    def data(self) -> dict[str, object]:
        return json.loads(self.get())  # type: ignore[no-any-return]


class ServedByCommand(Served):
    """A running `rallypoint page`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        super().__init__(process.stdout.readline().strip())


@pytest.fixture(scope="module")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The launcher of a job that tests only look at."""
    with launches(tmp_path_factory.mktemp("slow"), 1) as (launch,):
        yield start_slow_job(launch)


@contextmanager
def served(*words: str, **environ: str) -> Iterator[ServedByCommand]:
    process = subprocess.Popen(
        [*PAGE, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )
    with process:
        try:
            yield ServedByCommand(process)
        finally:
            process.kill()


def states_of(data: dict[str, object]) -> list[object]:
    ranks = data.get("ranks", [])
    assert isinstance(ranks, list)
    return [each["state"] for each in ranks]


def shows_four_ranks(page: Served) -> bool:
    return len(states_of(page.data())) == 4


def events_of(data: dict[str, object]) -> list[str]:
    events = data["events"]
    assert isinstance(events, list)
    return [each["text"] for each in events]


@pytest.mark.everyday
def test_a_slow_rank_is_named_and_the_end_is_told(launch: Launch) -> None:
    pid = start_slow_job(launch)
    with served(str(pid)) as page:
        assert b"<title>Rallypoint</title>" in page.get("/")
        wait_until(lambda: "slow rank 2: others wait" in str(page.data().get("headline")))
        data = page.data()
        assert len(states_of(data)) == 4
        assert data["order"] == [2, 0, 1, 3]
        assert "round 0 begins with 4 ranks" in events_of(data)
        assert "slow: rank 2, for which others wait again and again" in events_of(data)
        assert data["speeds"]
        assert len(followers(pid)) == 1
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: bool(page.data()["has_ended"]))
        assert page.process.wait(60) == 0
        assert page.process.stdout is not None
        assert page.process.stdout.read().endswith(" has ended\n")


def test_a_job_that_hangs_has_the_sentence_of_explain(launch: Launch) -> None:
    pid = start_waiting_job(launch)
    with served(pid) as page:
        wait_until(lambda: bool(page.data().get("is_stalled")))
        wait_until(lambda: str(page.data()["headline"]).startswith("rank 1 "))
        events = events_of(page.data())
        assert any(text.startswith("rank 1 ") for text in events)


def test_a_lost_rank_is_on_the_time_line(launch: Launch) -> None:
    tells = "import os; open(f'pid.{rank}', 'w').write(str(os.getpid()))\n"
    script = SLOW.replace("while True", f"{tells}while True")
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    pid = launch.start(*flags, launch.script(script)).pid
    launch.wait_for("ready.*", 2)
    with served(str(pid)) as page:
        wait_until(lambda: len(states_of(page.data())) == 2)
        os.kill(int((launch.directory / "pid.1").read_text()), signal.SIGKILL)
        expected = ["rank 1 was killed by SIGKILL", "round 1 begins with 2 ranks: restart 1 of 1"]
        wait_until(lambda: set(expected) <= set(events_of(page.data())))
        data = page.data()
        assert (data["losses"], data["restarts"]) == (1, 1)
        assert float(str(data["job_began"])) <= float(str(data["began"]))


def test_ctrl_c_ends_it_and_its_reader(launch: Launch) -> None:
    pid = start_slow_job(launch)
    with served(str(pid)) as page:
        wait_until(lambda: len(states_of(page.data())) == 4)
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(60) == 0
    wait_until(lambda: not followers(pid))
    wait_until(lambda: sleeps_between(Path(f"/proc/{pid}/status"), 2.0))


def test_a_unix_socket(slow_job: int, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    command = [*PAGE, str(slow_job), "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert re.fullmatch(rf"  ssh -N -L 8432:{path} \S+@\S+\n", lines[1])
        assert re.fullmatch(r"  and then open http://127\.0\.0\.1:8432/#[\w-]{22}\n", lines[2])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8432\r\n\r\n")
            assert client.recv(1 << 10).startswith(b"HTTP/1.0 200 OK\r\n")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not path.exists()


def test_over_ssh_it_prints_what_to_type(slow_job: int) -> None:
    with served(str(slow_job), SSH_CONNECTION="10.0.0.1 50000 10.0.0.2 22") as page:
        assert page.process.stdout is not None
        lines = [page.process.stdout.readline() for _ in range(3)]
        forward = rf"  ssh -N -L {page.port}:127\.0\.0\.1:{page.port} \S+@\S+\n"
        assert re.fullmatch(forward, lines[1])
        assert lines[2] == f"  and then open {page.url}\n"


def test_secrets_and_hostile_names_stay_where_they_are(launch: Launch) -> None:
    """The data has no command line, environment or token, and no text that a terminal obeys."""
    name = "job\x1b]0;pwned\x07</script><script>\u202e"
    flags = ("--nproc-per-node", "4", "--rdzv-id", name)
    script = launch.script(SLOW)
    environ = {"API_KEY": "SECRET2", "RALLYPOINT_TOKEN": "SECRET3"}
    pid = launch.start(*flags, script, "--api-key=SECRET1", environ=environ).pid
    launch.wait_for("ready.*", 4)
    file = launch.directory / "report.html"
    with served(str(pid)) as page:
        wait_until(lambda: len(states_of(page.data())) == 4)
        told = page.get().decode()
    done = rallypoint("page", str(pid), "--save", str(file))
    assert done.returncode == 0, done.stderr
    for text in (told, file.read_text()):
        assert "SECRET" not in text
        assert "\\u001b" not in text
        assert "\\u202e" not in text.replace("\\\\u202e", "")
        assert "pwned\\\\x07" in text
    assert file.read_text().count("</script>") == 2
    assert json.loads(told)["name"] == name.encode("unicode_escape").decode()


def test_the_guides_commands(slow_job: int, launch: Launch) -> None:
    for block in blocks_tested_by("tests/system/test_page.py::test_the_guides_commands"):
        for program, *words in block.commands():
            assert program == "rallypoint"
            if words[0] == "run":
                launch.script("import time; time.sleep(600)", "train.py")
                launch.start(*words[1:])
                wait_until(partial(has_a_page, launch))
                continue
            if "--save" not in words:
                with served(str(slow_job), *words[1:]) as page:
                    wait_until(partial(shows_four_ranks, page))
                continue
            words[-1] = str(launch.directory / words[-1])
            done = rallypoint(*words[:1], str(slow_job), *words[1:])
            assert done.returncode == 0, done.stderr
            saved = re.search(r'id="saved">(.*?)</script>', Path(words[-1]).read_text())
            assert saved is not None
            assert len(states_of(json.loads(saved[1]))) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--listen", "0.0.0.0:0"), "--listen is '0.0.0.0:0'; it must be 127.0.0.1:PORT"),
        (("--listen", "example.com:80"), "it must be 127.0.0.1:PORT or [::1]:PORT"),
        (("--listen", "127.0.0.1"), "it must be 127.0.0.1:PORT or [::1]:PORT"),
        (("--listen", "localhost:0", "--socket", "x"), "--listen and --socket exclude each other"),
        (("--socket", "x", "--save", "y"), "--socket and --save exclude each other"),
    ],
)
def test_wrong_flags(slow_job: int, words: tuple[str, ...], text: str) -> None:
    done = rallypoint("page", str(slow_job), *words)
    assert done.returncode == 2
    assert text in done.stderr


def has_a_page(launch: Launch) -> bool:
    return "the page of this job: http" in launch.err


def beside(launch: Launch) -> Served:
    (url,) = re.findall(r"^rallypoint run: the page of this job: (http\S+)$", launch.err, re.M)
    page = Served(url)
    wait_until(lambda: page.ask("/data").status != http.HTTPStatus.SERVICE_UNAVAILABLE)
    return page


def is_served(page: Served) -> bool:
    try:
        socket.create_connection(("127.0.0.1", page.port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.everyday
def test_beside_a_launcher_it_ends_with_the_job(launch: Launch) -> None:
    process = launch.start(
        *("--page", "127.0.0.1:0", "--quiet", "--nproc-per-node", "4", "--rdzv-id", "mine"),
        launch.script(SLOW),
    )
    launch.wait_for("ready.*", 4)
    page = beside(launch)
    wait_until(lambda: shows_four_ranks(page))
    assert page.data()["run_id"] == "mine"
    process.send_signal(signal.SIGINT)  # at a terminal, Ctrl-C goes to all processes of the job
    wait_until(lambda: bool(page.data()["has_ended"]))
    process.wait(60)
    wait_until(lambda: not is_served(page))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_launcher_that_is_killed_leaves_no_page(launch: Launch, how: signal.Signals) -> None:
    process = launch.start("--page", "127.0.0.1:0", launch.script("import time; time.sleep(600)"))
    wait_until(lambda: "the page of this job" in launch.err)
    page = beside(launch)
    process.send_signal(how)
    if how is signal.SIGSTOP:
        process.kill()
    wait_until(lambda: not is_served(page))


def test_a_job_that_fails_at_once_leaves_no_page(launch: Launch) -> None:
    assert launch.run("--page", "127.0.0.1:0", launch.script("raise SystemExit(3)")) == 1
    assert "the page of this job: http" in launch.err
    launch.expect_nothing_left()


def test_beside_a_launcher_on_a_unix_socket(launch: Launch) -> None:
    path = launch.directory / "page.sock"
    process = launch.start("--page", str(path), launch.script("import time; time.sleep(600)"))
    wait_until(lambda: "then open" in launch.err)
    assert re.search(rf"^  ssh -N -L 8432:{path} \S+@\S+$", launch.err, re.MULTILINE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    process.terminate()
    process.wait(60)
    wait_until(lambda: not path.exists())


def test_only_the_first_node_has_a_page_in_a_cluster(launch: Launch) -> None:
    """All nodes of a Slurm step have the same command."""
    environ = {"SLURM_JOB_ID": "7"}
    script = launch.script("import time; time.sleep(600)")
    address = ("--master-addr", "127.0.0.1", "--master-port", "1")
    flags = ("--page", "127.0.0.1:0", "--nnodes", "2", "--on", "here", *address)
    first = launch.start(*flags, "--node-rank", "0", script, environ=environ)
    wait_until(lambda: "and then open" in launch.err)
    first.kill()
    first.wait(60)
    second = launch.start(*flags, "--node-rank", "1", script, environ=environ)
    wait_until(lambda: str(second.pid) in rallypoint("ps").stdout)
    assert "page" not in launch.err


@pytest.mark.parametrize(
    ("where", "status", "text"),
    [
        ("0.0.0.0:0", 2, "--page is '0.0.0.0:0'; it must be 127.0.0.1:PORT"),
        ("8432", 2, "it must be 127.0.0.1:PORT or [::1]:PORT"),
        ("/no/such/page.sock", 1, "cannot be served at /no/such/page.sock: No such file"),
    ],
)
def test_wrong_places_beside_a_launcher(launch: Launch, where: str, status: int, text: str) -> None:
    assert launch.run("--page", where, launch.script("open('ran', 'w')")) == status
    assert text in launch.err
    assert not (launch.directory / "ran").exists()


def test_no_job() -> None:
    assert rallypoint("page", "no-such-job").returncode == 5


def test_a_file_that_cannot_be_written(slow_job: int) -> None:
    done = rallypoint("page", str(slow_job), "--save", "/no/such/place.html")
    assert done.returncode == 1
    assert "/no/such/place.html cannot be written: No such file or directory." in done.stderr


def test_a_file_that_does_not_fit_leaves_what_was_there(slow_job: int, tmp_path: Path) -> None:
    """A limit of the file's size, as a full disk, fails in the middle of the file."""
    file = tmp_path / "job.html"
    command = f"ulimit -f 8; exec {sys.executable} -m rallypoint page {slow_job} --save {file}"
    for before in (None, "old"):
        if before is not None:
            file.write_text(before)
        done = subprocess.run(
            ["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1, done.stderr
        assert f"{file} cannot be written: File too large." in done.stderr
        assert [each.read_text() for each in tmp_path.iterdir()] == ([before] if before else [])


def test_a_file_that_is_no_file_is_written_to(slow_job: int) -> None:
    done = rallypoint("page", str(slow_job), "--save", "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<!doctype html>")
