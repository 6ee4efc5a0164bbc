// Tells the launcher of a call that has been waited for too long, so that it inspects the whole job
// (docs/decisions/083-says-so-by-itself.md).
//
// Nothing wakes up for it: a waiting thread checks other things now and then anyway. The limit is
// the time that the launcher set, or ten times the longest that the group has taken from one call
// to the next, whichever is longer. The wait is reported again each time it has doubled, and when
// it is over.
#pragma once

#include <cstdint>

namespace rallypoint {

// Report to this socket, whose packets base/control_message.py reads. 0 s: never report.
void tell_long_waits(int fd, double after_s);

class LongWait {
 public:
  // A call that began at `since_ns` is still waited for; `longest_gap_ns` is evaluated only if it
  // matters. Returns whether the wait was reported now.
  template <typename Gap>
  bool look(std::uint64_t since_ns, const Gap& longest_gap_ns) {
    return is_due(since_ns) && tell(longest_gap_ns());
  }
  // The call that was reported as waiting continues.
  void over();
  // The time when the last checked call began; 0: there was none.
  std::uint64_t since_ns() const { return since_ns_; }

 private:
  bool is_due(std::uint64_t since_ns);
  bool tell(std::uint64_t longest_gap_ns);

  std::uint64_t since_ns_ = 0;
  std::uint64_t told_since_ns_ = 0;  // 0: nothing is told
  std::uint64_t due_ns_ = 0;
};

}  // namespace rallypoint
