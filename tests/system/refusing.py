"""Runs a command for which the kernel refuses some system calls, as old kernels and sandboxes do.

    python refusing.py CALLS ERRNO COMMAND...

CALLS are names with commas between them, each with a condition if only some of its uses are
refused: `fcntl[1]=1033` is fcntl with the command 1033, by the low half of the argument. ERRNO is a
name: EPERM is what Docker's profile answers, ENOSYS what a kernel without the call does. It
installs a seccomp filter, which the command and all of its children keep. Needs no privilege.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import sys

# Name -> number on x86-64, on aarch64 (-1: there is none). From 424 on they are equal everywhere.
_NUMBERS = {
    "clone3": (435, 435),
    "close_range": (436, 436),
    "epoll_create1": (291, 20),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "fcntl": (72, 25),
    "futex_waitv": (449, 449),
    "get_mempolicy": (239, 236),
    "get_robust_list": (274, 100),
    "getrandom": (318, 278),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "landlock_create_ruleset": (444, 444),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mlock": (149, 228),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prctl": (157, 167),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "rseq": (334, 293),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "set_mempolicy": (238, 237),
    "set_robust_list": (273, 99),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "signalfd4": (289, 74),
    "socket": (41, 198),
    "statx": (332, 291),
    "timerfd_create": (283, 85),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_..., column

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SECCOMP_NUMBER, _SECCOMP_ARCHITECTURE, _SECCOMP_ARGUMENTS = 0, 4, 16
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


def program(calls: str, refusal: str, machine: str) -> bytes:
    """The filter as the kernel reads it: a BPF instruction in each 8 bytes.

    Raises:
        ValueError: a call or an error is unknown.
    """
    architecture, column = _ARCHITECTURES[machine]
    answer = _ERRNO | getattr(errno, refusal)
    code = [(_LOAD, 0, 0, _SECCOMP_ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, architecture)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    for call in calls.split(","):
        match = re.fullmatch(r"(\w+)(?:\[(\d)\]=(\d+))?", call)
        if match is None or match[1] not in _NUMBERS:
            raise ValueError(f"unknown system call {call!r}")
        number = _NUMBERS[match[1]][column]
        code += [(_LOAD, 0, 0, _SECCOMP_NUMBER)]
        if match[2] is None:
            code += [(_JUMP_IF_EQUAL, 0, 1, number)]
        else:
            argument = _SECCOMP_ARGUMENTS + 8 * int(match[2])
            code += [(_JUMP_IF_EQUAL, 0, 3, number), (_LOAD, 0, 0, argument)]
            code += [(_JUMP_IF_EQUAL, 0, 1, int(match[3]))]
        code += [(_RETURN, 0, 0, answer)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def refuse(calls: str, refusal: str) -> None:
    """From now on, this process and its children are refused the calls with that error.

    Raises:
        OSError: the kernel takes no filters.
        ValueError: a call or an error is unknown.
    """
    code = program(calls, refusal, os.uname().machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, argument, extra in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(header)),
    ):
        if libc.prctl(option, argument, extra, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl {option}: {os.strerror(number)}")


if __name__ == "__main__":
    refuse(sys.argv[1], sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
