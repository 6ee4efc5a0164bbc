// Starts one worker process and records what became of it. Rule: a worker leads a process group,
// dies with the guardian, and inherits nothing but its descriptors, environment and directory.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "protocol.h"

namespace guardian {

// Where a child that cannot execute the worker's program leaves the reason. It is in memory shared
// with the guardian, which reads it when the child is reaped: no pipe, and no wait for each exec.
struct ExecFailure {
  SpawnStage stage;
  int error;
};

struct Worker {
  uint32_t id;
  pid_t pid;
  int pidfd;             // -1 where the kernel provides none
  ExecFailure* failure;  // its slot in the shared page
  bool is_told = false;  // its end, before it is reaped
};

// Forks. In the parent: returns the pid, or -1 with errno. The descriptors remain the caller's.
pid_t spawn(const SpawnRequest& request, const int (&fds)[kWorkerFds], ExecFailure* failure,
            bool session);

}  // namespace guardian
