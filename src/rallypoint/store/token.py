"""The challenge by which a client and a server with a job token prove that both know it.

    client                                   server
    GREETING, 32 random bytes         ->
                                      <-     32 random bytes
    HMAC-SHA256("client", both)       ->
                                      <-     HMAC-SHA256("server", both), then the usual wire

The token itself is never sent. A recorded exchange cannot be replayed, because both sides add fresh
random bytes. The challenge authenticates the start of a connection; the data that follows is
neither encrypted nor signed. The server's half is native/store/gate.cc.
"""

from __future__ import annotations

import hmac

from rallypoint.base.errors import InvalidArgumentError

GREETING = b"RLYPT-1\n"
NONCE = 32
PROOF = 32


def client_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what shows the server that we know the token."""
    return hmac.digest(token, b"client" + client_nonce + server_nonce, "sha256")


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what shows the client that the server knows the token."""
    return hmac.digest(token, b"server" + client_nonce + server_nonce, "sha256")


def is_server_proof(proof: bytes, token: bytes, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Tell whether the server knows the token."""
    return hmac.compare_digest(proof, server_proof(token, client_nonce, server_nonce))


def read_token(path: str) -> bytes:
    """Return the token in a file, without the line's end."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - launchers of several nodes pay for pathlib
            token = file.read().strip()
    except OSError as error:
        raise InvalidArgumentError(
            f"the token file {path} cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error
    if not token:
        raise InvalidArgumentError(
            f"the token file {path} is empty; write a long random string into it"
        )
    return token
