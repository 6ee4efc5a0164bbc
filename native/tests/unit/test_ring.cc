// Where a ring puts messages, beside a naive list of those that are still there.

#include <cmath>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "engine/channel.h"
#include "engine/copy.h"
#include "tests/unit/cases.h"
#include "tests/unit/regions.h"

namespace {

using namespace rallypoint;
using tests::chance;

// Rank 0's ring, and rank 1, which takes its messages in order.
class Pair {
 public:
  Pair()
      : memory_(2),
        region_(memory_.fd(), 0, 2, {}),
        channel_(Channel::collective(region_, rings_, nullptr)) {}

  // The offset of another message, or -1 while there is no room.
  std::int64_t send(std::uint64_t bytes) {
    std::uint32_t blocker = 0;
    const std::byte* const at = ring_.take(bytes, {&channel_, sent_, &receivers_}, blocker);
    if (at == nullptr) {
      CHECK_EQUAL(blocker, 1U);
      return -1;
    }
    ++sent_;
    return static_cast<std::int64_t>(ring_.offset(at));
  }
  void take() {
    ++taken_;
    auto* const progress = region_.at<Progress>(1, region_.layout().progress(1));
    progress->value.store(taken_ << kOperationBits, std::memory_order_release);
  }
  std::uint64_t waiting() const { return sent_ - taken_; }

 private:
  tests::Memory memory_;
  Region region_;
  std::vector<std::byte> base_ = std::vector<std::byte>(kRingBytes);
  Ring ring_{base_.data()};
  std::deque<Ring> rings_{kLanes, Ring(base_.data())};
  Channel channel_;
  const std::vector<Receiver> receivers_{{1, 0, 0}};
  std::uint64_t sent_ = 0;
  std::uint64_t taken_ = 0;
};

struct Span {
  std::uint64_t begin;
  std::uint64_t end;
};

CASE(messages_that_are_still_there_never_overlap) {
  Pair pair;
  std::deque<Span> there;
  std::uniform_real_distribution<double> size(6.7, 18);  // of 104 bytes to 256 KiB
  for (unsigned step = 0; step < 20'000; ++step) {
    const auto bytes = static_cast<std::uint64_t>(std::exp2(size(chance())));
    const std::int64_t offset = chance()() % 3 > 0 ? pair.send(bytes) : -1;
    if (offset < 0) {
      if (pair.waiting() == 0) continue;
      pair.take();
      there.pop_front();
      continue;
    }
    const auto begin = static_cast<std::uint64_t>(offset);
    CHECK_EQUAL(begin % kCacheLineBytes, 0U);
    CHECK(begin + bytes <= kRingBytes);
    for (const Span& other : there) CHECK(begin >= other.end || begin + bytes <= other.begin);
    there.push_back({begin, begin + bytes});
  }
}

CASE(there_is_room_for_four_messages) {
  for (const std::uint64_t bytes : {std::uint64_t{4096}, std::uint64_t{100'000}, kBlockBytes}) {
    Pair pair;
    for (unsigned lap = 0; lap < 3; ++lap) {
      for (unsigned i = 0; i < 4; ++i) CHECK(pair.send(bytes) >= 0);
      for (unsigned i = 0; i < 4; ++i) pair.take();
    }
  }
}

// So that they stay in the caches.
CASE(small_messages_stay_in_a_small_part) {
  Pair pair;
  for (const std::uint64_t bytes :
       {std::uint64_t{200}, std::uint64_t{4096}, std::uint64_t{16384}}) {
    // What came before may have been in a longer lap.
    for (unsigned i = 0; i < 2 * kRingBytes / bytes; ++i) {
      const std::int64_t offset = pair.send(bytes);
      pair.take();
      if (i > kRingBytes / bytes) {
        CHECK(offset + static_cast<std::int64_t>(bytes) <= static_cast<std::int64_t>(kLapBytes));
      }
    }
    pair.send(kBlockBytes);
    pair.take();
  }
}

CASE(a_lap_is_as_many_messages_as_it_says) {
  for (const std::uint64_t bytes : {std::uint64_t{4096}, std::uint64_t{20'000}, kBlockBytes}) {
    Pair pair;
    const std::int64_t first = pair.send(bytes);
    for (unsigned i = 1; i < Ring::lap(bytes); ++i) CHECK(pair.send(bytes) != first);
    pair.take();
    CHECK_EQUAL(pair.send(bytes), first);
  }
}

}  // namespace
