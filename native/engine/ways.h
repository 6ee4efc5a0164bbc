// Chooses, by timing some calls, how messages are copied between two ranks of one host.
//
//   copy               into a ring, and out of it; the two ranks overlap
//   touch              the same, and the receiver writes to each line that it has read (copy.h):
//                      where a line that was only read is slow to get back for its next writer
//   copy_past_caches   as copy, but written around the sender's caches
//   read               by the receiver's kernel, once, in pages that it pins one by one
//
// Which is fastest depends on the processor, on which cores the ranks are, on the size, and how the
// array was allocated (huge pages are pinned at once). So it is tried: for each program and size,
// some of the first calls are made in each way, and again after ever more calls, because threads
// and virtual machines move to other cores. A rank's result applies to what it sends. Computed
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

inline constexpr std::uint64_t kTriedBytes = 512;  // smaller messages are copied

enum class Way : unsigned { copy, touch, copy_past_caches, read };

// Some of them; to copy and to touch are always two.
class Ways {
 public:
  template <typename... Others>
  constexpr explicit Ways(Others... others)
      : bits_(bit(Way::copy) | (bit(Way::touch) | ... | bit(others))) {}
  constexpr void add(Way way) { bits_ |= bit(way); }
  constexpr unsigned count() const { return static_cast<unsigned>(std::popcount(bits_)); }
  constexpr Way at(unsigned place) const {
    unsigned left = bits_;
    while (place-- > 0) left &= left - 1;
    return Way{static_cast<unsigned>(std::countr_zero(left))};
  }

 private:
  static constexpr unsigned bit(Way way) { return 1U << static_cast<unsigned>(way); }

  unsigned bits_;
};

class WayTrial {
 public:
  // Of calls with about so many bytes. After `lap` of them the same memory is used again: only then
  // a call meets it as its own way has left it.
  WayTrial(Ways ways, unsigned lap, std::uint64_t bytes)
      : ways_(ways), lap_(lap), calls_(bytes < kLongBytes ? 4 : 2) {}

  // Of the call that begins now.
  Way way() const { return is_open() ? ways_.at(place()) : best_; }
  bool is_open() const { return round_ < rounds(); }
  // Whether to time the call that begins now, of calls that may overlap: only one at a time, or its
  // time would count for the way of a later round. `note` ends it.
  bool begin() {
    if (!is_open() && --pause_ == 0) reopen();
    if (!is_open() || is_timed_) return false;
    if (skipped_ < lap_) {
      ++skipped_;
      return false;
    }
    return is_timed_ = true;
  }
  // Records how long that call took.
  void note(double seconds) {
    is_timed_ = false;
    round_s_ += seconds;
    if (++timed_ < calls_) return;
    best_s_[place()] = std::min(best_s_[place()], round_s_);
    timed_ = skipped_ = 0;
    round_s_ = 0;
    ++round_;
    if (!is_open()) decide();
  }

  static constexpr unsigned kFirstPause = 1 << 10;    // calls between trials; four times as many
  static constexpr unsigned kLongestPause = 1 << 16;  // each time

 private:
  static constexpr unsigned kWays = 4;
  static constexpr std::uint64_t kLongBytes = 1 << 20;  // few of these calls tell enough
  static constexpr unsigned kRounds = 3;                // in each way
  static constexpr double kWorthIt = 0.9;               // of the time with touching
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  unsigned rounds() const { return kRounds * ways_.count(); }
  unsigned place() const { return round_ % ways_.count(); }  // of the present way

  // In doubt, touch: where that is as quick as a copy now, a copy may be ten times slower once one
  // of the threads is on another core.
  void decide() {
    best_ = Way::touch;
    double least_s = kWorthIt * best_s_[1];
    for (unsigned place = 0; place < ways_.count(); ++place) {
      if (best_s_[place] >= least_s) continue;
      least_s = best_s_[place];
      best_ = ways_.at(place);
    }
    pause_ = next_pause_;
    next_pause_ = std::min(4 * next_pause_, kLongestPause);
  }

  void reopen() {
    round_ = 0;
    best_s_.fill(kNever);
  }

  Ways ways_;
  unsigned lap_;
  unsigned calls_;  // to be timed in each round
  unsigned pause_ = 0;
  unsigned next_pause_ = kFirstPause;
  unsigned round_ = 0;
  unsigned skipped_ = 0;  // calls of this round, and those
  unsigned timed_ = 0;    // that were timed,
  double round_s_ = 0;    // in all
  std::array<double, kWays> best_s_{kNever, kNever, kNever, kNever};  // by place
  Way best_ = Way::copy;
  bool is_timed_ = false;  // a call that has begun
};

class WayTrials {
 public:
  // The trial for calls of a program, or of none, with about so many bytes, up to a power of two;
  // its address is stable. All sizes larger than any cache share one.
  WayTrial& of(const void* program, std::uint64_t bytes, Ways ways, unsigned lap) {
    constexpr unsigned kLargest = 25;
    const auto size = static_cast<unsigned>(std::bit_width(bytes - 1));
    const Key key{program, size < kLargest ? size : kLargest};
    if (last_ == nullptr || key != last_->first) {
      last_ = &*trials_.try_emplace(key, ways, lap, bytes).first;
    }
    return last_->second;
  }

 private:
  using Key = std::pair<const void*, unsigned>;

  std::map<Key, WayTrial> trials_;
  std::pair<const Key, WayTrial>* last_ = nullptr;
};

}  // namespace rallypoint
