"""The job token, from --token-file or RALLYPOINT_TOKEN: what machines must know to take part."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.cli.options import Flag

VARIABLE = "RALLYPOINT_TOKEN"
TOKEN_FLAG = Flag(
    "--token-file",
    f"who connects must prove that it knows the token in FILE;\n{VARIABLE} says it too",
    "FILE",
)


def read_token(values: Mapping[str, str], environ: Mapping[str, str]) -> bytes | None:
    """The token; None: there is none.

    Raises:
        InvalidArgumentError: the file cannot be read, or is empty.
    """
    path = values.get(TOKEN_FLAG.name)
    if path is not None:
        from rallypoint.store.token import read_token as read_file

        return read_file(path)
    return os.fsencode(environ.get(VARIABLE, "")) or None
