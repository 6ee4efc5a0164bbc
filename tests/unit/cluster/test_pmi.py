"""A text passed on by PMI-1, with servers that keep to the protocol and with others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
from tests.unit.cluster.pmi_server import PmiServer

from rallypoint.base.errors import HostError, StoreTimeoutError
from rallypoint.base.worker_hook import identity_of
from rallypoint.cluster.pmi import Waiting, pmi

TEXT = "40001,6162,10.0.0.1,fd77::1"
INIT = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
SPACE = "cmd=my_kvsname kvsname=kvs_1\n"
MAXES = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n"
NONE = "cmd=get_result rc=-1 msg=key_not_found\n"
OUT = "cmd=barrier_out\n"
PUT = "cmd=put_result rc=0\n"
FOUND = f"cmd=get_result rc=0 value={TEXT}\n"


@pytest.fixture(autouse=True)
def descriptors_are_new() -> Iterator[None]:
    """The kernel gives their numbers again; and this process ends later."""
    with (
        patch.object(pmi, "_cut_short", new=set()),
        patch.object(pmi, "_FAREWELL_S", new=60.0),
        patch("atexit.register"),
    ):
        yield


def waiting(timeout_s: float = 60.0) -> Waiting:
    return Waiting(timedelta(seconds=timeout_s), "the others", speaks=False)


def pass_on(fd: int, text: str = "", timeout_s: float = 60.0) -> str:
    return pmi.pass_on(text, waiting(timeout_s), {"PMI_FD": str(fd)})


def pass_on_by_all(server: PmiServer, size: int) -> list[str]:
    texts = [TEXT, *[""] * (size - 1)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(pass_on, map(server.fd, range(size)), texts))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_get_what_rank_0_says(size: int) -> None:
    with PmiServer(size) as server:
        assert pass_on_by_all(server, size) == [TEXT] * size
        assert list(server.keys.values()) == [TEXT]


def test_mpi_can_begin_a_session_afterwards() -> None:
    """It is never ended, and no byte of it is left in the descriptor, which stays open."""
    with PmiServer(1) as server:
        pass_on(server.fd(0), TEXT)
        assert not any("finalize" in each for each in server.asked)
        os.write(server.fd(0), b"cmd=init pmi_version=1 pmi_subversion=1\n")
        assert os.read(server.fd(0), 1000).decode() == INIT


def test_the_session_ends_with_the_process_unless_mpi_ends_it() -> None:
    """Under Hydra, a rank that leaves without a word is one that died."""
    with PmiServer(1) as server:
        fd = server.fd(0)
        for identity, pid, runs in (
            ((0, 0), os.getpid(), False),  # another descriptor has its number now
            (identity_of(fd), 1, False),  # a forked child
            (identity_of(fd), os.getpid(), True),
        ):
            with patch.object(pmi, "mpi_runs", return_value=runs):
                pmi._end(fd, identity, pid)
        pass_on(fd, TEXT)  # an earlier request would have been answered before
        assert "cmd=finalize" not in server.asked
        pmi._end(fd, identity_of(fd), os.getpid())
        assert server.asked[-1] == "cmd=finalize"
    pmi._end(fd, (0, 0), os.getpid())  # closed


@contextmanager
def served(answers: str, *, ends: bool = True) -> Iterator[int]:
    """The descriptor to a server that has given all its answers already, and may end then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(answers.encode("latin-1"))
        if ends:
            ours.shutdown(socket.SHUT_WR)
        yield theirs.fileno()


def test_what_a_server_says_when_all_is_well() -> None:
    with served(INIT + SPACE + MAXES + PUT + OUT + FOUND) as fd:
        assert pass_on(fd, TEXT) == TEXT


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("", "it has closed the connection"),
        ("cmd=response_to_init rc=0", "it has closed the connection"),
        ("cmd=response_to_init rc=-1\n", "it refused init: rc=-1"),
        ("cmd=finalize_ack\n", "'cmd=finalize_ack' is not an answer to init"),
        ("\n", "'' is not an answer to init"),
        ("\xff\xfe\n", "is not an answer"),
        ("x" * 20000, "its answer has no end"),
        (INIT + "cmd=my_kvsname\n", "its key-value space has no name"),
        (INIT + SPACE + "cmd=maxes vallen_max=-1\n", "it allows values of '-1' characters"),
        (INIT + SPACE + "cmd=maxes\n", "it allows values of '' characters"),
        (INIT + SPACE + "cmd=maxes vallen_max=20\n", "values may have 19 characters, but this nee"),
        (INIT + SPACE + MAXES + PUT, "it has closed the connection"),
        (
            INIT + SPACE + MAXES + "cmd=put_result rc=-1 msg=no_room\n",
            "it refused put: no_room",
        ),
        (INIT + SPACE + MAXES + PUT + OUT + NONE, "it refused get: key_not_found"),
    ],
)
def test_what_is_wrong_is_named(answers: str, expected: str) -> None:
    with served(answers) as fd, pytest.raises(HostError, match=r"\(PMI\)") as caught:
        pass_on(fd, TEXT)
    assert expected in str(caught.value)
    assert "or start it with `rallypoint run`" in str(caught.value)


@pytest.mark.parametrize("text", ["", "x", "-1", "99999", "9" * 30])
def test_a_descriptor_that_is_none(text: str) -> None:
    with pytest.raises(HostError, match=r"PMI_FD is .* not an open descriptor of this process"):
        pmi.pass_on(TEXT, waiting(), {"PMI_FD": text})


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    with served(INIT + SPACE + MAXES + PUT, ends=False) as fd:
        with pytest.raises(StoreTimeoutError, match=r"waited \d+ s for the others"):
            pass_on(fd, TEXT, timeout_s=0.1)
        with pytest.raises(HostError, match="an earlier exchange was interrupted"):
            pass_on(fd, TEXT)


def test_answers_may_come_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    answers = INIT + SPACE + MAXES + PUT + OUT + FOUND

    def drip() -> None:
        for each in answers:
            ours.send(each.encode())

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        assert pass_on(theirs.fileno(), TEXT) == TEXT
        thread.join()
