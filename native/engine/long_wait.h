// Tells the launcher of a call that has been waited for too long, so that it inspects the whole job
// (docs/decisions/083-says-so-by-itself.md).
//
// Nothing wakes up for it: a waiting thread checks other things now and then anyway. The limit is
// the time that the launcher set or, unless its user chose that time, so many times the wait that
// is usual in the group, whichever is longer. The wait is reported again each time it has doubled,
// and when it is over.
#pragma once

#include <cstdint>

namespace rallypoint {

// Report to this socket, whose packets base/control_message.py reads, waits of that time, and of so
// many times the usual one. 0 s: never report.
void tell_long_waits(int fd, double after_s, double times_usual);

// The second longest wait so far. A single one is not usual: the first call waits for the rank that
// starts last.
class UsualWait {
 public:
  void add(std::uint64_t waited_ns);
  std::uint64_t ns() const { return second_ns_; }

 private:
  std::uint64_t longest_ns_ = 0;
  std::uint64_t second_ns_ = 0;
};

class LongWait {
 public:
  // A call that began at `since_ns` is still waited for. Returns whether that was reported now.
  bool look(std::uint64_t since_ns, const UsualWait& usual);
  // The call is no longer waited for.
  void over();
  // The time when the call began that is waited for; 0: there is none.
  std::uint64_t since_ns() const { return since_ns_; }

 private:
  std::uint64_t since_ns_ = 0;
  std::uint64_t told_since_ns_ = 0;  // 0: nothing is told
  std::uint64_t due_ns_ = 0;
};

}  // namespace rallypoint
