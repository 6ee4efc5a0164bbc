// Starts one worker process and knows what became of it. Rule: a worker leads a process group,
// dies with the guardian, and inherits nothing but its four descriptors, environment and directory.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "protocol.h"

namespace guardian {

// Where a child that cannot become the worker's program leaves the reason. It lies in memory shared
// with the guardian, which reads it when the child is reaped: no pipe, and no wait for each exec.
struct ExecFailure {
  SpawnStage stage;
  int error;
};

struct Worker {
  uint32_t id;
  pid_t pid;
  int pidfd;             // -1 where the kernel has none to give
  ExecFailure* failure;  // its slot in the shared page
};

// Forks. In the parent: the pid, or -1 with errno. The descriptors stay the caller's.
pid_t spawn(const SpawnRequest& request, const int (&fds)[kWorkerFds], ExecFailure* failure,
            bool session);

}  // namespace guardian
