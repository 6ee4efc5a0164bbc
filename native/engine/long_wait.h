// Tells the launcher of a call that has been waited for too long, so that it looks at the whole job
// (docs/decisions/083-says-so-by-itself.md).
//
// Nothing wakes up for it: whoever waits looks at other things now and then anyway. Too long is the
// time that the launcher set, or ten times the longest that the group has taken from one call to
// the next, whichever is more. It is told again each time it has doubled, and when it is over.
#pragma once

#include <cstdint>

namespace rallypoint {

// Tell over this socket, whose packets base/control_message.py reads. 0 s: tell nothing.
void tell_long_waits(int fd, double after_s);

class LongWait {
 public:
  // A call that began then is still waited for; `longest_gap_ns` is only asked if it matters.
  // Returns whether it was told now.
  template <typename Gap>
  bool look(std::uint64_t since_ns, const Gap& longest_gap_ns) {
    return is_due(since_ns) && tell(longest_gap_ns());
  }
  // What was told to wait goes on.
  void over();
  // When the call began that was looked at last; 0: none was.
  std::uint64_t since_ns() const { return since_ns_; }

 private:
  bool is_due(std::uint64_t since_ns);
  bool tell(std::uint64_t longest_gap_ns);

  std::uint64_t since_ns_ = 0;
  std::uint64_t told_since_ns_ = 0;  // 0: nothing is told
  std::uint64_t due_ns_ = 0;
};

}  // namespace rallypoint
