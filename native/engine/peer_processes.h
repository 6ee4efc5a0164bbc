// Notices the end of other processes on this host.
//
// A pidfd tells it, and one poll asks all of them; the groups of a process share one for each other
// process. Where the kernel has no pidfds (before 5.3), a sandbox refuses them, or descriptors have
// run out, the process's line in /proc tells it, which costs some 10 us for each process; and where
// there is no /proc, only its number does, which another process may take over.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace rallypoint {

class PeerProcesses {
 public:
  // Watches the process of a rank. Returns false if it has ended already.
  bool add(std::uint32_t rank, pid_t pid);
  // The ranks whose process has ended. Any thread may ask.
  std::vector<std::uint32_t> ended() const;

 private:
  struct Unwatched {
    std::uint32_t rank;
    pid_t pid;
    std::uint64_t started;  // in ticks since boot; 0: not known
  };

  struct Watched {
    std::uint32_t rank;
    std::shared_ptr<const int> pidfd;
  };

  std::vector<Watched> watched_;
  std::vector<Unwatched> unwatched_;  // those without a pidfd
};

}  // namespace rallypoint
