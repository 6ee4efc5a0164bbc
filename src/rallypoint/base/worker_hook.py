"""The worker's end of the control socket: reports the exception that ends a worker to the agent.

It also makes a signal write the stacks of all threads, so that the launcher can explain why a job
is stuck (launch/inspection/stacks.py).

`rallypoint_worker.pth` installs it at interpreter start; it calls `install` only in processes to
which a launcher gave a control socket. Rules: it must not slow the start noticeably (hence it
imports only built-in modules), must never break a worker, and must leave argv, `__main__`, the
terminal and the output as they are. See docs/decisions/011-worker-tracebacks.md.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL_FD = "RALLYPOINT_CONTROL_FD"
# Where a worker keeps its flight record (flight_record.py): ``descriptor:offset``.
FLIGHT_RECORD = "RALLYPOINT_FLIGHT_RECORD"
FLIGHT_RECORD_BYTES = 4 << 20  # for each worker; only written pages take memory
FLIGHT_RECORD_NAME = "rallypoint-flight-record"
# The memory to which faulthandler writes; the number of the signal that asks for it follows.
STACKS_NAME = "rallypoint-stacks-"

stacks_signal = 0  # the signal that requests this process's stacks; 0: there is none
flight_record = ""  # this process's, once it has been removed from the environment
control_fd = -1  # the same

# The files that import the function's module in a worker that runs a function, not a script.
_LOADERS = ("/rallypoint/launch/api/call.py", "/multiprocessing/spawn.py")
_S_IFMT, _S_IFSOCK = 0o170000, 0o140000
_UNUSUAL_SIGNAL = 13  # above SIGRTMIN: programs that use such signals take the first


class _Reporter:
    """Sends this process's fatal exception, once."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.spare = os.dup(fd)
        self.pid = os.getpid()
        self.reported: BaseException | None = None
        self.next_hook = sys.excepthook
        self.exit = sys.exit
        self.exit_text = ""  # the last text that sys.exit was given to print

    def excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.report(error, trace)
        self.next_hook(kind, error, trace)

    def exit_with(self, status: object = None, /) -> None:
        """Python tells nobody of a SystemExit: only here can its text be seen."""
        is_text = not isinstance(status, int | None | tuple)
        try:
            self.exit_text = str(status) if is_text and os.getpid() == self.pid else ""
        except Exception:
            self.exit_text = ""
        self.exit(status)  # type: ignore[arg-type]

    def at_exit(self) -> None:
        # The interpreter leaves the exception here even if the program has set its own excepthook.
        error = getattr(sys, "last_value", None)
        if error is None:
            error = _missing_program()
        if error is None and self.reported is None and self.exit_text:
            error = SystemExit(self.exit_text)  # if it was caught, the agent sees a different end
        if isinstance(error, BaseException):
            self.report(error, error.__traceback__)

    def report(self, error: BaseException, trace: TracebackType | None) -> None:
        try:
            # A forked child has the same descriptor, but is not the worker.
            if os.getpid() != self.pid or error is self.reported:
                return
            self.reported = error
            try:
                packet = _packet(error, trace)
            except OSError:  # no descriptor is left to import anything
                if os.fstat(self.spare).st_ino == os.fstat(self.fd).st_ino:
                    os.close(self.spare)
                packet = _packet(error, trace)
            os.write(self.fd, packet)
        except Exception:  # a report must never replace the error that it reports
            return


def _packet(error: BaseException, trace: TracebackType | None) -> bytes:
    import time
    import traceback

    from rallypoint.base import error_details
    from rallypoint.base.control_message import WorkerError, encode

    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    message = ""
    try:
        message = str(error)
        message = error_details.completed(message, error, trace)
    except Exception:
        message = message or "<message cannot be printed>"
    is_exit = kind is SystemExit  # a deliberate exit: its place says nothing
    text = "" if is_exit else "".join(traceback.format_exception(kind, error, trace))
    startup = _is_startup(error, trace)
    return encode(WorkerError(name, message, text, time.time(), _is_echo(error), startup))


def _missing_program() -> BaseException | None:
    """What kept Python from running the script or module at all: it tells nobody but stderr."""
    name = sys.argv[0] if sys.argv else ""
    loader = getattr(sys.modules.get("__main__"), "__loader__", None)
    # A program that was found has a loader of its own; its __file__ is gone again by now.
    if name in ("", "-", "-c") or getattr(loader, "__name__", "") != "BuiltinImporter":
        return None
    if name == "-m":
        words = sys.orig_argv
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else "?"
        return ModuleNotFoundError(f"No module named {module!r} to run with -m")
    return FileNotFoundError(f"cannot run {name!r}")


def _is_startup(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the program failed while it was still being read and imported."""
    if isinstance(error, FileNotFoundError) and trace is None:
        return True
    if type(error).__qualname__ == "UnreadableCallError":
        return True
    if not isinstance(error, (ImportError, SyntaxError)):
        return False
    while trace is not None:
        code = trace.tb_frame.f_code
        # Frames of module bodies, and of what imports or runs them; any other frame means that a
        # function was running.
        name = code.co_filename
        runs_modules = name == "<frozen runpy>" or "importlib" in name or name.endswith(_LOADERS)
        if code.co_name != "<module>" and not runs_modules:
            return False
        trace = trace.tb_next
    return True


def _is_echo(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, reports the loss of a peer."""
    for _ in range(64):  # chains can be cyclic
        if error is None:
            return False
        if any(base.__name__ == "PeerLostError" for base in type(error).__mro__):
            return True
        # Messages of gloo in PyTorch's own process groups.
        text = str(error)
        if isinstance(error, RuntimeError) and (
            "Connection closed by peer" in text or "Connection reset by peer" in text
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def install() -> None:
    """Take the control socket out of the environment, greet the agent, and watch for the end."""
    global control_fd  # noqa: PLW0603 - the engine tells of long waits there
    try:
        fd = int(os.environ.pop(CONTROL_FD))
        if os.fstat(fd).st_mode & _S_IFMT != _S_IFSOCK:
            return  # a shell in between has opened another file there
        os.set_inheritable(fd, False)
        _keep_flight_record()
        os.set_blocking(fd, False)  # a stopped agent must not stop us
        # Formatted by hand: importing json here would cost every worker some milliseconds.
        os.write(fd, b'{"v": 1, "kind": "hello", "pid": %d}' % os.getpid())
        control_fd = fd
        reporter = _Reporter(fd)
        sys.excepthook = reporter.excepthook
        sys.exit = _as_sys_exit(reporter.exit_with)  # type: ignore[assignment]
        atexit.register(reporter.at_exit)
        _offer_stacks()
    except Exception:  # never break a worker's start
        return


def _as_sys_exit(exit_with: Callable[[object], None]) -> Callable[..., None]:
    def exit(status: object = None, /) -> None:  # noqa: A001 - it is that one
        exit_with(status)

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", sys.exit.__doc__  # to pickle
    return exit


def _keep_flight_record() -> None:
    global flight_record  # noqa: PLW0603 - the engine asks for it, if it is ever loaded
    flight_record = os.environ.pop(FLIGHT_RECORD, "")
    try:
        os.set_inheritable(int(flight_record.partition(":")[0]), False)
    except (OSError, ValueError):  # there is none, or a program in between has closed it
        flight_record = ""


def _memory(name: str) -> int:
    try:
        return os.memfd_create(name)
    except (OSError, AttributeError) as error:
        from rallypoint.base.memory_file import unnamed_file

        return unnamed_file(name, 0, error)


def _offer_stacks() -> None:
    """Have a signal write the stacks of all threads into memory that is known by its name.

    That works in C, also while a thread holds the GIL or the main one is blocked.
    """
    global stacks_signal  # noqa: PLW0603 - a thread of ours takes it, if there is one
    import _imp
    import _signal  # type: ignore[import-not-found]  # signal would take longer
    from _frozen_importlib import ModuleSpec

    for number in range(_signal.SIGRTMIN + _UNUSUAL_SIGNAL, _signal.SIGRTMAX):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            break
    else:
        return
    # Loaded without the path finders, which take twice as long as the rest.
    package = __file__.rpartition("/")[0].rpartition("/")[0]
    path = f"{package}/_stacks{_imp.extension_suffixes()[0]}"
    stacks = _imp.create_dynamic(ModuleSpec("rallypoint._stacks", None, origin=path))
    memory = _memory(f"{STACKS_NAME}{number}")
    if not stacks.answer(number, memory):
        import faulthandler

        faulthandler.register(number, file=memory, all_threads=True)
        stacks.answer(number, memory)
    stacks_signal = number
