"""An agent's way to etcd: a thread that carries out what its voter asks for, message by message.

    send(message) --> newest of each kind --> KeyValueVoter <--> EtcdClient --> take()

A message that waits is replaced by a newer one of its kind: candidates and coordinators repeat
themselves, and only the newest counts. The thread alone touches the voter and the client.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.rendezvous.consensus.messages import Message, Setup
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient
from rallypoint.rendezvous.keyvalue.register import KeyValueRegister
from rallypoint.rendezvous.keyvalue.voter import (
    Answer,
    Grant,
    KeepAlive,
    KeyValueVoter,
    Read,
    Request,
    Transact,
    is_same,
)
from rallypoint.rendezvous.lease_clock import lease_time

_CLOSING_S = 0.2


class KeyValueLink:
    """Etcd, as one agent's driver uses it. Its key among agents is rules.KEEPER.

    Args:
        endpoints: of etcd's members, all of which are tried.
        tls: for https; None: plain http.
    """

    register = KeyValueRegister  # of an agent with such a link

    def __init__(
        self, setup: Setup, endpoints: Sequence[Endpoint], tls: ssl.SSLContext | None = None
    ) -> None:
        self._voter = KeyValueVoter(setup)
        places = [(each.host, each.port) for each in endpoints]
        self._client = EtcdClient(places, timeout_s=setup.timeouts.read_s, tls=tls)
        self._awake = threading.Condition()  # guards what follows
        self._waiting: dict[type, Message] = {}
        self._at_work: Message | None = None
        self._lost: list[str] = []
        self._answers: list[Answer] = []
        self._is_closed = False
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="etcd", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For a selector: readable when there is something to `take`."""
        return self._bell.fileno()

    def send(self, message: Message) -> None:
        """To etcd: what a Participant sends to the key KEEPER, and what it calls endpoints for."""
        with self._awake:
            if not is_same(message, self._at_work):
                self._waiting[type(message)] = message
                self._awake.notify()

    def lost(self, key: str) -> None:
        """An agent has ended: what `Participant.closed` is told as well."""
        with self._awake:
            self._lost.append(key)

    def take(self) -> list[Answer]:
        """What has been answered, in etcd's name, without waiting."""
        try:
            while self._bell.recv(4096):
                pass
        except BlockingIOError:
            pass
        with self._awake:
            answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End; what still waits is lost."""
        with self._awake:
            self._is_closed = True
            self._awake.notify()
        # A request that hangs ends with the process; its conditions keep it from doing harm.
        self._thread.join(_CLOSING_S)
        self._bell.close()
        self._rope.close()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._awake:
                self._at_work = None
                while not self._waiting and not self._is_closed:
                    self._awake.wait()
                if self._is_closed:
                    break
                message = self._at_work = self._waiting.pop(next(iter(self._waiting)))
                lost, self._lost = self._lost, []
            for key in lost:
                self._voter.lost(key)
            self._work(message)
            self._hand_over(self._voter.take())
        self._client.close()

    def _work(self, message: Message) -> None:
        try:
            request = self._voter.ask(message, lease_time())
            while request is not None:
                request = self._voter.go_on(self._carry_out(request), lease_time())
        except Exception as error:  # etcd is away, or holds or answers what makes no sense
            self._voter.failed(str(error))

    def _carry_out(self, request: Request) -> object:
        client = self._client
        match request:
            case Read(prefix=prefix):
                return client.read(prefix)
            case Transact():
                return client.transact(
                    revisions=request.revisions,
                    puts=request.puts,
                    deletes=request.deletes,
                    lease=request.lease,
                    leases=request.leases,
                )
            case Grant(ttl_s=ttl_s):
                return client.grant(ttl_s)
            case KeepAlive(lease=lease):
                return client.keep_alive(lease)

    def _hand_over(self, answers: list[Answer]) -> None:
        if not answers:
            return
        with self._awake:
            self._answers += answers
        with contextlib.suppress(OSError):  # full, and so readable anyway; or closed
            self._rope.send(b"!")


def read_tls(configuration: Mapping[str, str]) -> ssl.SSLContext | None:
    """From --rdzv-conf, by torch's names: protocol=https, cacert, cert and key; None: plain http.

    Raises:
        InvalidArgumentError: another protocol, or files that are none.
    """
    # torch's two etcd backends have two names for each.
    others = {"ca_cert": "cacert", "ssl_cert": "cert", "ssl_cert_key": "key"}
    configuration = {others.get(name, name): text for name, text in configuration.items()}
    protocol = configuration.get("protocol", "http")
    files = [name for name in ("cacert", "cert", "key") if name in configuration]
    if protocol not in ("http", "https"):
        raise InvalidArgumentError(
            f"--rdzv-conf: protocol is {protocol!r}; give http or https, as etcd is reached."
        )
    if protocol == "http":
        if files:
            raise InvalidArgumentError(
                f"--rdzv-conf: {files[0]} is for https; give protocol=https as well."
            )
        return None
    if "key" in configuration and "cert" not in configuration:
        raise InvalidArgumentError("--rdzv-conf: key needs cert, the certificate that it is for.")
    try:
        context = ssl.create_default_context(cafile=configuration.get("cacert"))
        if "cert" in configuration:
            context.load_cert_chain(configuration["cert"], configuration.get("key"))
    except OSError as error:  # ssl's errors are such
        raise InvalidArgumentError(
            f"--rdzv-conf: {', '.join(files)}: {error.strerror or error}; give files in PEM form."
        ) from None
    return context
