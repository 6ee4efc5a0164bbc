// A copy of a far rank's outbox, in which a mailbox looks for its envelopes as if it were on this
// host. Transports write it; this is all they need to know of its layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/region.h"
#include "engine/transport.h"

namespace rallypoint {

class FarOutbox {
 public:
  FarOutbox(const Region& region, std::uint32_t rank) : region_(region), rank_(rank) {}

  // Begins an envelope in a slot: returns where its payload goes, if it comes with the envelope
  // (is_small); null if the slot is in use, or the envelope is invalid.
  std::byte* begin(int slot, const Mail& mail) const;
  // The payload is complete: receives may match the envelope.
  void publish(int slot, std::uint64_t sequence) const;

  // Whether the payload comes with the envelope.
  static bool is_small(std::uint64_t bytes) { return bytes <= kMailBytes; }

 private:
  Envelope& envelope(int slot) const {
    return region_.at<Envelope>(rank_, region_.layout().envelopes(rank_))[slot];
  }

  const Region& region_;
  std::uint32_t rank_;
};

}  // namespace rallypoint
