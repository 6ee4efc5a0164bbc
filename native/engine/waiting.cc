#include "engine/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace rallypoint {
namespace {

constexpr unsigned kSpinsApart = 3000;  // about 40 us
constexpr double kSlowYieldS = 500e-6;  // others occupy the core
constexpr long kFirstSleepUs = 1000;
constexpr long kLongestSleepUs = 50000;  // a dead peer is noticed within one such sleep

thread_local double slow_until_s = 0;

std::uint64_t read_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::uint64_t now_ns() { return read_ns(CLOCK_MONOTONIC); }

std::uint64_t coarse_now_ns() { return read_ns(CLOCK_MONOTONIC_COARSE); }

bool Waiter::pause(std::uint32_t blocker) {
  if (count_++ == 0) spins_ = policy_.polls(region_, blocker);
  if (count_ <= spins_) {
    relax();
    return false;
  }
  if (!waiting_) {
    waiting_ = true;
    host_.before_wait();
  }
  const bool may_extend = spins_ > 0 && spins_ < kSpinsApart && count_ == spins_ + 1;
  if (may_extend && region_.is_elsewhere(blocker)) {
    spins_ = kSpinsApart;
    return false;
  }
  if (count_ <= spins_ + policy_.yields) {
    yield();
    return false;
  }
  return sleep();
}

// Yields the core to other threads. If these are not peers, which will be done in microseconds, but
// computations that use their whole time slice, sleeping is better: a woken sleeper need not wait
// for its turn. Nobody knows for how long; so it sleeps for as long as was lost now, so that a
// single accident costs little, and at most half of the time is lost.
void Waiter::yield() {
  const double began_s = now_s();
  if (idle_since_s_ == 0) idle_since_s_ = began_s;
  if (began_s < slow_until_s) {
    count_ = spins_ + policy_.yields;
    return;
  }
  sched_yield();
  const double now = now_s();
  if (now - began_s > kSlowYieldS) slow_until_s = now + (now - began_s);
}

void Waiter::end_idle() {
  waited_s_ += now_s() - idle_since_s_;
  idle_since_s_ = 0;
}

// Announce the sleep and let the caller check once more; only then sleep.
bool Waiter::sleep() {
  if (idle_since_s_ == 0) idle_since_s_ = now_s();
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
