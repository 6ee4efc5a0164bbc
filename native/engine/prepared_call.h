// Everything that depends only on the kind and size of a call, so that similar calls need not
// compute it again.
#pragma once

#include <cstdint>

#include "engine/call.h"
#include "engine/peer_memory.h"
#include "engine/reduce.h"

namespace rallypoint {

// Smaller messages are copied, because waiting until they have been read in place costs more.
inline constexpr std::uint64_t kExposedBytes = 32 << 10;  // in arenas
inline constexpr std::uint64_t kReadBytes = 64 << 10;     // by the kernel

// How the items of a call are split: blocks into chunks, chunks into pieces of at most one message.
struct Cut {
  std::uint64_t item = 0;    // bytes
  std::uint64_t count = 0;   // items of a block
  std::uint64_t chunk = 0;   // items of all chunks but the last ones, which may be shorter
  std::uint64_t piece = 0;   // items
  std::uint64_t pieces = 0;  // iterations of the program
  bool is_simple = false;    // one lane, one chunk, one piece: nothing is split

  Cut() = default;
  Cut(const Program& program, std::uint64_t count, std::uint64_t item);
};

struct PreparedCall {
  PreparedCall() = default;
  // `reach`: which of each other's memory ranks of this host may read.
  PreparedCall(const Call& call, PeerMemoryAccess reach);
  // Whether the preparation is valid for this call, too.
  bool fits(const Call& call) const {
    return program == call.program && cut.count == call.count && what.bits() == call.what.bits() &&
           has_tables == call.has_tables();
  }

  const Program* program = nullptr;
  Operator what{};
  std::uint32_t lane_count = 0;
  Cut cut;
  bool is_simple = false;  // nothing is split, and messages are copied
  std::uint64_t block_bytes = 0;
  bool has_tables = false;   // for blocks that are not contiguous
  bool past_caches = false;  // for receiving: no cache holds the data or its target
  bool may_expose = false;   // ranks of this host may read messages in place
  Reducer reducer = nullptr;
  Reducer average = nullptr;
  std::uint64_t divisor = 1;  // within a reduction
  bool divides = false;       // at the end of each piece
  std::uint64_t signature = 0;
};

}  // namespace rallypoint
