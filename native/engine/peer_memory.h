// The memory of other ranks of this host, read where it lies.
//
//   private        process_vm_readv, where the kernel permits it (Yama, containers)
//   in an arena    mapped here too, once it is first seen (arena.h)
//   this process   ranks may be threads of one
//
// Nobody writes into another rank's memory: whatever happens, a rank that returned from a call with
// an error may free what it passed. Who reads must therefore look, after reading, whether the group
// is in trouble: only if not, what was read is what was meant.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "engine/arena.h"
#include "engine/region.h"

namespace rallypoint {

// What of each other's memory all ranks of a host can read: bits.
using PeerMemoryAccess = unsigned;
inline constexpr PeerMemoryAccess kArenas = 1;
inline constexpr PeerMemoryAccess kPrivate = 2;
inline constexpr PeerMemoryAccess kAlways = 4;  // private memory, without a trial (reading.h)

// Where a message lies in its sender's memory.
struct Place {
  std::uint64_t address;
  ArenaPlace arena;  // the same, if it is in one
};

class PeerMemory {
 public:
  explicit PeerMemory(Region& region);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Lets the ranks of this host read this process's memory, as far as that is for it to say.
  static void let_peers_read();

  // What this rank can read of all others of this host; they must have mapped the region by now.
  PeerMemoryAccess probe() const;
  // What all of them can: the same on each, and settled before the first call.
  PeerMemoryAccess reach = 0;

  // Sender: whether others can read this private memory; that of a device, for one, they cannot.
  bool can_expose(const std::byte* at) const;
  Place place_of(const std::byte* at, std::uint64_t bytes) const;

  // Receiver: returns none, peer_lost or unreadable.
  Trouble read(std::uint32_t rank, std::uint64_t address, std::byte* target,
               std::uint64_t bytes) const;

  // For tests: treat other ranks of this process as if they were of another.
  bool knows_itself = true;

  bool is_own(std::uint32_t rank) const { return pid_of(rank) == pid_ && knows_itself; }
  pid_t pid_of(std::uint32_t rank) const {
    return region_.state(rank).pid.load(std::memory_order_relaxed);
  }

 private:
  const Region& region_;
  pid_t pid_;
  std::uint64_t word_;  // that peers try to read
};

// Other ranks' arenas as one receiver has mapped them; not for several threads at once.
class PeerViews {
 public:
  explicit PeerViews(const PeerMemory& memory) : memory_(memory) {}

  // Where the bytes are for this process, until `trim`, or null: PeerMemory must read them.
  const std::byte* find(std::uint32_t rank, const Place& place, std::uint64_t bytes);
  void trim();

 private:
  struct View {
    std::shared_ptr<const std::byte> base;  // null: it cannot be mapped
    std::uint64_t bytes = 0;
  };
  View view_of(std::uint32_t rank, const ArenaPlace& place);

  const PeerMemory& memory_;
  // By rank, and the file of the arena.
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>, View> views_;
};

}  // namespace rallypoint
