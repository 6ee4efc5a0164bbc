// How a mailbox sends: an envelope and, if the payload does not fit into it, part after part.

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/copy.h"
#include "engine/mailbox.h"
#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr std::uint64_t kFarPartBytes = 256 << 10;

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

}  // namespace

bool Mailbox::send(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (region_.is_far(transfer.peer)) return send_far(item, done);
  if (item.slot >= 0) return go_on_sending(item, done);
  if (is_blocked_[transfer.peer]) return false;
  const int slot = room_for(transfer.peer);
  if (slot < 0) {
    is_blocked_[transfer.peer] = true;
    return false;
  }
  put(item, slot);
  circles_.say_slot(item);
  Region::fence();
  region_.wake(transfer.peer);
  if (item.moved < transfer.bytes) {
    go_on_sending(item, done);
  } else {
    done = !transfer.is_synchronous;
  }
  return true;
}

// The receiver may be polling the line: all stores to it are made together, or the cache line would
// bounce between the two cores. The first part is present when the envelope is.
void Mailbox::put(Item& item, int slot) {
  const Transfer& transfer = *item.transfer;
  const std::uint32_t self = region_.rank();
  const bool is_tiny = transfer.bytes <= sizeof(Envelope::payload);
  Place place;
  const bool exposes = find_place(item, slot, place);
  item.slot = slot;
  item.sequence = ++sequence_;
  const bool is_wide = !exposes && is_large(transfer.bytes) && take_wide(item);
  if (!is_tiny) {
    const Room room = boxes_.room_of(self, slot, transfer.bytes, is_wide);
    item.before = room.progress.written.load(std::memory_order_relaxed);
    if (!room.holds(transfer.bytes) &&  // payloads that fitted were not counted
        room.progress.taken.load(std::memory_order_relaxed) != item.before) {
      room.progress.taken.store(item.before, std::memory_order_relaxed);
    }
    const std::uint64_t length = exposes ? 0 : std::min(room.part, transfer.bytes);
    copy_out(item, room.at + item.before % room.parts * room.part, length);
    item.moved = length;
  }
  Envelope& to = boxes_.envelope(self, slot);
  to.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  to.to.store(transfer.peer, std::memory_order_relaxed);
  to.tag.store(transfer.tag, std::memory_order_relaxed);
  to.bytes = transfer.bytes;
  to.number = item.number;
  to.dtype = static_cast<std::uint8_t>(transfer.dtype);
  to.is_synchronous = transfer.is_synchronous;
  to.is_exposed = exposes;
  to.is_wide = is_wide;
  to.is_touched = item.way == Way::touch;
  to.is_timed = timed_.slot == slot;
  to.ordinal.store(ordinals_[transfer.peer]++, std::memory_order_relaxed);
  to.request.store(Request::none, std::memory_order_relaxed);
  if (is_tiny) {
    if (transfer.bytes > 0) std::memcpy(to.payload, transfer.data, transfer.bytes);
    item.moved = transfer.bytes;
  } else {
    to.before = item.before;
    if (exposes) std::memcpy(to.payload, &place, sizeof place);
  }
  to.sequence.store(sequence_, std::memory_order_release);
  boxes_.published(self).store(sequence_, std::memory_order_release);
  used_ |= bit(slot);
  receivers_[slot] = transfer.peer;
  next_ = (slot + 1) % static_cast<int>(kEnvelopes);
}

bool Mailbox::take_wide(const Item& item) {
  const Envelope& user = boxes_.envelope(region_.rank(), wide_slot_);
  if (wide_sequence_ != 0 && user.sequence.load(std::memory_order_acquire) == wide_sequence_) {
    return false;
  }
  wide_slot_ = item.slot;
  wide_sequence_ = item.sequence;
  return true;
}

// The place of a message, if its receiver should read it there.
bool Mailbox::find_place(Item& item, int slot, Place& place) {
  static_assert(sizeof place <= sizeof(Envelope::payload));
  const Transfer& transfer = *item.transfer;
  if (memory_.reach != 0 && is_large(transfer.bytes)) {
    place = memory_.place_of(transfer.data, transfer.bytes);
    if (place.arena.segment != 0) return true;
  }
  if (transfer.bytes >= kTriedBytes) choose_way(item, slot);
  return item.way == Way::read && memory_.can_expose(transfer.data);
}

// The senders of large messages can wait until these are received. Others need not, and programs
// may rely on that: these are not read here, and what is timed is the copying on both sides.
void Mailbox::choose_way(Item& item, int slot) {
  const std::uint64_t bytes = item.transfer->bytes;
  if (is_large(bytes) && (memory_.reach & kAlways) != 0) {
    item.way = Way::read;
    return;
  }
  const bool may_be_read = bytes > kWideBytes && (memory_.reach & kPrivate) != 0;
  Ways ways(Way::copy_past_caches);
  if (may_be_read) ways.add(Way::read);
  WayTrial& trial = trials_.of(nullptr, bytes, ways, is_large(bytes) ? 1 : kEnvelopes);
  if (may_be_read) {
    if (trial.begin()) {
      item.trial = &trial;
      item.posted_s = now_s();
    }
  } else {
    if (timed_.slot >= 0) look_at(timed_.slot);
    if (timed_.slot < 0 && trial.begin()) timed_ = {slot, &trial, 0};
  }
  item.way = trial.way();
}

void Mailbox::copy_out(const Item& item, std::byte* target, std::uint64_t length) {
  const std::byte* const source = item.transfer->data + item.moved;
  const bool is_timed = timed_.slot == item.slot;
  const double began_s = is_timed ? now_s() : 0;
  copy(target, source, length, item.way == Way::copy_past_caches);
  if (is_timed) timed_.copied_s += now_s() - began_s;
}

// An envelope for a message to the peer, or -1. Whether others are free again is checked only when
// needed, because their lines are in the receivers' caches.
int Mailbox::room_for(std::uint32_t peer) {
  look_at(next_);
  if ((used_ & bit(next_)) != 0 || is_full_for(peer)) {
    for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) look_at(slot);
    if (is_full_for(peer)) return -1;
  }
  if ((used_ & bit(next_)) == 0) return next_;
  const int slot = std::countr_one(used_);
  return slot < static_cast<int>(kEnvelopes) ? slot : -1;
}

bool Mailbox::is_full_for(std::uint32_t peer) const {
  const unsigned most = boxes_.room_for_one(peer);
  if (static_cast<unsigned>(std::popcount(used_)) < most) return false;
  unsigned count = 0;
  for (std::uint64_t left = used_; left != 0; left &= left - 1) {
    count += receivers_[std::countr_zero(left)] == peer;
  }
  return count >= most;
}

// A receiver's acknowledgement is in its cache: read it only if the last known value does not
// suffice.
void Mailbox::look_at(int slot) {
  if ((used_ & bit(slot)) == 0) return;
  const Envelope& last = boxes_.envelope(region_.rank(), slot);
  const std::uint32_t peer = receivers_[slot];
  const std::uint64_t ordinal = last.ordinal.load(std::memory_order_relaxed);
  if (ordinal >= taken_[peer]) {
    taken_[peer] = boxes_.taken(peer, region_.rank()).load(std::memory_order_acquire);
  }
  if (ordinal < taken_[peer] || last.sequence.load(std::memory_order_acquire) == 0) {
    used_ &= ~bit(slot);
    if (slot == timed_.slot) {
      double copied_s = 0;
      std::memcpy(&copied_s, last.payload, sizeof copied_s);
      timed_.trial->note(timed_.copied_s + copied_s);
      timed_.slot = -1;
    }
  }
}

bool Mailbox::go_on_sending(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  const Envelope& to = boxes_.envelope(region_.rank(), item.slot);
  if (to.sequence.load(std::memory_order_acquire) != item.sequence) {  // it has been received
    if (item.trial != nullptr) item.trial->note(now_s() - item.posted_s);
    done = true;
    return true;
  }
  if (item.moved == transfer.bytes) return false;
  if (to.is_exposed && to.request.load(std::memory_order_acquire) != Request::parts) return false;
  if (!write_parts(item)) return false;
  // A trial times all ways until the message has been received.
  done = item.moved == transfer.bytes && !transfer.is_synchronous && item.trial == nullptr;
  Region::fence();
  region_.wake(transfer.peer);
  return true;
}

bool Mailbox::write_parts(Item& item) {
  const Transfer& transfer = *item.transfer;
  const Room room = boxes_.room_of(region_.rank(), item.slot);
  const bool holds_all = room.holds(transfer.bytes);
  const std::uint64_t begin = item.moved;
  const std::uint64_t end = std::min(transfer.bytes, begin + kTurnBytes);
  auto written = item.before + static_cast<std::uint32_t>(begin / room.part);
  std::uint32_t taken = room.progress.taken.load(std::memory_order_acquire);
  const unsigned polls = item.has_polled ? 0 : policy_.polls(region_, transfer.peer);
  const auto is_full = [&] { return !holds_all && written - taken >= room.parts; };
  while (item.moved < end) {
    for (unsigned spin = 0; is_full() && spin <= polls; ++spin) {
      relax();
      taken = room.progress.taken.load(std::memory_order_acquire);
    }
    if (is_full()) break;
    const std::uint64_t length = std::min(room.part, transfer.bytes - item.moved);
    copy_out(item, room.at + written % room.parts * room.part, length);
    item.moved += length;
    room.progress.written.store(++written, std::memory_order_release);
  }
  item.has_polled = item.moved == begin;
  return !item.has_polled;
}

bool Mailbox::send_far(Item& item, bool& done) {
  if (item.slot >= 0) return go_on_sending_far(item, done);
  const Transfer& transfer = *item.transfer;
  if (is_blocked_[transfer.peer]) return false;
  const Mail mail{++sequence_,  item.number,    transfer.bytes,
                  transfer.tag, transfer.dtype, transfer.is_synchronous};
  item.sequence = mail.sequence;
  item.slot = courier_->send(transfer.peer, mail, transfer.data);
  if (item.slot < 0) {
    is_blocked_[transfer.peer] = true;
    return false;
  }
  done = !is_large(transfer.bytes) && !transfer.is_synchronous;
  return true;
}

// Sends one part after the other, so that other messages can come between them. The last one is
// gone when the stream has nothing left to do.
bool Mailbox::go_on_sending_far(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (courier_->is_taken(transfer.peer, item.slot)) {
    done = true;
    return true;
  }
  if (!is_large(transfer.bytes) || !courier_->is_requested(transfer.peer, item.slot)) return false;
  bool moved = false;
  while (courier_->is_idle(transfer.peer)) {
    if (item.moved == transfer.bytes) {
      done = !transfer.is_synchronous;
      return moved || done;
    }
    const std::uint64_t length =
        std::min<std::uint64_t>(kFarPartBytes, transfer.bytes - item.moved);
    courier_->send_part(transfer.peer, item.slot, transfer.data + item.moved, length);
    item.moved += length;
    moved = true;
  }
  return moved;
}

}  // namespace rallypoint
