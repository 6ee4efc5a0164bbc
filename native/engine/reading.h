// Decides by measuring whether a rank's private messages are read in place or copied.
//
// A message through a ring is copied twice, by two ranks that overlap; one that the kernel reads is
// copied once, in pages that the kernel pins one by one. Which is faster depends on the processor,
// the size, and how the array was allocated (huge pages are pinned at once). So it is tried: for
// each program and size, some of the first calls are made in each way. A rank's result applies to
// what it sends. Computed results do not depend on it: the operands and their order are the same.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

namespace rallypoint {

class ReadingTrial {
 public:
  // Whether the messages of the call that begins now should be read in place.
  bool reads() const { return is_open() ? round() % 2 == 1 : reads_; }
  bool is_open() const { return calls_ < kCalls; }
  // Whether to time the call that begins now, of calls that may overlap: only one at a time, or its
  // time would count for the way of a later round. `note` ends it.
  bool begin() { return is_open() && !std::exchange(is_timed_, true); }
  // Records how long that call took.
  void note(double seconds) {
    is_timed_ = false;
    // The first call of a round pays for what the previous way has left in the caches.
    const unsigned place = calls_ < kWarmUp ? 0 : (calls_ - kWarmUp) % kRound;
    round_s_ = place == 0 ? 0 : round_s_ + seconds;
    if (place == kRound - 1) {
      double& best = best_s_[round() % 2];
      best = round_s_ < best ? round_s_ : best;
    }
    if (++calls_ == kCalls) reads_ = best_s_[1] < kWorthIt * best_s_[0];
  }

 private:
  static constexpr unsigned kWarmUp = 4;
  static constexpr unsigned kRound = 5;
  static constexpr unsigned kRounds = 6;
  static constexpr unsigned kCalls = kWarmUp + kRounds * kRound;
  static constexpr double kWorthIt = 0.9;

  unsigned round() const { return calls_ < kWarmUp ? 0 : (calls_ - kWarmUp) / kRound; }

  unsigned calls_ = 0;
  double round_s_ = 0;
  std::array<double, 2> best_s_{std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::infinity()};
  bool reads_ = false;
  bool is_timed_ = false;  // a call that has begun
};

class ReadingTrials {
 public:
  // The trial for calls of a program, or of none, with about so many bytes; its address is stable.
  // All sizes larger than any cache share one.
  ReadingTrial& of(const void* program, std::uint64_t bytes) {
    constexpr unsigned kLargest = 25;
    const auto size = static_cast<unsigned>(std::bit_width(bytes));
    return trials_[{program, size < kLargest ? size : kLargest}];
  }

 private:
  std::map<std::pair<const void*, unsigned>, ReadingTrial> trials_;
};

}  // namespace rallypoint
