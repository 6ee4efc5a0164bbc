#include "engine/group_waits.h"

#include <algorithm>
#include <iterator>

namespace rallypoint {

void GroupWaits::wait_for(std::uint64_t number_plus_one) {
  const auto place = (number_plus_one - 1) % kRecordedCalls;
  wait_for(record_.page()->calls[place], number_plus_one, collective_);
}

void GroupWaits::wait_for(const RecordedTransfer& transfer) {
  LongWait& wait = transfers_[transfer.call - record_.page()->transfers];
  wait_for(*transfer.call, transfer.number_plus_one, wait);
}

void GroupWaits::wait_for(const RecordedCall& call, std::uint64_t number_plus_one, LongWait& wait) {
  const std::uint64_t word = call.word.load(std::memory_order_acquire);
  if (word >> 2 != number_plus_one) return;
  const std::uint64_t since_ns = call.since_ns;
  const auto state = static_cast<CallState>(word & 3);
  const std::lock_guard lock(mutex_);
  if (state == CallState::running) {
    if (since_ns != wait.since_ns()) wait.over();  // the previous one ended while nobody waited
    wait.look(since_ns, [this] { return longest_gap_ns(); });
  } else if (state == CallState::done && since_ns == wait.since_ns()) {
    longest_ns_ = std::max(longest_ns_, coarse_now_ns() - since_ns);
    wait.over();
  }
}

// The longest time from one call to the next, among those still recorded, or that one was waited
// for. The group's own beginning counts as a call.
std::uint64_t GroupWaits::longest_gap_ns() const {
  std::uint64_t begun[kRecordedCalls + kRecordedTransfers + 1];
  unsigned count = 0;
  bool is_all = true;
  const auto take = [&](const auto& calls) {
    for (const RecordedCall& call : calls) {
      if (call.since_ns != 0) begun[count++] = call.since_ns;
      is_all = is_all && call.word.load(std::memory_order_relaxed) >> 2 <= std::size(calls);
    }
  };
  take(record_.page()->calls);
  take(record_.page()->transfers);
  if (is_all) begun[count++] = formed_ns_;
  std::sort(begun, begun + count);
  std::uint64_t longest = longest_ns_;
  for (unsigned i = 1; i < count; ++i) longest = std::max(longest, begun[i] - begun[i - 1]);
  return longest;
}

}  // namespace rallypoint
