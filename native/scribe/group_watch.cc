#include "scribe/group_watch.h"

#include <algorithm>

namespace rallypoint {

void CallWatch::look(std::uint64_t now_ns, std::uint64_t begun, std::uint64_t done) {
  const bool waited = done_ < begun_;
  if (waited && done != done_) usual_.add(now_ns - since_ns_);
  if (!waited || done != done_) since_ns_ = now_ns;
  begun_ = begun;
  done_ = done;
  // A call that has timed out counts as done: only a later one shows that the group proceeds.
  if (done > told_) wait_.over();
  if (done >= begun) return;
  if (wait_.look(since_ns_, usual_)) told_ = begun;
}

void GroupWatch::look() {
  if (page_.presence.load(std::memory_order_relaxed) != GroupPresence::foreign) return;
  const std::uint64_t now_ns = coarse_now_ns();
  collectives_.look(now_ns, page_.enqueued, page_.completed);
  const std::uint64_t begun = page_.transfers_begun.load(std::memory_order_relaxed);
  std::uint64_t done = begun;
  for (const ForeignTransfer& transfer : page_.transfers) {
    const std::uint64_t word = transfer.word.load(std::memory_order_acquire);
    const bool is_running = (word & 3) == static_cast<std::uint64_t>(CallState::running);
    if (is_running && word >> 2 != 0) done = std::min(done, (word >> 2) - 1);
  }
  transfers_.look(now_ns, begun, done);
}

}  // namespace rallypoint
