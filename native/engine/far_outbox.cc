#include "engine/far_outbox.h"

namespace rallypoint {

std::byte* FarOutbox::begin(int slot, const Mail& mail) const {
  Envelope& to = envelope(slot);
  if (to.sequence.load(std::memory_order_acquire) != 0 ||
      static_cast<unsigned>(mail.dtype) >= kDTypes || mail.bytes % item_bytes(mail.dtype) != 0 ||
      mail.sequence == 0) {
    return nullptr;
  }
  to.to.store(region_.rank(), std::memory_order_relaxed);
  to.tag.store(mail.tag, std::memory_order_relaxed);
  to.bytes = mail.bytes;
  to.number = mail.number;
  to.dtype = static_cast<std::uint8_t>(mail.dtype);
  to.is_synchronous = mail.is_synchronous;
  to.is_exposed = to.is_touched = to.is_timed = false;
  to.request.store(Request::none, std::memory_order_relaxed);
  if (mail.bytes <= sizeof to.payload) return to.payload;
  return region_.at<std::byte>(rank_, region_.layout().blocks(rank_)) +
         static_cast<std::size_t>(slot) * kMailBytes;
}

void FarOutbox::publish(int slot, std::uint64_t sequence) const {
  auto& outbox = *region_.at<Outbox>(rank_, region_.layout().outbox(rank_));
  envelope(slot).sequence.store(sequence, std::memory_order_release);
  outbox.published.store(sequence, std::memory_order_release);
}

}  // namespace rallypoint
