"""A name server for test hosts, which is to them what CoreDNS is to pods.

    python name_server.py ADDRESS NAMES.json NEGATIVE_S

NAMES.json: name -> [address, time from which on it is known]. Who asks before that hears, as from
a cache, for NEGATIVE_S more seconds that there is no such name.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from pathlib import Path

_HEAD = struct.Struct("!6H")  # id, flags, and how many questions, answers, authorities, extras
_NO_NAME, _A, _IN = 3, 1, 1


class NameServer:
    """Answers one question after the other."""

    def __init__(self, names: Path, negative_s: float) -> None:
        self._names = names
        self._negative_s = negative_s
        self._unknown_until: dict[str, float] = {}

    def answer(self, query: bytes) -> bytes:
        """What to say to it."""
        number, *_ = _HEAD.unpack_from(query)
        labels, at = [], _HEAD.size
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii"))
            at += 1 + query[at]
        (kind,) = struct.unpack_from("!H", query, at + 1)
        question = query[_HEAD.size : at + 5]
        address = self._address_of(".".join(labels).lower())
        answers = b""
        if address and kind == _A:  # IPv4; the name is the one at offset 12
            answers = struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4) + socket.inet_aton(address)
        flags = 0x8580 | (0 if address else _NO_NAME)
        return _HEAD.pack(number, flags, 1, len(answers) > 0, 0, 0) + question + answers

    def _address_of(self, name: str) -> str:
        """Empty: there is no such name."""
        now = time.time()
        if now < self._unknown_until.get(name, 0.0):
            return ""
        address, known_from = json.loads(self._names.read_text()).get(name, ("", 0.0))
        if not address or now < known_from:
            self._unknown_until[name] = now + self._negative_s
            return ""
        return str(address)


def main() -> None:
    address, names, negative_s = sys.argv[1:]
    server = NameServer(Path(names), float(negative_s))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 53))
        print("ready", flush=True)
        while True:
            query, whose = sock.recvfrom(512)
            sock.sendto(server.answer(query), whose)


if __name__ == "__main__":
    main()
