#include "engine/group_waits.h"

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
    wait.look(since_ns, usual_);
  } else if (state == CallState::done && since_ns == wait.since_ns()) {
    usual_.add(coarse_now_ns() - since_ns);
    wait.over();
  }
}

}  // namespace rallypoint
