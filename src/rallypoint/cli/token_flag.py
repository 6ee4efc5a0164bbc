"""The job token, which machines must know to take part, from --token-file or RALLYPOINT_TOKEN."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.cli.options import Flag

VARIABLE = "RALLYPOINT_TOKEN"
TOKEN_FLAG = Flag(
    "--token-file",
    f"the token that all machines must know to connect, in FILE;\n{VARIABLE} sets it too",
    "FILE",
)


def read_token(values: Mapping[str, str], environ: Mapping[str, str]) -> bytes | None:
    """The token, or None if there is none.

    Raises:
        InvalidArgumentError: the file cannot be read, or is empty.
    """
    path = values.get(TOKEN_FLAG.name)
    if path is not None:
        from rallypoint.store.token import read_token as read_file

        return read_file(path)
    return os.fsencode(environ.get(VARIABLE, "")) or None
