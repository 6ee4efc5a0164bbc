"""A PMI-1 server for processes of this machine, as Hydra and Flux have one: a thread for each."""

from __future__ import annotations

import socket
import threading

PATIENCE_S = 60.0
_ALWAYS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1_0",
    "barrier_in": "cmd=barrier_out rc=0",
    "finalize": "cmd=finalize_ack rc=0",
    "get": "cmd=get_result rc=-1 msg=key_not_found value=unknown",
}


class PmiServer:
    """Serves `size` ranks, each over a socket of its own. A context manager.

    Attributes:
        asked: all requests, in the order of their coming.
        keys: what was put.
    """

    def __init__(self, size: int) -> None:
        self.asked: list[str] = []
        self.keys: dict[str, str] = {}
        self._barrier = threading.Barrier(size)
        pairs = [socket.socketpair() for _ in range(size)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self._ours]
        for thread in self._threads:
            thread.start()

    def fd(self, rank: int) -> int:
        """The descriptor for PMI_FD."""
        return self._theirs[rank].fileno()

    def environ(self, rank: int) -> dict[str, str]:
        """What Hydra gives a process, all on one machine."""
        size = str(len(self._theirs))
        return {
            "PMI_FD": str(self.fd(rank)),
            "PMI_RANK": str(rank),
            "PMI_SIZE": size,
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": size,
        }

    def __enter__(self) -> PmiServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._barrier.abort()
        for each in self._ours:
            each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in (*self._ours, *self._theirs):
            each.close()

    def _serve(self, client: socket.socket) -> None:
        with client.makefile("rw", newline="\n") as lines:
            for line in lines:
                self.asked.append(line.strip())
                request = dict(word.split("=", 1) for word in line.split())
                try:
                    answer = self._answer(request)
                except threading.BrokenBarrierError:
                    return
                lines.write(f"{answer}\n")
                lines.flush()

    def _answer(self, request: dict[str, str]) -> str:
        key = request.get("key", "")
        answer = _ALWAYS.get(request["cmd"], "")
        if request["cmd"] == "barrier_in":
            self._barrier.wait(PATIENCE_S)
        elif request["cmd"] == "put":
            is_new = key not in self.keys
            answer = f"cmd=put_result rc={0 if is_new else -1} msg=duplicate_key"
            self.keys.setdefault(key, request["value"])
        elif request["cmd"] == "get" and key in self.keys:
            answer = f"cmd=get_result rc=0 msg=success value={self.keys[key]}"
        assert answer, request
        return answer
