"""Which system calls are refused where, and what a job does then.

Sources: the kernel's versions from `Documentation/` and syscalls(2); Docker's default profile
(moby/moby, profiles/seccomp/default.json at 00f3d18; clone3: moby/moby#42680, #42681); systemd's
@system-service (systemd, src/shared/seccomp-util.c at 000c052) and RestrictAddressFamilies, which
answers EAFNOSUPPORT; gVisor (pkg/sentry/syscalls/linux/linux64.go at 02c06d4, sys_mmap.go).
"""

from __future__ import annotations

from collections.abc import Mapping

# What a job of two ranks calls, or will, with the Linux that brought it or who refuses it.
CALLS: Mapping[str, str] = {
    # Newer than 4.18: a kernel without them answers ENOSYS, an old profile EPERM.
    "pidfd_send_signal": "Linux 5.1",
    "io_uring_setup": "Linux 5.1; Docker from 25 on",
    "pidfd_open": "Linux 5.3; older profiles of Docker",
    "clone3": "Linux 5.3; Docker: EPERM before 20.10.10, then ENOSYS without CAP_SYS_ADMIN",
    "openat2": "Linux 5.6",
    "pidfd_getfd": "Linux 5.6; Docker without CAP_SYS_PTRACE; systemd",
    "faccessat2": "Linux 5.8; older profiles of Docker",
    "close_range": "Linux 5.9; older profiles of Docker; systemd",
    "process_madvise": "Linux 5.10; Docker without CAP_SYS_PTRACE; systemd; gVisor",
    "epoll_pwait2": "Linux 5.11; systemd",
    "landlock_create_ruleset": "Linux 5.13; systemd; gVisor",
    "memfd_secret": "Linux 5.14; systemd; gVisor",
    "futex_waitv": "Linux 5.16; systemd; gVisor",
    # Older, and refused by some profile, or only granted in part.
    "memfd_create": "sandboxes with lists of their own; Pythons built before glibc 2.27 lack it",
    "fcntl[1]=1033": "seals (F_ADD_SEALS): no file but a memfd has them",
    "rseq": "gVisor on some platforms",
    "set_robust_list": "gVisor grants it without effect",
    "get_robust_list": "gVisor grants it without effect",
    "process_vm_readv": "Docker before Linux 4.8 without CAP_SYS_PTRACE; Yama; gVisor in the past",
    "process_vm_writev": "the same",
    "ptrace": "Docker before Linux 4.8 without CAP_SYS_PTRACE; systemd",
    "kcmp": "Docker without CAP_SYS_PTRACE; gVisor",
    "mbind": "Docker without CAP_SYS_NICE",
    "set_mempolicy": "Docker without CAP_SYS_NICE",
    "get_mempolicy": "Docker without CAP_SYS_NICE",
    "sched_setaffinity": "systemd without @resources; gVisor grants it without effect",
    "setpriority": "systemd without @resources; gVisor grants it without effect",
    "madvise": "gVisor: MADV_REMOVE",
    "fallocate": "gVisor: holes",
    "membarrier": "gVisor on some platforms",
    "mlock": "systemd without @memlock; gVisor grants it without effect",
    "statx": "Docker with libseccomp before 2.3.3",
    "unshare": "Docker without CAP_SYS_ADMIN",
    "setns": "Docker without CAP_SYS_ADMIN",
    "userfaultfd": "Docker; gVisor",
    "perf_event_open": "Docker without CAP_PERFMON; systemd; gVisor",
    "personality": "Docker, for some values",
    "prctl[0]=1": "PR_SET_PDEATHSIG; sandboxes with lists of their own",
    "prctl[0]=36": "PR_SET_CHILD_SUBREAPER; sandboxes with lists of their own",
    "prctl[0]=1499557217": "PR_SET_PTRACER: EINVAL without Yama",
    "setsid": "systemd without @process; sandboxes with lists of their own",
    "setpgid": "the same",
    "signalfd4": "systemd without @signal",
    "timerfd_create": "systemd without @timer",
    "getrandom": "kernels before 3.17; sandboxes with lists of their own",
    "sched_getaffinity": "no profile known",
    "eventfd2": "systemd without @io-event",
    "epoll_create1": "systemd without @io-event",
    "socket[0]=16": "AF_NETLINK: RestrictAddressFamilies of systemd; gVisor in part",
    "socket[0]=1": "AF_UNIX: RestrictAddressFamilies of systemd",
}

# Several at once.
PROFILES: Mapping[str, str] = {
    "linux-4.18": "pidfd_send_signal,io_uring_setup,pidfd_open,clone3,openat2,pidfd_getfd,"
    "faccessat2,close_range,process_madvise,epoll_pwait2,landlock_create_ruleset,memfd_secret,"
    "futex_waitv",
    "docker": "io_uring_setup,pidfd_getfd,process_madvise,kcmp,mbind,set_mempolicy,get_mempolicy,"
    "process_vm_readv,process_vm_writev,ptrace,unshare,setns,userfaultfd,perf_event_open",
    "systemd": "close_range,pidfd_getfd,process_madvise,epoll_pwait2,landlock_create_ruleset,"
    "memfd_secret,futex_waitv,ptrace,perf_event_open,socket[0]=16",
    "gvisor": "process_madvise,landlock_create_ruleset,memfd_secret,futex_waitv,userfaultfd,"
    "madvise[2]=9,fallocate,rseq,membarrier,kcmp",
}

_CURE = "let the sandbox it runs in permit it (docker run --security-opt seccomp=unconfined)."
_WHY = {
    "EPERM": "Operation not permitted",
    "ENOSYS": "Function not implemented",
    "EAFNOSUPPORT": "Address family not supported by protocol",
}

# What cannot be done without, and what the launcher says then. Everything else does not keep a job
# from running.
LAUNCHERS: Mapping[tuple[str, str], str] = {
    ("clone3", "EPERM"): "the launcher cannot start threads or programs: a sandbox forbids clone3 "
    "with an error after which the C library does not retry, as Docker before 20.10.10 does;"
    " upgrade "
    "Docker and libseccomp, or start the container with --security-opt seccomp=unconfined.",
    **{
        (call, error): f"{who} needs {call}, which this system refuses ({_WHY[error]}): {_CURE}"
        for who, call in (
            ("this process", "sched_getaffinity"),
            ("the launcher", "eventfd2"),
            ("the launcher", "epoll_create1"),
        )
        for error in ("EPERM", "ENOSYS")
    },
}
# The same of a rank.
RANKS: Mapping[tuple[str, str], str] = {
    ("socket[0]=1", error): "this process cannot share memory with the other ranks of this host: "
    f"Unix sockets are refused ({why}); let the sandbox it runs in permit them (AF_UNIX in "
    "systemd's RestrictAddressFamilies), or use backend='tcp'."
    for error, why in _WHY.items()
}
