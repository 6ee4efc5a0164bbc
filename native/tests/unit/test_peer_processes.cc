// The end of peers' processes, with pidfds and without.

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/peer_processes.h"
#include "tests/unit/cases.h"

namespace {

using namespace rallypoint;

// A child that waits to be killed.
class Child {
 public:
  Child() : pid_(fork()) {
    while (pid_ == 0) pause();
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // It remains a zombie.
  void end() const {
    kill(pid_, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_;
};

// While it lives, no descriptor can be opened.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

int open_descriptors() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

CASE(groups_share_what_tells_the_end_of_a_process) {
  const Child one;
  const Child other;
  const int before = open_descriptors();
  PeerProcesses groups[3];
  for (PeerProcesses& group : groups) {
    CHECK(group.add(1, one.pid()));
    CHECK(group.add(2, other.pid()));
  }
  CHECK_EQUAL(open_descriptors(), before + 2);
  other.end();
  for (const PeerProcesses& group : groups) {
    CHECK_EQUAL(group.ended().size(), 1U);
    CHECK_EQUAL(group.ended().front(), 2U);
  }
}

CASE(a_process_that_has_ended_is_not_watched) {
  const Child child;
  child.end();
  waitpid(child.pid(), nullptr, 0);
  PeerProcesses processes;
  CHECK(!processes.add(1, child.pid()));
}

CASE(the_end_of_a_process_is_seen_without_a_descriptor_for_it) {
  const Child one;
  const Child other;
  PeerProcesses processes;
  {
    // Its start cannot be read then, either: only its number tells that it is there.
    const NoDescriptors none;
    CHECK(processes.add(1, one.pid()));
    CHECK(processes.add(2, other.pid()));
    CHECK(processes.ended().empty());
  }
  CHECK(processes.ended().empty());
  other.end();
  waitpid(other.pid(), nullptr, 0);
  const NoDescriptors none;
  CHECK_EQUAL(processes.ended().size(), 1U);
  CHECK_EQUAL(processes.ended().front(), 2U);
}

}  // namespace
