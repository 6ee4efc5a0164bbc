// Reading the memory of other ranks of this host in place.
//
//   private        process_vm_readv, where the kernel permits it (Yama, containers)
//   in an arena    mapped here too, once it is first seen (arena.h)
//   this process   ranks may be threads of one
//
// Nobody writes into another rank's memory: whatever happens, a rank that returned from a call with
// an error may free what it passed. A reader must therefore check, after reading, whether the group
// is in trouble: only if not, the data is valid.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "engine/arena.h"
#include "engine/region.h"

namespace rallypoint {

// Which of each other's memory all ranks of a host can read, as bits.
using PeerMemoryAccess = unsigned;
inline constexpr PeerMemoryAccess kArenas = 1;
inline constexpr PeerMemoryAccess kPrivate = 2;
inline constexpr PeerMemoryAccess kAlways = 4;  // private memory, without a trial (ways.h)

// Where a message lies in its sender's memory.
struct Place {
  std::uint64_t address;
  ArenaPlace arena;  // the same place, if it is in an arena
};

// Bytes of another rank's memory, and where they are to be copied to.
struct RemotePart {
  std::uint64_t address;
  std::byte* target;
  std::uint64_t bytes;
};

class PeerMemory {
 public:
  explicit PeerMemory(Region& region);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Permits the ranks of this host to read this process's memory, as far as that is in its power.
  static void let_peers_read();

  // Which memory this rank can read of all others on this host, which must have mapped the region.
  PeerMemoryAccess probe() const;
  // Which memory all of them can read: the same on each, and fixed before the first call.
  PeerMemoryAccess reach = 0;

  // Sender: whether others can read this private memory; they cannot, for instance, if it is a
  // device's.
  bool can_expose(const std::byte* at) const;
  Place place_of(const std::byte* at, std::uint64_t bytes) const;

  // Receiver: returns none, peer_lost or unreadable.
  Trouble read(std::uint32_t rank, std::uint64_t address, std::byte* target,
               std::uint64_t bytes) const;
  // The same of many places, in few calls of the kernel's.
  Trouble read(std::uint32_t rank, std::span<const RemotePart> parts) const;

  // For tests: if false, other ranks of this process are treated like those of another process.
  bool knows_itself = true;

  bool is_own(std::uint32_t rank) const { return pid_of(rank) == pid_ && knows_itself; }
  pid_t pid_of(std::uint32_t rank) const {
    return region_.state(rank).pid.load(std::memory_order_relaxed);
  }

 private:
  const Region& region_;
  pid_t pid_;
  std::uint64_t word_;  // which peers try to read
};

// Other ranks' arenas as one receiver has mapped them; not thread-safe.
class PeerViews {
 public:
  explicit PeerViews(const PeerMemory& memory) : memory_(memory) {}

  // Where the bytes are in this process, valid until `trim`; null if PeerMemory must read them.
  const std::byte* find(std::uint32_t rank, const Place& place, std::uint64_t bytes);
  void trim();

 private:
  struct View {
    std::shared_ptr<const std::byte> base;  // null: mapping failed
    std::uint64_t bytes = 0;
  };
  View view_of(std::uint32_t rank, const ArenaPlace& place);

  const PeerMemory& memory_;
  // By rank, and the file of the arena.
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>, View> views_;
};

}  // namespace rallypoint
