// Messages that a rank takes in although it does not want them yet, so that their sender has room
// for the one that it waits for.

#include <cstring>
#include <new>

#include "engine/mailbox.h"

namespace rallypoint {

// Who has slept has waited in vain: perhaps what it waits for finds no room.
bool Mailbox::advance_stash(bool has_slept) {
  if (region_.poisoned()) {
    for (const Stashed& each : stash_) pending_.fetch_sub(each.is_whole ? 0 : 1);
    stash_.clear();
    return false;
  }
  bool moved = false;
  if (has_slept) {
    for (std::uint32_t source = 0; source < region_.ranks(); ++source) {
      // Large ones, which take memory, and those whose senders wait, only if that does not help.
      if (is_crowded(source)) moved |= take_in(source, false);
      if (is_crowded(source)) moved |= take_in(source, true);
    }
  }
  for (Stashed& each : stash_) {
    if (each.is_whole) continue;
    moved |= receive(each.item, each.is_whole);
    if (each.is_whole) pending_.fetch_sub(1, std::memory_order_release);
  }
  return moved;
}

// Whether a rank has no room for a further message to this one.
bool Mailbox::is_crowded(std::uint32_t source) const {
  const unsigned ours = waiting_for(source, region_.rank());
  if (ours == 0 || ours >= room_for_one(source)) return ours > 0;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    const std::uint32_t to = envelope(source, slot).to.load(std::memory_order_relaxed);
    if (sequence_for(to, source, slot) == 0) return false;
  }
  return true;
}

bool Mailbox::take_in(std::uint32_t source, bool costly) {
  bool moved = false;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    Envelope& from = envelope(source, slot);
    if (sequence_for(region_.rank(), source, slot) == 0 ||
        from.request.load(std::memory_order_relaxed) != Request::none ||
        (is_large(from.bytes) || from.is_synchronous) != costly) {
      continue;
    }
    std::unique_ptr<std::byte[]> data(new (std::nothrow) std::byte[from.bytes]);
    if (data == nullptr) break;
    Stashed& stashed = stash_.emplace_back();
    stashed.data = std::move(data);
    stashed.sequence = from.sequence;
    stashed.transfer = {.peer = source,
                        .tag = from.tag,
                        .dtype = from.type(),
                        .data = stashed.data.get(),
                        .bytes = from.bytes};
    stashed.item.transfer = &stashed.transfer;
    stashed.item.number = from.number;
    stashed.item.slot = slot;
    from.request.store(Request::matched, std::memory_order_release);
    pending_.fetch_add(1, std::memory_order_release);
    moved = true;
  }
  return moved;
}

Mailbox::Stashed* Mailbox::find_stashed(std::uint32_t source, std::int32_t tag) {
  Stashed* found = nullptr;
  for (Stashed& each : stash_) {
    if (each.is_wanted || each.transfer.peer != source || each.transfer.tag != tag) continue;
    if (found == nullptr || each.sequence < found->sequence) found = &each;
  }
  return found;
}

bool Mailbox::take_stashed(Item& item, bool& done) {
  const Stashed& from = *item.stashed;
  const Transfer& transfer = *item.transfer;
  if (from.transfer.bytes != transfer.bytes || from.transfer.dtype != transfer.dtype) {
    item.trouble = fail_against(item, from.item.number, from.transfer.bytes, from.transfer.dtype);
    return true;
  }
  if (!from.is_whole) return false;
  if (transfer.bytes > 0) std::memcpy(transfer.data, from.data.get(), transfer.bytes);
  stash_.remove_if([&](const Stashed& each) { return &each == &from; });
  item.stashed = nullptr;
  done = true;
  return true;
}

}  // namespace rallypoint
