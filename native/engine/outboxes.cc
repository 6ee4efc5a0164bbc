#include "engine/outboxes.h"

#include <algorithm>
#include <bit>

#include "engine/copy.h"

namespace rallypoint {
namespace {

constexpr std::uint64_t kPartBytes = 16 << 10;  // the smallest
constexpr std::uint64_t kLongPartBytes = 64 << 10;
constexpr std::uint64_t kHugePartBytes = kWideBytes / 4;
constexpr std::uint64_t kWindowBytes = 128 << 10;  // of parts in flight, if they are so small
constexpr std::uint64_t kFewestParts = 4;

}  // namespace

// Small parts, so that both ranks copy at the same time; for longer messages larger ones, which
// cost less.
Room Outboxes::room_of(std::uint32_t rank, int slot, std::uint64_t bytes, bool is_wide) const {
  auto* const progress = region_.at<Parts>(rank, region_.layout().parts(rank));
  if (!is_wide) return {block(rank, slot), kPartBytes, kMailBytes / kPartBytes, progress[slot]};
  const std::uint64_t part =
      bytes >= kHugeBytes ? kHugePartBytes
                          : std::clamp(std::bit_floor(bytes / 8), kPartBytes, kLongPartBytes);
  const std::uint64_t parts = std::max(kWindowBytes / part, kFewestParts);
  return {region_.at<std::byte>(rank, region_.layout().wide(rank)), part,
          static_cast<std::uint32_t>(parts), progress[kEnvelopes]};
}

std::uint64_t Outboxes::sequence_for(std::uint32_t to, std::uint32_t from, int slot) const {
  const Envelope& candidate = envelope(from, slot);
  const std::uint64_t sequence = candidate.sequence.load(std::memory_order_acquire);
  if (sequence == 0 || candidate.to.load(std::memory_order_relaxed) != to) return 0;
  const std::uint64_t ordinal = candidate.ordinal.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (candidate.sequence.load(std::memory_order_relaxed) != sequence) return 0;
  const bool is_gone =
      !region_.is_far(from) && ordinal < taken(to, from).load(std::memory_order_acquire);
  return is_gone ? 0 : sequence;
}

unsigned Outboxes::waiting_for(std::uint32_t from, std::uint32_t to) const {
  unsigned count = 0;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    count += sequence_for(to, from, slot) != 0;
  }
  return count;
}

int Outboxes::find(std::uint32_t source, std::uint32_t to, const std::int32_t* tag,
                   std::uint64_t limit) const {
  int found = -1;
  std::uint64_t oldest = limit;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    const std::uint64_t sequence = sequence_for(to, source, slot);
    if (sequence == 0 || sequence >= oldest) continue;
    const Envelope& candidate = envelope(source, slot);
    if ((tag != nullptr && candidate.tag.load(std::memory_order_relaxed) != *tag) ||
        candidate.request.load(std::memory_order_relaxed) != Request::none) {
      continue;
    }
    found = slot;
    oldest = sequence;
  }
  return found;
}

bool Outboxes::is_crowded(std::uint32_t source) const {
  const unsigned ours = waiting_for(source, region_.rank());
  if (ours == 0 || ours >= room_for_one(source)) return ours > 0;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    const std::uint32_t to = envelope(source, slot).to.load(std::memory_order_relaxed);
    if (sequence_for(to, source, slot) == 0) return false;
  }
  return true;
}

}  // namespace rallypoint
