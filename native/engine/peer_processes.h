// Notices the end of other processes on this host.
//
// A pidfd tells it, and one poll asks all of them. Where the kernel has no pidfds (before 5.3), a
// sandbox refuses them, or descriptors have run out, the process's line in /proc tells it, which
// costs some 10 us for each process; and where there is no /proc, only its number does, which
// another process may take over.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rallypoint {

class PeerProcesses {
 public:
  PeerProcesses() = default;
  ~PeerProcesses();
  PeerProcesses(const PeerProcesses&) = delete;
  PeerProcesses& operator=(const PeerProcesses&) = delete;

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

  std::vector<pollfd> pidfds_;
  std::vector<std::uint32_t> ranks_;  // whose they are
  std::vector<Unwatched> unwatched_;  // those without one
};

}  // namespace rallypoint
