#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

// Of all architectures; headers before 5.9 lack it.
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

namespace guardian {
namespace {

constexpr rlim_t kMostClosed = 1 << 16;  // one by one: the limit may be a billion

// Where the kernel has no close_range (before 5.9), or a sandbox refuses it, /proc shows what is
// open. After the fork of a process with one thread, memory may be taken.
void close_from(int first) {
  if (syscall(SYS_close_range, first, ~0u, 0u) == 0) return;
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    const auto most = static_cast<int>(std::min(limit.rlim_cur, kMostClosed));
    for (int fd = first; fd < most; ++fd) close(fd);
    return;
  }
  std::vector<int> open;
  while (const dirent* entry = readdir(directory)) {
    const int fd = atoi(entry->d_name);  // 0 for . and ..
    if (fd >= first && fd != dirfd(directory)) open.push_back(fd);
  }
  closedir(directory);
  for (const int fd : open) close(fd);
}

[[noreturn]] void give_up(ExecFailure* failure, SpawnStage stage) {
  failure->error = errno;
  failure->stage = stage;
  _exit(127);
}

// The list has only digits and commas; the kernel itself ignores CPUs that do not exist.
bool run_only_on(const char* cpus) {
  constexpr size_t kMaxCpus = 8192;
  unsigned long mask[kMaxCpus / (8 * sizeof(unsigned long))] = {};
  while (*cpus != '\0') {
    char* end;
    const unsigned long cpu = strtoul(cpus, &end, 10);
    if (end == cpus || cpu >= kMaxCpus) {
      errno = EINVAL;
      return false;
    }
    mask[cpu / (8 * sizeof *mask)] |= 1ul << cpu % (8 * sizeof *mask);
    cpus = *end == ',' ? end + 1 : end;
  }
  return syscall(SYS_sched_setaffinity, 0, sizeof mask, mask) == 0;
}

[[noreturn]] void become(const SpawnRequest& request, const int (&fds)[kWorkerFds],
                         ExecFailure* failure, pid_t guardian, bool session) {
  // A group to be signalled; launch/agent/guardian.py says when it is a session of its own too.
  if (session)
    setsid();
  else
    setpgid(0, 0);
  // The signal comes only if the parent dies after this call; the check covers the time before.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != guardian) _exit(127);

  int moved[kWorkerFds];  // moved away first: a received number may be one of the targets
  for (int i = 0; i < kWorkerFds; ++i) {
    moved[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, kWorkerFds);
    if (moved[i] < 0) give_up(failure, SpawnStage::kFork);
  }
  for (int i = 0; i < kWorkerFds; ++i) dup2(moved[i], i);
  close_from(kWorkerFds);

  if (request.directory[0] != '\0' && chdir(request.directory) != 0)
    give_up(failure, SpawnStage::kDirectory);
  if (request.cpus[0] != '\0' && !run_only_on(request.cpus))
    give_up(failure, SpawnStage::kAffinity);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  environ = const_cast<char**>(request.environment.data());  // execvp searches the worker's PATH
  execvp(request.argv[0], request.argv.data());
  give_up(failure, SpawnStage::kExec);
}

}  // namespace

pid_t spawn(const SpawnRequest& request, const int (&fds)[kWorkerFds], ExecFailure* failure,
            bool session) {
  const pid_t guardian = getpid();
  const pid_t pid = fork();
  if (pid == 0) become(request, fds, failure, guardian, session);
  return pid;
}

}  // namespace guardian
