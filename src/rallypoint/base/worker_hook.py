"""The worker's end of the control socket: reports the exception that ends a worker to the agent.

It also makes a signal write the stacks of all threads, so that the launcher can explain why a job
is stuck (launch/inspection/python_stacks.py).

`rallypoint_worker.pth` installs it at interpreter start; it calls `install` only in processes to
which a launcher gave a control socket, and RALLYPOINT_WORKER_HOOK=0 prevents that. Rules: it must
not slow the start noticeably (hence it imports only built-in modules), must never break a worker,
and must leave argv, `__main__`, the terminal and the output as they are. See
docs/decisions/011-worker-tracebacks.md.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

CONTROL_FD = "RALLYPOINT_CONTROL_FD"
# Where a worker keeps its flight record (flight_record.py): ``descriptor:offset``.
FLIGHT_RECORD = "RALLYPOINT_FLIGHT_RECORD"
FLIGHT_RECORD_BYTES = 4 << 20  # for each worker; only written pages take memory
FLIGHT_RECORD_NAME = "rallypoint-flight-record"
# The memory to which faulthandler writes; the number of the signal that asks for it follows.
STACKS_NAME = "rallypoint-stacks-"

stacks_signal = 0  # the signal that requests this process's stacks; 0: there is none
flight_record = ""  # this process's, once it has been removed from the environment
control: ControlSocket | None = None  # this process's, if it has one
# What follows when the agent tells this process a new place (template.py).
place_changed: Callable[[Mapping[str, str]], None] | None = None

# The file that is the launcher's stderr, as `identity_of` gives it.
LAUNCHERS_STDERR = "RALLYPOINT_LAUNCHERS_STDERR"
_WITHOUT_RANK = "environment variable RANK expected, but not set"
_MOST_OF_PLAIN = 4096  # characters
_S_IFMT, _S_IFSOCK = 0o170000, 0o140000
_UNUSUAL_SIGNAL = 13  # above SIGRTMIN: programs that use such signals take the first


class ControlSocket:
    """This process's end of the connection to the agent.

    A program may close its descriptor, and open another file under that number (`os.closerange`,
    python-daemon). So it is recognised before each use: nothing is written into a stranger's file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = identity_of(fd)

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is still the connection."""
        try:
            return identity_of(self.fd) == self._identity
        except OSError:
            return False

    def write(self, packet: bytes) -> bool:
        """Send one message; False if it cannot reach the agent."""
        try:
            return self.is_open and os.write(self.fd, packet) == len(packet)
        except OSError:
            return False


def is_without_rank(message: object) -> bool:
    """Whether it is the error of PyTorch's init_process_group in a worker on standby."""
    return isinstance(message, str) and _WITHOUT_RANK in message


def identity_of(fd: int) -> tuple[int, int]:
    """What distinguishes an open file from all others."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class _Reporter:
    """Sends this process's fatal exception, once."""

    def __init__(self, agent: ControlSocket) -> None:
        self.agent = agent
        self.pid = os.getpid()
        self.reported: BaseException | None = None
        self.next_hook = sys.excepthook
        self.exit = sys.exit
        self.exit_text = ""  # the last one that Python printed at an exit, or would have
        self._path = tuple(sys.path)  # without the script's directory
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._launchers_stderr = os.environ.pop(LAUNCHERS_STDERR, "")

    def excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        is_told = self.report(error, trace)
        is_of_others = any(base.__name__ == "PeerError" for base in kind.__mro__)
        is_spares = is_without_rank(error.args[0] if error.args else "")
        if is_told and (is_of_others or is_spares) and self._shares_stderr():
            return  # the launcher prints it there, once for all ranks that have it
        self.next_hook(kind, error, error.__traceback__)

    def _shares_stderr(self) -> bool:
        try:
            is_launchers = f"{identity_of(2)}" == self._launchers_stderr
        except OSError:
            return False
        return is_launchers and sys.stderr is sys.__stderr__

    def exit_with(self, status: object = None, /) -> None:
        """Python prints the text of a SystemExit only to stderr, so it is recorded here."""
        is_text = not isinstance(status, int | None | tuple)
        try:
            self.exit_text = str(status) if is_text and os.getpid() == self.pid else ""
        except Exception:
            self.exit_text = ""
        self.exit(status)  # type: ignore[arg-type]

    def watch_stderr(self) -> None:
        """See the text of `raise SystemExit(text)`: only then does C code write, for no frame."""
        stream, frame = sys.stderr, sys._getframe
        write_on = stream.write

        def write(text: str, /) -> int:
            if frame().f_back is None and text != "\n" and os.getpid() == self.pid:
                self.exit_text = text
            return write_on(text)

        stream.write = write  # type: ignore[method-assign]

    def at_exit(self) -> None:
        # The interpreter leaves the exception here even if the program has set its own excepthook.
        error = getattr(sys, "last_value", None)
        if error is None:
            error = _missing_program()
        if error is None and self.reported is None and self.exit_text:
            error = SystemExit(self.exit_text)  # if it was caught, the agent sees a different end
        if isinstance(error, BaseException):
            self.report(error, error.__traceback__)

    def report(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Tell the agent what ends this process; returns whether that will reach the user."""
        # A forked child has the same descriptor, but is not the worker.
        if os.getpid() != self.pid or error is self.reported:
            return False
        self.reported = error
        try:
            with _OwnModules(self._path):
                from rallypoint.base.fatal_error import tell

                return tell(error, trace, self.agent.write, self._error_file)
        except BaseException:  # too few descriptors or too little memory for imports
            return self.agent.write(_plain_packet(error))


class _OwnModules:
    """While it is entered, modules of Python's library are Python's own.

    A json.py or token.py beside the script would be imported instead, or has been.
    """

    def __init__(self, path: tuple[str, ...]) -> None:
        self._path = list(path)
        self._library = os.__file__.rpartition("/")[0]
        self._hidden: dict[str, ModuleType] = {}

    def __enter__(self) -> None:
        for name in sys.stdlib_module_names & sys.modules.keys():
            file = getattr(sys.modules[name], "__file__", None)
            if file and (not file.startswith(self._library) or "-packages/" in file):
                self._hidden[name] = sys.modules.pop(name)
        self._path, sys.path = sys.path, self._path

    def __exit__(self, *_: object) -> None:
        sys.path = self._path
        sys.modules.update(self._hidden)


def _plain_packet(error: BaseException) -> bytes:
    """A report without a traceback, which needs no further files."""
    import time

    try:
        message = str(error)
    except BaseException:
        message = ""
    told = "".join(_as_json(each) for each in message[:_MOST_OF_PLAIN])
    kind, module = type(error).__qualname__, type(error).__module__
    if module not in ("builtins", "__main__", None):
        kind = f"{module}.{kind}"
    head = f'{{"v": 1, "kind": "error", "type": "{kind}", "time": {time.time()}, "traceback": ""'
    return f'{head}, "message": "{told}"}}'.encode("ascii", "replace")


def _as_json(character: str) -> str:
    is_plain = character.isascii() and character.isprintable() and character not in '"\\'
    return character if is_plain else f"\\u{min(ord(character), 0xFFFD):04x}"


def _missing_program() -> BaseException | None:
    """What kept Python from running the script or module at all; Python prints it only to
    stderr.
    """
    name = sys.argv[0] if sys.argv else ""
    loader = getattr(sys.modules.get("__main__"), "__loader__", None)
    # A program that was found has its own loader; its __file__ is gone again by now.
    if name in ("", "-", "-c") or getattr(loader, "__name__", "") != "BuiltinImporter":
        return None
    if name == "-m":
        words = sys.orig_argv
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else "?"
        return ModuleNotFoundError(f"No module named {module!r} to run with -m")
    return FileNotFoundError(f"cannot run {name!r}")


def install() -> None:
    """Take the control socket out of the environment, greet the agent, and watch for the end."""
    global control  # noqa: PLW0603 - the engine reports long waits there
    try:
        fd = int(os.environ.pop(CONTROL_FD))
        if os.fstat(fd).st_mode & _S_IFMT != _S_IFSOCK:
            return  # a shell in between has opened another file there
        os.set_inheritable(fd, False)
        _keep_flight_record()
        os.set_blocking(fd, False)  # a stopped agent must not stop us
        # Formatted by hand: importing json here would cost every worker some milliseconds.
        os.write(fd, b'{"v": 1, "kind": "hello", "pid": %d}' % os.getpid())
        control = ControlSocket(fd)
        reporter = _Reporter(control)
        sys.excepthook = reporter.excepthook
        sys.exit = _as_sys_exit(reporter.exit_with)  # type: ignore[assignment]
        reporter.watch_stderr()
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
    paths = (f"{package}/_stacks{suffix}" for suffix in _imp.extension_suffixes())
    path = next(path for path in paths if os.access(path, os.R_OK))  # a wheel's for 3.12: abi3
    stacks = _imp.create_dynamic(ModuleSpec("rallypoint._stacks", None, origin=path))
    memory = _memory(f"{STACKS_NAME}{number}")
    if not stacks.answer(number, memory):
        import faulthandler

        faulthandler.register(number, file=memory, all_threads=True)
        stacks.answer(number, memory)
    stacks_signal = number
