#include "engine/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace rallypoint {
namespace {

constexpr unsigned kYieldsPerLook = 4;  // at the clock
constexpr long kFirstSleepUs = 1000;
constexpr long kLongestSleepUs = 50000;  // a dead peer is noticed within one such sleep

}  // namespace

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::uint64_t coarse_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

bool Waiter::pause() {
  ++count_;
  if (count_ <= policy_.spins) {
    relax();
    return false;
  }
  if (!waiting_) {
    waiting_ = true;
    host_.before_wait();
  }
  const unsigned yields = count_ - policy_.spins;
  if (yields <= policy_.yields) {
    if (yields == 1) yields_since_ns_ = coarse_now_ns();
    sched_yield();
    if (yields % kYieldsPerLook == 0 && coarse_now_ns() - yields_since_ns_ > kLongestYieldNs) {
      count_ = policy_.spins + policy_.yields;
    }
    return false;
  }
  return sleep();
}

// Say that we sleep and let the caller look once more; only then sleep.
bool Waiter::sleep() {
  auto& state = region_.state(region_.rank());
  if (alarm_ != nullptr) alarm_->arm();
  if (!armed_) {
    armed_ = true;
    bell_ = state.bell.load(std::memory_order_acquire);
    state.sleeping.fetch_add(1, std::memory_order_seq_cst);
    Region::fence();
    return true;
  }
  sleep_us_ = std::clamp(2 * sleep_us_, kFirstSleepUs, kLongestSleepUs);
  const timespec limit{sleep_us_ / 1000000, sleep_us_ % 1000000 * 1000};
  syscall(SYS_futex, &state.bell, FUTEX_WAIT, bell_, &limit, nullptr, 0);
  bell_ = state.bell.load(std::memory_order_acquire);
  return true;
}

}  // namespace rallypoint
