"""The starter's end of one actor: a `Connection` to node.py there.

    link --> stdin  --thread--> Shell.write          one call after the other, so in order
    link <-- stdout, stderr <--thread-- Shell.read   the next one when these were taken

Two threads wait for Ray, so that nothing else has to. They end with the actor, or with the link.
"""

from __future__ import annotations

import os
import threading
from typing import Any

_READ_BYTES = 64 << 10


class Channel:
    """See Connection.

    Args:
        actor: Ray's handle of a Shell that is running.
        ray: the ray module.
        module: the module that runs there.
    """

    def __init__(self, actor: Any, ray: Any, module: str) -> None:
        self._actor = actor
        self._ray = ray
        orders, self.stdin = os.pipe()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._lost = ""  # the reason why the actor cannot be reached
        self._started = self._call("orders", "start", module)
        self.threads = (
            threading.Thread(target=self._carry_orders, args=(orders,), daemon=True),
            threading.Thread(target=self._carry_output, args=(out, err), daemon=True),
        )
        for thread in self.threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the actor ended, rather than the program that it runs."""
        return bool(self._lost)

    def end(self) -> None:
        """See Connection."""
        self._ray.kill(self._actor)
        self._has_ended()

    def close(self) -> None:
        """See Connection."""
        with self._lock:
            self._is_closed = True
            os.close(self.ended)
        self._ray.kill(self._actor)

    def why(self, said: str) -> str:
        """See Connection."""
        if "No module named" in said:
            return "install Rallypoint there as well, for the Python that runs Ray"
        return self._lost or "the program there exited before it answered"

    def _carry_orders(self, orders: int) -> None:
        try:
            self._ray.get(self._started)
            while data := os.read(orders, _READ_BYTES):
                self._ray.get(self._call("orders", "write", data))
            self._ray.get(self._call("orders", "end_input"))
        except self._ray.exceptions.RayError:
            pass  # the other thread reports it
        finally:
            os.close(orders)

    def _carry_output(self, out: int, err: int) -> None:
        try:
            self._ray.get(self._started)
            while any(found := self._ray.get(self._call("output", "read"))):
                for fd, data in zip((out, err), found, strict=True):
                    _write(fd, data)
        except self._ray.exceptions.RayError as error:
            self._lost = first_line(error)
        except BrokenPipeError:
            pass  # the link is closed
        finally:
            os.close(out)
            os.close(err)
            self._has_ended()

    def _call(self, group: str, method: str, *arguments: object) -> Any:
        return getattr(self._actor, method).options(concurrency_group=group).remote(*arguments)

    def _has_ended(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.ended, 1)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def first_line(error: BaseException) -> str:
    """The first line of Ray's message, which may be a page long, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
