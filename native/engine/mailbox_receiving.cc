// How a mailbox receives: the oldest envelope that matches, and then its payload.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/copy.h"
#include "engine/mailbox.h"
#include "engine/waiting.h"

namespace rallypoint {

bool Mailbox::receive(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (item.stashed == nullptr && item.slot < 0 && !match(item)) return false;
  if (item.stashed != nullptr) return take_stashed(item, done);
  Envelope& from = boxes_.envelope(transfer.peer, item.slot);
  if (from.bytes != transfer.bytes || from.type() != transfer.dtype) {
    item.trouble = fail_against(item, from.number, from.bytes, from.type());
    return true;
  }
  const bool moved = take(item, from, done);
  if (done) {
    release(item, from);
  } else if (from.request.load(std::memory_order_relaxed) == Request::none) {
    from.request.store(Request::matched, std::memory_order_release);
  }
  return moved;
}

// Whether the source may have a message that nobody has examined: asked without the lock, and
// continuously by a rank that waits for one.
bool Mailbox::has_news(std::uint32_t source, bool looks_closely) const {
  const Expected& next = expected_[source];
  const std::uint64_t seen = next.seen;
  const int slot = static_cast<int>(next.slot);
  return boxes_.envelope(source, slot).sequence.load(std::memory_order_relaxed) > seen ||
         (looks_closely && boxes_.published(source).load(std::memory_order_relaxed) > seen);
}

bool Mailbox::match(Item& item) {
  Transfer& transfer = *item.transfer;
  const bool any = transfer.peer == kAnyRank;
  const std::uint32_t ranks = region_.ranks();
  for (std::uint32_t i = 0; i < (any ? ranks : 1); ++i) {
    const std::uint32_t source = any ? (last_source_ + 1 + i) % ranks : transfer.peer;
    int slot = -1;
    if (limits_[source] == kNoLimit) {
      slot = find_expected(source, transfer.tag);
      limits_[source] = 0;
      if (slot >= 0) expected_[source].seen = boxes_.envelope(source, slot).sequence.load();
    }
    StashedMessage* stashed = nullptr;
    if (slot < 0) {
      if (limits_[source] == 0) {
        limits_[source] = boxes_.published(source).load(std::memory_order_acquire) + 1;
      }
      if (!any && item.seen == limits_[source]) continue;  // nothing has arrived since it checked
      stashed = stash_.find(source, transfer.tag);
      const std::uint64_t limit = stashed != nullptr ? stashed->sequence : limits_[source];
      slot = boxes_.find(source, region_.rank(), &transfer.tag, limit);
      expected_[source].seen = limits_[source] - 1;
      if (slot < 0 && stashed == nullptr) {
        item.seen = limits_[source];
        continue;
      }
    }
    if (any) last_source_ = source;
    circles_.end(transfer);  // before others can see that its reason to wait is gone
    transfer.peer = source;
    if (slot < 0) {
      stashed->is_wanted = true;
      item.stashed = stashed;
    } else {
      item.slot = slot;
      expected_[source].slot = static_cast<std::uint32_t>(slot + 1) % kEnvelopes;
    }
    return true;
  }
  return false;
}

std::optional<std::int32_t> Mailbox::unwanted_tag(const Transfer& receive) const {
  const std::lock_guard lock(mutex_);
  const bool any = receive.peer == kAnyRank;
  for (std::uint32_t i = 0; i < (any ? region_.ranks() : 1); ++i) {
    const std::uint32_t source = any ? i : receive.peer;
    const std::uint64_t all = boxes_.published(source).load(std::memory_order_acquire) + 1;
    const int slot = boxes_.find(source, region_.rank(), nullptr, all);
    if (slot >= 0) return boxes_.envelope(source, slot).tag.load(std::memory_order_relaxed);
    if (const auto tag = stash_.unwanted_tag(source)) return tag;
  }
  return std::nullopt;
}

// The slot of the message that must be the source's oldest, if it has arrived.
int Mailbox::find_expected(std::uint32_t source, std::int32_t tag) const {
  const Expected& next = expected_[source];
  const int slot = static_cast<int>(next.slot);
  if (boxes_.sequence_for(region_.rank(), source, slot) == 0) return -1;
  const Envelope& candidate = boxes_.envelope(source, slot);
  return candidate.ordinal.load(std::memory_order_relaxed) == next.ordinal &&
                 candidate.tag.load(std::memory_order_relaxed) == tag
             ? slot
             : -1;
}

bool Mailbox::take(Item& item, Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  const bool is_far = region_.is_far(transfer.peer);
  if (from.bytes <= sizeof from.payload) {
    if (from.bytes > 0) std::memcpy(transfer.data, from.payload, from.bytes);
    done = true;
    return true;
  }
  if (is_far) return take_far(item, from, done);
  if (from.is_exposed && !item.takes_parts) return take_exposed(item, from, done);
  return take_parts(item, from, done);
}

// The sender may reuse the envelope. A message taken in order is only counted, because clearing its
// line would delay the next store, which may be the answer. Senders are not reliably woken for
// small messages: one that waits for room checks for itself within a millisecond.
void Mailbox::release(Item& item, Envelope& from) {
  const std::uint32_t source = item.transfer->peer;
  const bool may_be_awaited = from.is_synchronous || is_large(from.bytes) || from.is_timed;
  const bool was_exposed = from.is_exposed && !item.takes_parts;
  const bool is_far = region_.is_far(source);
  if (is_far) courier_->take(source, item.slot);
  const std::uint64_t ordinal = from.ordinal.load(std::memory_order_relaxed);
  const bool in_turn = !is_far && (ordinal == expected_[source].ordinal ||
                                   boxes_.waiting_for(source, region_.rank()) == 1);
  if (from.is_timed) std::memcpy(from.payload, &item.copied_s, sizeof item.copied_s);
  if (!in_turn || may_be_awaited) from.sequence.store(0, std::memory_order_release);
  if (in_turn) {
    expected_[source].ordinal = ordinal + 1;
    boxes_.taken(region_.rank(), source).store(ordinal + 1, std::memory_order_release);
  }
  if (may_be_awaited) Region::fence();
  region_.wake(source);
  // The sender may have released its memory in the meantime.
  if (was_exposed) {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (region_.poisoned()) item.trouble = Trouble::aborted;
  }
}

// Reads the payload from the sender's memory, or requests it in parts if that turns out to be
// impossible.
bool Mailbox::take_exposed(Item& item, Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  Place place;
  std::memcpy(&place, from.payload, sizeof place);
  const std::uint64_t length = std::min<std::uint64_t>(kTurnBytes, transfer.bytes - item.moved);
  if (item.moved == 0) views_.trim();
  if (const std::byte* const at = views_.find(transfer.peer, place, transfer.bytes)) {
    copy_part(transfer.data + item.moved, at + item.moved, length, transfer.bytes);
  } else {
    const Trouble trouble =
        memory_.read(transfer.peer, place.address + item.moved, transfer.data + item.moved, length);
    if (trouble == Trouble::peer_lost) return false;  // which will be noticed elsewhere
    if (trouble != Trouble::none) {
      item.takes_parts = true;
      item.moved = 0;
      from.request.store(Request::parts, std::memory_order_release);
      Region::fence();
      region_.wake(transfer.peer);
      return true;
    }
  }
  item.moved += length;
  done = item.moved == transfer.bytes;
  return true;
}

bool Mailbox::take_parts(Item& item, const Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  const Room room = boxes_.room_of(transfer.peer, item.slot);
  const bool holds_all = room.holds(transfer.bytes);
  const std::uint64_t begin = item.moved;
  const std::uint64_t end = std::min(transfer.bytes, begin + kTurnBytes);
  std::uint32_t taken = from.before + static_cast<std::uint32_t>(begin / room.part);
  std::uint32_t written = from.before + !from.is_exposed;
  const unsigned polls = item.has_polled ? 0 : policy_.polls(region_, transfer.peer);
  while (item.moved < end) {
    for (unsigned spin = 0; !is_before(taken, written) && spin <= polls; ++spin) {
      if (spin > 0) relax();
      written = room.progress.written.load(std::memory_order_acquire);
    }
    if (!is_before(taken, written)) break;
    const std::uint64_t length = std::min(room.part, transfer.bytes - item.moved);
    const std::byte* const part = room.at + taken % room.parts * room.part;
    copy_in(item, from, part, length);
    item.moved += length;
    ++taken;
    if (!holds_all) room.progress.taken.store(taken, std::memory_order_release);
  }
  done = item.moved == transfer.bytes;
  item.has_polled = item.moved == begin;
  if (item.has_polled) return false;
  if (!done) {
    Region::fence();
    region_.wake(transfer.peer);
  }
  return true;
}

void Mailbox::copy_in(Item& item, const Envelope& from, const std::byte* part,
                      std::uint64_t length) {
  const double began_s = from.is_timed ? now_s() : 0;
  copy_part(item.transfer->data + item.moved, part, length, from.bytes);
  if (from.is_touched) touch(part, length);
  if (from.is_timed) item.copied_s += now_s() - began_s;
}

bool Mailbox::take_far(Item& item, const Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (!is_large(from.bytes)) {
    std::memcpy(transfer.data, boxes_.block(transfer.peer, item.slot), from.bytes);
    done = true;
    return true;
  }
  if (!item.takes_parts) {
    item.takes_parts = true;
    courier_->request(transfer.peer, item.slot, transfer.data, transfer.bytes);
    return true;
  }
  const std::uint64_t landed = courier_->landed(transfer.peer, item.slot);
  done = landed == transfer.bytes;
  return std::exchange(item.moved, landed) != landed;
}

bool Mailbox::take_stashed(Item& item, bool& done) {
  const StashedMessage& from = *item.stashed;
  const Transfer& transfer = *item.transfer;
  if (from.transfer.bytes != transfer.bytes || from.transfer.dtype != transfer.dtype) {
    item.trouble = fail_against(item, from.item.number, from.transfer.bytes, from.transfer.dtype);
    return true;
  }
  if (!from.is_whole) return false;
  if (transfer.bytes > 0) std::memcpy(transfer.data, from.data.get(), transfer.bytes);
  stash_.drop(from);
  item.stashed = nullptr;
  done = true;
  return true;
}

// A rank that has slept has waited without success: perhaps the message that it waits for finds no
// room.
bool Mailbox::advance_stash(bool has_slept) {
  if (region_.poisoned()) {
    pending_.fetch_sub(stash_.clear());
    return false;
  }
  const std::size_t begun = has_slept ? stash_.take_in() : 0;
  pending_.fetch_add(begun, std::memory_order_release);
  bool moved = begun > 0;
  for (StashedMessage& each : stash_.messages()) {
    if (each.is_whole) continue;
    moved |= receive(each.item, each.is_whole);
    if (each.is_whole) pending_.fetch_sub(1, std::memory_order_release);
  }
  return moved;
}

}  // namespace rallypoint
