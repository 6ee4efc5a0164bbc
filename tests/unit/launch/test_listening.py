"""Where a launcher cannot listen, and who has the place."""

from __future__ import annotations

import os
import socket

import pytest

from rallypoint.base.errors import HostError
from rallypoint.launch.rounds.store_host import listen


def test_an_address_of_another_machine() -> None:
    """One that is reserved for documents: RFC 5737."""
    text = r"cannot listen on 203\.0\.113\.7, port 0: .*; give another address or port"
    with pytest.raises(HostError, match=text):
        listen("203.0.113.7", 0)


def test_a_port_that_is_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        text = rf"port {port}: it is in use by process {os.getpid()} .*; end that process"
        with pytest.raises(HostError, match=text):
            listen("127.0.0.1", port)
