// How a rank waits: spin, then yield the core, then sleep until a bell rings.
//
// Short spins catch a peer that is about to answer, longer ones a peer that needs a little more
// time and has its own core; yielding lets it run if it has none; sleeping costs nothing, and
// remains when those to which the core is yielded occupy it. The caller knows what it waits for: it
// checks again after each `pause` and calls `reset` when it has made progress.
//
// Nobody else decides how long and how often. Where a message is awaited in the middle of other
// work, it is polled for `WaitPolicy::polls` times, and only until that has failed once: after
// that, each poll is followed by a `pause`, or polls would multiply.
#pragma once

#include <cstdint>
#include <string>

#include "engine/region.h"

namespace rallypoint {

// Pause between two reads of a word that another core will change.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield" ::: "memory");
#endif
}

// The time of a monotonic clock.
double now_s();
std::uint64_t now_ns();
// The same as of its last tick, some milliseconds ago, at a fifth of the cost.
std::uint64_t coarse_now_ns();

struct WaitPolicy {
  unsigned spins;  // many more for a rank on another core; 0 if there are more ranks than cores
  unsigned yields;

  // How often to poll for a rank: not at all if it needs this very core to make progress.
  unsigned polls(const Region& region, std::uint32_t rank) const {
    return region.is_here(rank) ? 0 : spins;
  }
};

// What the embedding language must do around a long wait.
class Host {
 public:
  virtual ~Host() = default;
  virtual void before_wait() = 0;  // once per call, before the first yield or sleep
  // Called now and then, without locks, because it may make further calls; true ends the call.
  virtual bool is_interrupted() = 0;
  // Whether it is likely to do so, for as long as it takes: signal handlers of the program.
  virtual bool runs_handlers() = 0;
  // Whether nothing else in this process will communicate before the call returns.
  virtual bool is_alone() = 0;
  // Where the program waits, in its own terms; may be empty.
  virtual std::string site() = 0;
};

// Nothing must be done.
class NoHost final : public Host {
 public:
  void before_wait() override {}
  bool is_interrupted() override { return false; }
  bool runs_handlers() override { return false; }
  bool is_alone() override { return false; }
  std::string site() override { return {}; }
};

// What else, apart from peers on this host, should ring the bell of a rank that is about to sleep.
class Alarm {
 public:
  virtual ~Alarm() = default;
  virtual void arm() = 0;
};

class Waiter {
 public:
  Waiter(const Region& region, WaitPolicy policy, Host& host, Alarm* alarm)
      : region_(region), policy_(policy), host_(host), alarm_(alarm) {
    region.say_core();
  }
  ~Waiter() { disarm(); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // `blocker` is the rank that is waited for, or none in particular. Returns true after a sleep,
  // when the caller should also look for trouble.
  bool pause(std::uint32_t blocker);
  // Whether it has yielded the core, or slept.
  bool has_waited() const { return waiting_; }
  void reset() {
    count_ = 0;
    sleep_us_ = 0;
    if (idle_since_s_ > 0) end_idle();
    disarm();
  }
  // For how long nothing has moved, in all, without the spins before each time.
  std::uint64_t waited_ns() {
    if (idle_since_s_ > 0) end_idle();
    return static_cast<std::uint64_t>(1e9 * waited_s_);
  }

 private:
  void yield();
  bool sleep();
  void end_idle();
  void disarm() {
    if (armed_) region_.state(region_.rank()).sleeping.fetch_sub(1);
    armed_ = false;
  }

  const Region& region_;
  WaitPolicy policy_;
  Host& host_;
  Alarm* alarm_;  // may be null
  unsigned count_ = 0;
  unsigned spins_ = 0;
  bool waiting_ = false;
  bool armed_ = false;
  std::uint32_t bell_ = 0;
  long sleep_us_ = 0;
  double idle_since_s_ = 0;
  double waited_s_ = 0;
};

}  // namespace rallypoint
