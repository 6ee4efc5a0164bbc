"""Examines one path and prints the result as JSON. A separate program, because it may hang; it says
first that it begins, since a busy machine may take long to start it.

    python path_child.py PATH [script]

For a directory, it lists the directory and writes and removes a file there; a file is opened for
reading.
"""

import errno
import hashlib
import json
import os
import stat
import sys
import tempfile

_MOST_BYTES = 64 << 20


def look(path: str, *, is_script: bool) -> dict[str, str]:
    """The name of the state, the system's error text, and the digest of a script."""
    found = {"state": "GOOD", "detail": "", "digest": ""}
    step = "MISSING"
    try:
        mode = os.stat(path).st_mode
        step = "UNREADABLE"
        if stat.S_ISDIR(mode):
            os.listdir(path)
            step = "READ_ONLY"
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"x")
        else:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES if is_script else 1)
            found["digest"] = hashlib.sha256(data).hexdigest() if is_script else ""
    except OSError as error:
        is_absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        found["state"] = step if step != "MISSING" or is_absent else "UNREADABLE"
        found["detail"] = error.strerror or str(error)
    return found


if __name__ == "__main__":
    print("looking", flush=True)
    print(json.dumps(look(sys.argv[1], is_script=sys.argv[2:] == ["script"])))
