// A rank's view of the shared region: the mapping, its peers, and whether they are alive.
//
// It knows which ranks there are, how to wake a sleeper, and how to spread trouble. It moves no
// messages.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/layout.h"
#include "engine/peer_processes.h"

namespace rallypoint {

// A probe asks whether ranks on different hosts wait for each other in a cycle: each rank passes it
// on to the rank that it waits for, until it comes back to the first.
struct Probe {
  std::uint64_t epoch;  // the epoch of the first rank's wait
  // Of the last rank's message: the last that it received, or the one that it sends.
  std::uint64_t sequence;
  std::int32_t slot;  // of its envelope, if it sends
  std::vector<CircleMember> members;
};
inline constexpr std::size_t kMostProbed = 56;

// Exchanges with ranks on other hosts what the ranks of each host see in their region. Any thread
// may call it.
class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual void spread(const Poison& poison) = 0;
  // Asks a rank what its call of this number is, once it has made it; its record then appears here,
  // as if it were on this host.
  virtual void ask(std::uint32_t rank, std::uint64_t number) = 0;
  // This rank has recorded its call of this number.
  virtual void answer(std::uint64_t number) = 0;
  // Sends a probe to a rank by way of `via`, a rank on another host, which is that rank itself if
  // it is there.
  virtual void send_probe(std::uint32_t via, std::uint32_t rank, const Probe& probe) = 0;
  virtual std::vector<Probe> take_probes() = 0;
  // Says goodbye to all ranks: the silence of this rank then is not a loss.
  virtual void leave() = 0;
};

class Region {
 public:
  // Takes a descriptor of `Layout(ranks).bytes()` zeroed bytes; it may be closed afterwards. `far`
  // are the ranks that do not share it: what is known of them lies in memory of this process.
  // Throws std::system_error if it cannot be mapped, std::runtime_error if it is not such a region.
  Region(int fd, std::uint32_t rank, std::uint32_t ranks, const std::vector<std::uint32_t>& far);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::uint32_t rank() const { return rank_; }
  std::uint32_t ranks() const { return ranks_; }
  const Layout& layout() const { return layout_; }

  bool is_far(std::uint32_t rank) const { return far_[rank]; }
  // Whether there are other ranks on this host.
  bool has_neighbours() const { return std::count(far_.begin(), far_.end(), false) > 1; }
  bool has_far() const { return mirror_ != nullptr; }
  // The object at an offset of the layout that belongs to the rank.
  template <typename T>
  T* at(std::uint32_t rank, std::size_t offset) const {
    return reinterpret_cast<T*>((far_[rank] ? mirror_.get() : base_) + offset);
  }
  RankState& state(std::uint32_t rank) const { return *states_[rank]; }
  CallRecord* calls(std::uint32_t rank) const { return at<CallRecord>(rank, layout_.calls(rank)); }
  Poison& poison() const { return reinterpret_cast<Header*>(base_)->poison; }
  // Whether there is trouble. A rank that sees trouble may give memory back to the program: a rank
  // that still reads a message there, and finds it overwritten, must then see the trouble too.
  bool poisoned() const {
    if (poison().blame.load(std::memory_order_acquire) == 0) return false;
    std::atomic_thread_fence(std::memory_order_release);
    return true;
  }
  Blame blame() const { return Blame::unpacked(poison().blame.load(std::memory_order_acquire)); }
  // Whether the details of the trouble are there. Waits a little for a rank that may still be
  // writing them: it may also have been killed.
  bool await_details() const;

  // Begins to watch the processes of this host's peers; each must have mapped the region by now.
  // Returns the first rank that is not there, or -1.
  int watch_peers();
  // A rank whose process is gone although it never left, or -1.
  int first_lost();
  // Marks a far rank as gone although it never left.
  void lose(std::uint32_t rank);
  // All other ranks that have left, or whose process is gone, as far as is known here.
  std::vector<std::uint32_t> gone() const;
  Presence presence(std::uint32_t rank) const {
    return static_cast<Presence>(state(rank).presence.load(std::memory_order_acquire));
  }
  void leave();

  // Publishes the core on which this rank runs.
  void say_core() const;
  // Whether the rank was last seen on another core than this one, or on this one. Of a rank that
  // has not waited yet, neither is known.
  bool is_elsewhere(std::uint32_t rank) const;
  bool is_here(std::uint32_t rank) const;

  // Call after a store that the rank may be waiting for. A sleeper first announces its sleep, then
  // checks again; the fence makes sure that one of the two sees the other.
  void wake(std::uint32_t rank) const {
    if (state(rank).sleeping.load(std::memory_order_relaxed) != 0) ring(rank);
  }
  void wake_self() const { ring(rank_); }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

  // The first call takes effect and wakes all ranks.
  void spread(Trouble trouble, std::int32_t culprit, const CallRecord* theirs,
              const CallRecord* ours, std::uint64_t sent = 0, std::uint64_t expected = 0,
              double timeout_s = 0);
  // Spreads that ranks wait for each other in a cycle.
  void spread_circle(const std::vector<CircleMember>& members);
  // Takes over what a far rank has spread.
  void adopt(const Poison& theirs);
  void set_messenger(Messenger* messenger) { messenger_ = messenger; }
  Messenger* messenger() const { return messenger_; }  // null: all ranks are on this host

 private:
  bool begin_poison(const Blame& blame);
  void end_poison(bool tells_others = true);
  void ring(std::uint32_t rank) const;

  std::uint32_t rank_;
  std::uint32_t ranks_;
  Layout layout_;
  std::shared_ptr<std::byte> mapping_;
  std::byte* base_ = nullptr;
  std::shared_ptr<std::byte> mirror_;  // of the areas of far ranks; null if there are none
  std::vector<bool> far_;
  Messenger* messenger_ = nullptr;
  std::atomic<int> lost_far_{-1};           // the first one
  std::vector<std::atomic<bool>> is_lost_;  // by rank
  std::vector<RankState*> states_;
  PeerProcesses processes_;
};

void copy_record(CallRecord& to, const CallRecord& from);

}  // namespace rallypoint
