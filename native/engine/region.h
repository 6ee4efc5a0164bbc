// A rank's view of the shared region: the mapping, its peers, and their lives.
//
// It knows who is there, how to wake a sleeper, and how to spread trouble. It moves no messages.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/layout.h"

namespace rallypoint {

class Region {
 public:
  // Takes a descriptor of `Layout(ranks).bytes()` zeroed bytes; it may be closed afterwards.
  // Throws std::system_error if it cannot be mapped, std::runtime_error if it is not such a region.
  Region(int fd, std::uint32_t rank, std::uint32_t ranks);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::uint32_t rank() const { return rank_; }
  std::uint32_t ranks() const { return ranks_; }
  const Layout& layout() const { return layout_; }

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  RankState& state(std::uint32_t rank) const { return *states_[rank]; }
  Poison& poison() const { return at<Header>(0)->poison; }
  bool poisoned() const { return poison().state.load(std::memory_order_acquire) != 0; }

  // Opens handles on all peers' processes; every rank must have mapped the region by now.
  // Returns the first rank that is not there, or -1.
  int watch_peers();
  // A rank whose process is gone although it never left, or -1.
  int first_lost();
  Presence presence(std::uint32_t rank) const {
    return static_cast<Presence>(state(rank).presence.load(std::memory_order_acquire));
  }
  void leave();

  // Call after a store that the rank may be waiting for. A sleeper first says so, then looks again;
  // the fence makes sure that one of the two sees the other.
  void wake(std::uint32_t rank) const {
    if (state(rank).sleeping.load(std::memory_order_relaxed) != 0) ring(rank);
  }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

  // The first call wins and all ranks are woken.
  void spread(Trouble trouble, std::int32_t culprit, const CallRecord* theirs,
              const CallRecord* ours, std::uint64_t sent = 0, std::uint64_t expected = 0,
              double timeout_s = 0);
  // Ranks that wait for each other in a circle.
  void spread_circle(const std::vector<CircleMember>& members);

 private:
  bool begin_poison(Trouble trouble, std::int32_t culprit);
  void end_poison();
  void ring(std::uint32_t rank) const;

  std::uint32_t rank_;
  std::uint32_t ranks_;
  Layout layout_;
  std::shared_ptr<std::byte> mapping_;
  std::byte* base_ = nullptr;
  std::vector<RankState*> states_;
  std::vector<pollfd> pidfds_;
  std::vector<std::uint32_t> watched_;  // whose they are
};

void copy_record(CallRecord& to, const CallRecord& from);

}  // namespace rallypoint
