// The outboxes of all ranks as laid out in the region: which messages are there, and for whom.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/layout.h"
#include "engine/region.h"

namespace rallypoint {

// Where the parts of a message go, one after the other and then again from the start.
struct Room {
  std::byte* at;
  std::uint64_t part;  // bytes
  std::uint32_t parts;
  Parts& progress;

  bool holds(std::uint64_t bytes) const { return bytes <= part * parts; }
};

class Outboxes {
 public:
  explicit Outboxes(const Region& region) : region_(region) {}

  Envelope& envelope(std::uint32_t rank, int slot) const {
    return region_.at<Envelope>(rank, region_.layout().envelopes(rank))[slot];
  }
  std::byte* block(std::uint32_t rank, int slot) const {
    return region_.at<std::byte>(rank, region_.layout().blocks(rank)) +
           static_cast<std::size_t>(slot) * kMailBytes;
  }
  Room room_of(std::uint32_t rank, int slot, std::uint64_t bytes, bool is_wide) const;
  Room room_of(std::uint32_t rank, int slot) const {
    return room_of(rank, slot, envelope(rank, slot).bytes, envelope(rank, slot).is_wide);
  }
  // The sequence of the last message that a rank has sent.
  std::atomic<std::uint64_t>& published(std::uint32_t rank) const {
    return region_.at<Outbox>(rank, region_.layout().outbox(rank))->published;
  }
  std::atomic<std::uint64_t>& taken(std::uint32_t by, std::uint32_t from) const {
    return region_.at<std::atomic<std::uint64_t>>(by, region_.layout().taken(by))[from];
  }

  // The sequence of the message in a slot for a rank, or 0. Another rank may see it while it is
  // being replaced.
  std::uint64_t sequence_for(std::uint32_t to, std::uint32_t from, int slot) const;
  // The oldest message that nobody has taken, with a sequence below the limit; -1 if there is none.
  // A null tag means any tag.
  int find(std::uint32_t source, std::uint32_t to, const std::int32_t* tag,
           std::uint64_t limit) const;
  // How many messages wait for a rank.
  unsigned waiting_for(std::uint32_t from, std::uint32_t to) const;
  // The most envelopes of a rank that may hold messages for one receiver: the others need room too,
  // however many messages that one leaves unread. Between hosts each pair has its own room.
  unsigned room_for_one(std::uint32_t peer) const {
    return region_.ranks() > 2 && !region_.is_far(peer) ? kEnvelopes / 2 : kEnvelopes;
  }
  // Whether a rank has no room for another message to this one.
  bool is_crowded(std::uint32_t source) const;

 private:
  const Region& region_;
};

}  // namespace rallypoint
