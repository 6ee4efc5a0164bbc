#include "engine/progress_thread.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <utility>

#include "engine/process.h"
#include "engine/waiting.h"
#include "engine/work.h"

namespace rallypoint {
namespace {

constexpr unsigned kYields = 20;         // without progress, before it sleeps;
constexpr unsigned kSharedYields = 200;  // where the peer that it waits for may want this core
// The time limit for yielding: on a busy machine, each yield may take as long as all other threads'
// turns together, and a thread that yields does not look for trouble.
constexpr std::uint64_t kLongestYieldNs = 20'000'000;
constexpr long kFirstSleepUs = 1000;
constexpr long kLongestSleepUs = 50000;  // a dead peer is noticed within one such sleep
constexpr long kDozeUs = 1000;           // how late it may notice what came without a call,
constexpr unsigned kDozes = 100;         // and how often it checks before it waits to be called

constexpr long kFutexWaitMany = 449;
constexpr std::uint32_t kWord32 = 2;
constexpr std::uint32_t kPrivate = 128;
constexpr std::size_t kMostWords = 100;  // of 128 that the kernel takes

static_assert(sizeof(std::atomic<std::uint32_t>) == 4);

struct FutexWaiter {  // struct futex_waitv of linux/futex.h, which older systems lack
  std::uint64_t value;
  std::uint64_t address;
  std::uint32_t flags;
  std::uint32_t reserved;
};

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value, long most_us) {
  const timespec limit{most_us / 1000000, most_us % 1000000 * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, most_us < 0 ? nullptr : &limit, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Work::sleep(long most_us) const {
  std::uint32_t seen = running;
  if (!state_.compare_exchange_strong(seen, awaited) && seen == done) return;
  futex_wait(state_, awaited, most_us);
}

void Work::finish(Trouble trouble) {
  trouble_ = trouble;
  if (record_.call != nullptr) GroupRecord::finish(record_, trouble);
  on_done();
  if (state_.exchange(done, std::memory_order_acq_rel) == awaited) futex_wake(state_);
}

ProgressThread& ProgressThread::instance() {
  static constinit PerProcess<ProgressThread> progress;
  return progress.get();
}

void ProgressThread::add(Progressable& member) {
  const Visit visit(*this);
  if (!is_running_) start_thread([this] { run(); });  // it may be refused
  is_running_ = true;
  members_.push_back(&member);
}

void ProgressThread::remove(Progressable& member) {
  const Visit visit(*this);
  std::erase(members_, &member);
}

// The thread holds the mutex even while it sleeps: wake it, and it lets visitors go first.
ProgressThread::Visit::Visit(ProgressThread& progress) : progress_(progress) {
  progress_.visitors_.fetch_add(1);
  progress_.notify(true);
  progress_.mutex_.lock();
}

ProgressThread::Visit::~Visit() {
  progress_.visitors_.fetch_sub(1);
  progress_.mutex_.unlock();
}

void ProgressThread::notify(bool immediately) {
  calls_.fetch_add(1, std::memory_order_seq_cst);
  if (immediately || is_asleep_.load(std::memory_order_seq_cst)) futex_wake(calls_);
}

void ProgressThread::run() {
  unsigned idle = 0;
  std::uint64_t idle_since_ns = 0;
  unsigned dozes = 0;
  long sleep_us = kFirstSleepUs;
  bool has_slept = false;
  for (;;) {
    while (visitors_.load() != 0) sched_yield();
    std::unique_lock lock(mutex_);
    const std::uint32_t calls = calls_.load(std::memory_order_acquire);
    unsigned patience = 0;
    const bool moved = pass(has_slept, patience);
    has_slept = false;
    if (moved) {
      idle = dozes = 0;
      sleep_us = kFirstSleepUs;
    } else if (idle < patience &&
               (idle == 0 || coarse_now_ns() - idle_since_ns <= kLongestYieldNs)) {
      if (idle++ == 0) idle_since_ns = coarse_now_ns();
      lock.unlock();
      sched_yield();
    } else if (patience > 0) {
      sleep(calls, sleep_us);
      sleep_us = std::min(2 * sleep_us, kLongestSleepUs);
      has_slept = true;
    } else {
      lock.unlock();
      const bool dozes_again = ++dozes <= kDozes;
      if (!dozes_again) is_asleep_.store(true, std::memory_order_seq_cst);
      futex_wait(calls_, calls, dozes_again ? kDozeUs : -1);
      if (!dozes_again) dozes = 0;
      is_asleep_.store(false, std::memory_order_relaxed);
    }
  }
}

bool ProgressThread::pass(bool has_slept, unsigned& patience) {
  bool moved = false;
  for (Progressable* const member : members_) {
    if (!member->has_work()) continue;
    patience = std::max(patience, member->shares_cores() ? kSharedYields : kYields);
    moved |= member->progress(has_slept);
  }
  return moved;
}

// Sleep until the bell of a communicator with work rings, or there is something new. Announce the
// sleep, check once more, and only then sleep: then either a sender sees the announcement, or we
// see its message.
void ProgressThread::sleep(std::uint32_t calls, long most_us) {
  std::vector<FutexWaiter> words = {
      {calls, reinterpret_cast<std::uint64_t>(&calls_), kWord32 | kPrivate, 0}};
  std::vector<std::atomic<std::uint32_t>*> sleeping;
  for (Progressable* const member : members_) {
    if (!member->has_work()) continue;
    if (words.size() == kMostWords) {  // the bells of the others are looked at instead
      most_us = std::min(most_us, kDozeUs);
      break;
    }
    RankState& state = member->region().state(member->region().rank());
    const std::uint32_t bell = state.bell.load(std::memory_order_acquire);
    state.sleeping.fetch_add(1, std::memory_order_seq_cst);
    words.push_back({bell, reinterpret_cast<std::uint64_t>(&state.bell), kWord32, 0});
    sleeping.push_back(&state.sleeping);
    member->arm();
  }
  Region::fence();
  unsigned patience = 0;
  if (!pass(false, patience)) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += most_us * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    const long woken =
        syscall(kFutexWaitMany, words.data(), words.size(), 0, &until, CLOCK_MONOTONIC);
    // Older systems, and some sandboxes, cannot wait for many words.
    if (woken < 0 && (errno == ENOSYS || errno == EPERM)) futex_wait(calls_, calls, kDozeUs);
  }
  for (auto* const count : sleeping) count->fetch_sub(1);
}

}  // namespace rallypoint
