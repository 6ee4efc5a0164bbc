"""The process that imports modules once, and forks a node's workers: `run --preload`.

The guardian starts it (native/guardian/template.h draws who talks to whom), with these descriptors:
stdin, stdout, stderr, a control socket of the agent, and a socket of the guardian. It imports,
examines itself, and waits. `worker` returns only in a forked worker, ready to run the script as a
worker that was started by exec: what cannot be made equal executes Python instead. If it must not
fork, it tells the agent why, and ends. docs/decisions/120-template-process.md

Rule: before the preloaded modules it imports only built-in ones, and it does no work with those
that it has imported: a pool of threads, once begun, would be missing in the workers.
"""

from __future__ import annotations

import os
import sys

from rallypoint.base import worker_hook
from rallypoint.base.fork_safety import Examination, WatchedEnviron

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Any, Never

_AGENT, _GUARDIAN = 3, 4  # descriptors
_WORKER_FDS = 5
_INT = 4  # bytes, in the guardian's messages (native/guardian/protocol.h, template.h)
_FORK, _AFFINITY = 1, 4  # stages of a start
_MOST_REQUEST = 8 << 20
_MOST_OUTPUT = 1 << 20
_SET_DEATH_SIGNAL, _KILL = 1, 9
# What is imported later in any case, if it is installed: with PyTorch, what groups and
# DistributedDataParallel need. Groups of one host need no mesh, and choose direct algorithms.
_OF_GROUPS = ("rallypoint.schedule.algorithms.direct", "rallypoint.process_group.formation.mesh")
_IMPLIED = {
    "rallypoint": ("rallypoint.elastic", "rallypoint.process_group.calls.collectives", *_OF_GROUPS),
    "torch": (
        *("numpy", "torch.nn.parallel", "torch.distributed", "rallypoint"),
        *("rallypoint.pytorch.backend", "rallypoint.pytorch.rallypoint_group", *_OF_GROUPS),
        "rallypoint.pytorch.other_backends",
    ),
}
# The program of a template, as an argument of Python's -c.
PROGRAM = """\
from rallypoint.base import template
run, arguments = template.worker()
failure = None
try:
    run(*arguments)
except SystemExit:
    raise
except BaseException as error:
    failure = error
if failure is not None:  # not inside "except": Python calls its hook without a context, too
    template.fail(failure)
"""

in_worker: list[Callable[[], None]] = []  # what imports leave to be done in each worker
is_template = False


class _UnsafeError(Exception):
    """This process must not fork."""

    def __init__(self, module: str, because: str) -> None:
        super().__init__(module, because)
        self.module, self.because = module, because


class _Request:
    """A worker that is to be forked."""

    def __init__(self, message: bytes, descriptors: Sequence[int]) -> None:
        head = [int.from_bytes(message[at : at + _INT], sys.byteorder) for at in range(0, 20, _INT)]
        self.has_session, _, _, count, _ = head
        _, cpus, *strings = message[20:].split(b"\0")[:-1]
        self.cpus = [int(each) for each in cpus.split(b",") if each]
        self.argv = [os.fsdecode(each) for each in strings[:count]]
        self.environ = dict(each.split(b"=", 1) for each in strings[count:])
        self.descriptors, self.go = descriptors[:_WORKER_FDS], descriptors[_WORKER_FDS]


def worker() -> tuple[Callable[..., object], tuple[object, ...]]:
    """Be the template, and return in each worker: what to call there, and with what.

    The arguments of the process: the modules; the names of variables that differ by rank; what the
    workers have as sys.path[0]; all else only makes room for their command lines.
    """
    global is_template  # noqa: PLW0603 - a process is one
    is_template = True
    modules, watched, path = (sys.argv[1:4] + [""] * 3)[:3]
    del sys.argv[1:]  # of no concern to modules that look at it
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # by which the agent finds this process
    before = dict(os.environ)
    _catch_output()
    _set_path(path, replaces="")
    try:
        _preload(modules.split(","), watched.split(","), path)
    except _UnsafeError as found:
        _tell(found.module, found.because)
        os._exit(0)
    _show_command(f"rallypoint-template {modules}")
    request, output = _serve(_changes(before))
    is_template = False
    try:
        return _become(request, output, path)
    except BaseException:
        for fd in range(_WORKER_FDS):
            os.set_inheritable(fd, True)
        os.execve(request.argv[0], request.argv, request.environ)


# Imports.


def _catch_output() -> None:
    """What the imports print goes to the first worker: one that imported would have printed it."""
    try:
        memory = os.memfd_create("rallypoint-template")
    except (OSError, AttributeError):
        return  # it is lost
    os.dup2(memory, 1)
    os.dup2(memory, 2)
    os.close(memory)


def _set_path(path: str, *, replaces: str) -> None:
    """Let modules be found where the script would find them first."""
    if sys.flags.safe_path:
        return
    if replaces in sys.path:
        sys.path[sys.path.index(replaces)] = path
    else:
        sys.path.insert(0, path)


def _preload(modules: Sequence[str], watched: Sequence[str], path: str) -> None:
    examination = Examination()
    WatchedEnviron.begin(frozenset(watched))
    for module in modules:
        _say(module)
        try:
            __import__(module)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _UnsafeError(module, f"cannot be imported ({text})") from None
        for implied in _IMPLIED.get(module, ()):
            try:
                __import__(implied)
            except Exception:  # whoever needs it will see
                continue
        finding = examination.finding() or _own_module(path)
        if finding:
            raise _UnsafeError(module, finding)
    WatchedEnviron.end()
    import ctypes  # noqa: F401 - for the workers: the dynamic linker's work is done once
    import gc

    gc.collect()
    gc.freeze()  # or the first full collection in a worker would copy all pages


def _own_module(path: str) -> str:
    """A module beside the script may be edited before the next round begins."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if "." not in name and file in (f"{path}/{name}.py", f"{path}/{name}/__init__.py"):
            return f"imports {name} from the script's directory, where it may change"
    return ""


def _changes(before: dict[str, str]) -> dict[bytes, bytes | None]:
    """What the imports have changed in the environment; None: removed."""
    names = {*before, *os.environ}
    changed = [name for name in names if before.get(name) != os.environ.get(name)]
    return {os.fsencode(name): os.environb.get(os.fsencode(name)) for name in changed}


def _say(module: str, *, is_ready: bool = False) -> None:
    # Formatted by hand: json is not to be imported before the script's own imports.
    text = f'{{"v": 1, "kind": "preload", "module": "{module}", "because": "", "is_ready": '
    _send((text + ("true}" if is_ready else "false}")).encode("ascii", "replace"))


def _tell(module: str, because: str) -> None:
    from rallypoint.base.control_message import PreloadReport, encode

    _send(encode(PreloadReport(module, because)))


def _send(packet: bytes) -> None:
    try:
        os.write(_AGENT, packet)
    except OSError:  # the agent ends
        return


# Forks.


def _serve(changes: dict[bytes, bytes | None]) -> tuple[_Request, bytes]:
    """Fork workers until the guardian ends; returns in each of them."""
    import _socket

    size = os.fstat(2).st_size
    output = os.pread(2, min(size, _MOST_OUTPUT), 0) if size else b""
    link = _socket.socket(fileno=_GUARDIAN)
    guardian = os.getppid()
    _say("", is_ready=True)
    link.send(_answer(0))
    while True:
        message, rights, flags, _ = link.recvmsg(
            _MOST_REQUEST, _socket.CMSG_SPACE((_WORKER_FDS + 1) * _INT)
        )
        if not message:
            os._exit(0)
        packed = b"".join(data for _, _, data in rights)
        fds = [
            int.from_bytes(packed[at : at + _INT], sys.byteorder)
            for at in range(0, len(packed), _INT)
        ]
        is_whole = len(fds) > _WORKER_FDS and not flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
        answer = b""
        if is_whole:
            request = _Request(message, fds)
            for name, value in changes.items():
                if value is None:
                    request.environ.pop(name, None)
                else:
                    request.environ[name] = value
            forked = _fork(request, guardian)
            if forked is None:
                link.detach()  # its number is another file's now
                return request, output
            answer = forked
            if int.from_bytes(answer[:_INT], sys.byteorder):
                output = b""  # that worker shows it
        for fd in fds:
            os.close(fd)
        link.send(answer or _answer(0))


def _answer(pid: int, stage: int = 0, error: int = 0) -> bytes:
    return b"".join(each.to_bytes(_INT, sys.byteorder) for each in (pid, stage, error))


def _fork(request: _Request, guardian: int) -> bytes | None:
    """Fork a worker, and return the answer for the guardian; None in that worker.

    The process in between ends at once: so the guardian, and not this process, is its parent.
    """
    try:
        reader, writer = os.pipe()
    except OSError:
        return b""
    try:
        middle = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return b""
    if middle == 0:
        os.close(reader)
        if _fork_in_middle(request, writer):
            os.close(writer)
            _wait_for_go(request, guardian)
            return None
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 3 * _INT)
    os.close(reader)
    os.waitpid(middle, 0)
    return answer


def _fork_in_middle(request: _Request, writer: int) -> bool:
    """Whether this is the worker."""
    stage = _FORK
    try:
        for number, fd in enumerate(request.descriptors):
            os.dup2(fd, number)
            os.close(fd)
        if request.cpus:
            stage = _AFFINITY
            os.sched_setaffinity(0, request.cpus)
            stage = _FORK
        pid = os.fork()
    except OSError as error:
        os.write(writer, _answer(0, stage, error.errno or 0))
        return False
    except BaseException:  # of a fork handler
        return False
    if pid:
        os.write(writer, _answer(pid))
    return not pid


def _wait_for_go(request: _Request, guardian: int) -> None:
    """Until the guardian knows this process, which is its child then."""
    if request.has_session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    if os.read(request.go, 1) != b"\1":
        os._exit(127)
    os.close(request.go)
    import ctypes

    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, _KILL)
    if os.getppid() != guardian:  # it ended before it could tell this process
        os._exit(127)


# In a worker.


def _become(
    request: _Request, output: bytes, path: str
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Make this process what it would be if Python had been started with that command line."""
    os.environb.clear()
    os.environb.update(request.environ)
    _open_streams()
    sys.orig_argv = list(request.argv)
    program = request.argv[2:]  # after the interpreter and -u
    main = type(sys)("__main__")
    main.__dict__.update(
        __builtins__=sys.modules["builtins"],
        __loader__=sys.modules["_frozen_importlib"].BuiltinImporter,
    )
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    run = _module(program[1]) if program[0] == "-m" else _script(program[0], main)
    sys.modules["__main__"] = main
    # The same list: a module may have imported it by name.
    sys.argv[:] = ["-m", *program[2:]] if program[0] == "-m" else program
    _seed()
    is_of_script = not sys.flags.safe_path and path in sys.path
    if is_of_script:
        sys.path.remove(path)
    if worker_hook.CONTROL_FD in os.environ and os.environ.get("RALLYPOINT_WORKER_HOOK") != "0":
        worker_hook.install()
        worker_hook.place_changed = _show_rank
    for prepare in in_worker:
        prepare()
    if is_of_script:
        sys.path.insert(0, path)
    _show_rank(os.environ)
    while output:
        output = output[os.write(2, output) :]
    return run


def _open_streams() -> None:
    """Streams of its own descriptors, as `python -u` has them."""
    import io

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old: Any = getattr(sys, f"__{name}__")
        if old is None:
            continue
        mode = "w" if number else "r"
        file: Any = open(number, f"{mode}b", buffering=0 if number else -1, closefd=False)  # noqa: SIM115
        new: Any = io.TextIOWrapper(
            file,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            write_through=True,
        )
        (file if number else file.raw).name = f"<{name}>"
        new.mode = mode
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _script(path: str, main: Any) -> tuple[Callable[..., object], tuple[object, ...]]:  # noqa: ANN401
    """What runs a script; an error is Python's own to report."""
    file = path if path.startswith("/") else f"{os.getcwd()}/{path}"
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", file)
    main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    code = compile(loader.get_data(file), file, "exec", dont_inherit=True)
    return exec, (code, main.__dict__)


def _module(name: str) -> tuple[Callable[..., object], tuple[object, ...]]:
    import runpy

    return runpy._run_module_as_main, (name,)  # type: ignore[attr-defined]


def _seed() -> None:
    """The global generators that do not renew themselves in a forked child."""
    modules: dict[str, Any] = {**sys.modules}
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if hasattr(modules.get("torch"), "default_generator"):
        modules["torch"].default_generator.seed()
    if "multiprocessing.process" in modules:
        process = modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)


def _show_rank(environ: Any) -> None:  # noqa: ANN401 - a mapping; os.environ is no dict
    """In /proc/PID/cmdline, where all workers would look like the template."""
    rank = environ.get("RANK")
    _show_command(" ".join([*sys.orig_argv, "[standby]" if rank is None else f"[rank {rank}]"]))


def _show_command(text: str) -> None:
    """Overwrite the memory of the arguments; the last byte says that it holds one text."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
        room = end - begin - 2
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write(os.fsencode(text)[:room].ljust(room + 1, b"\0") + b" ")
    except (OSError, ValueError, IndexError):  # a sandbox without these files
        return


def fail(error: BaseException) -> Never:
    """End as Python does on an exception that nobody has caught, without this program's frames."""
    trace: TracebackType | None = error.__traceback__
    error = error.with_traceback(None if trace is None else trace.tb_next)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    vars(sys)["last_exc"] = error  # from Python 3.12 on
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as another:
        sys.stderr.write("Error in sys.excepthook:\n")
        inner = another.__traceback__
        another = another.with_traceback(None if inner is None else inner.tb_next)
        another.__context__ = None
        sys.__excepthook__(type(another), another, another.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = _silent  # Python ends this process by SIGINT
        raise error
    raise SystemExit(1)


def _silent(*_: object) -> None:
    """Nothing: it has been told."""
