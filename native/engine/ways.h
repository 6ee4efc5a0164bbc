// Decides by measuring how a rank's private messages get to others of its host.
//
//   copy               into a ring, and out of it; the two ranks overlap
//   copy_past_caches   the same, written around the sender's caches: quicker where a line that
//                      another core has read is slow to get back, as between distant cores
//   read               by the receiver's kernel, once, in pages that it pins one by one
//
// Which is fastest depends on the processor, on which cores the ranks are, on the size, and how the
// array was allocated (huge pages are pinned at once). So it is tried: for each program and size,
// some of the first calls are made in each way. A rank's result applies to what it sends. Computed
// results do not depend on it: the operands and their order are the same.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

namespace rallypoint {

enum class Way : unsigned { copy, copy_past_caches, read };

class WayTrial {
 public:
  // Of the call that begins now.
  Way way() const { return is_open() ? Way{round() % kWays} : best_; }
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
      double& best = best_s_[round() % kWays];
      best = std::min(best, round_s_);
    }
    if (++calls_ == kCalls) decide();
  }

 private:
  static constexpr unsigned kWays = 3;
  static constexpr unsigned kWarmUp = 4;
  static constexpr unsigned kRound = 5;
  static constexpr unsigned kRounds = 3 * kWays;
  static constexpr unsigned kCalls = kWarmUp + kRounds * kRound;
  static constexpr double kWorthIt = 0.9;  // of a copy's time
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  unsigned round() const { return calls_ < kWarmUp ? 0 : (calls_ - kWarmUp) / kRound; }

  void decide() {
    double least_s = kWorthIt * best_s_[0];
    for (unsigned way = 1; way < kWays; ++way) {
      if (best_s_[way] >= least_s) continue;
      least_s = best_s_[way];
      best_ = Way{way};
    }
  }

  unsigned calls_ = 0;
  double round_s_ = 0;
  std::array<double, kWays> best_s_{kNever, kNever, kNever};
  Way best_ = Way::copy;
  bool is_timed_ = false;  // a call that has begun
};

class WayTrials {
 public:
  // The trial for calls of a program, or of none, with about so many bytes; its address is stable.
  // All sizes larger than any cache share one.
  WayTrial& of(const void* program, std::uint64_t bytes) {
    constexpr unsigned kLargest = 25;
    const auto size = static_cast<unsigned>(std::bit_width(bytes));
    return trials_[{program, size < kLargest ? size : kLargest}];
  }

 private:
  std::map<std::pair<const void*, unsigned>, WayTrial> trials_;
};

}  // namespace rallypoint
