#include "engine/mailbox.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr unsigned kParts = 2;  // of a block, for large messages
constexpr std::size_t kPartBytes = kMailBytes / kParts;
constexpr std::uint64_t kReadBytes = 4 << 20;  // at a time, so that others get on too
constexpr std::uint64_t kFarPartBytes = 256 << 10;
constexpr unsigned kFinishLookUs = 200;

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

}  // namespace

Mailbox::Mailbox(Region& region, std::unique_ptr<tcp::Courier> courier)
    : region_(region),
      courier_(std::move(courier)),
      limits_(region.ranks()),
      is_blocked_(region.ranks()) {}

Envelope& Mailbox::envelope(std::uint32_t rank, int slot) const {
  return region_.at<Envelope>(rank, region_.layout().envelopes(rank))[slot];
}

std::byte* Mailbox::block(std::uint32_t rank, int slot) const {
  return region_.at<std::byte>(rank, region_.layout().blocks(rank)) +
         static_cast<std::size_t>(slot) * kMailBytes;
}

void Mailbox::post(Transfer& transfer, std::shared_ptr<Work> work) {
  transfer.asked = transfer.peer;
  Items finished;
  {
    const std::lock_guard lock(mutex_);
    pending_.fetch_add(1, std::memory_order_release);
    Items& items = transfer.sends ? sends_ : receives_;
    items.push_back({&transfer, std::move(work), numbers_++});
    advance(items, false, finished);
  }
  finish(finished);
}

bool Mailbox::advance(bool has_slept) {
  Items finished;
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    if (courier_ != nullptr && !region_.poisoned()) {
      moved = courier_->poll();
      if (courier_->corrupt_rank() >= 0) {
        region_.spread(Trouble::corrupt, courier_->corrupt_rank(), nullptr, nullptr);
      }
    }
    moved |= advance(sends_, has_slept, finished);
    moved |= advance(receives_, has_slept, finished);
    moved |= advance_stash(has_slept);
  }
  finish(finished);
  return moved;
}

// In the order in which they were posted, so that messages cannot overtake each other. What arrives
// during a pass is left to the next one: a receive must not get what an earlier one just missed.
bool Mailbox::advance(Items& items, bool has_slept, Items& finished) {
  bool moved = false;
  std::fill(is_blocked_.begin(), is_blocked_.end(), false);
  std::fill(limits_.begin(), limits_.end(), 0);
  for (auto item = items.begin(); item != items.end();) {
    const auto next = std::next(item);
    bool done = false;
    if (region_.poisoned()) {
      item->trouble = Trouble::aborted;
    } else if (item->transfer->sends ? send(*item, done) : receive(*item, done)) {
      moved = true;
      item->was_gone = false;
    } else if (has_slept) {
      item->trouble = look_for_trouble(*item);
    }
    if (done || item->trouble != Trouble::none) {
      moved = true;
      end_waiting(*item->transfer);
      finished.splice(finished.end(), items, item);
    }
    item = next;
  }
  if (&items == &sends_) say_unsent();
  return moved;
}

void Mailbox::finish(Items& finished) {
  for (Item& item : finished) {
    pending_.fetch_sub(1, std::memory_order_release);
    item.work->finish(item.trouble);
  }
}

// Sending: an envelope, and then, if it must be received first, the wait for that.
bool Mailbox::send(Item& item, bool& done) {
  if (region_.is_far(item.transfer->peer)) return send_far(item, done);
  if (item.slot >= 0) return go_on_sending(item, done);
  const Transfer& transfer = *item.transfer;
  if (is_blocked_[transfer.peer]) return false;
  const std::uint64_t used = full(region_.rank()).load(std::memory_order_acquire) | held_;
  const auto free = std::countr_one(static_cast<std::uint32_t>(used));
  if (free >= static_cast<int>(kEnvelopes) ||
      waiting_for(region_.rank(), transfer.peer, used) >= room_for_one(transfer.peer)) {
    is_blocked_[transfer.peer] = true;
    return false;
  }
  Envelope& to = envelope(region_.rank(), free);
  to.sequence.store(++sequence_, std::memory_order_relaxed);
  to.tag.store(transfer.tag, std::memory_order_relaxed);
  to.to.store(transfer.peer, std::memory_order_release);
  to.number = item.number;
  to.bytes = transfer.bytes;
  to.address = reinterpret_cast<std::uint64_t>(transfer.data);
  to.dtype = transfer.dtype;
  to.is_synchronous = transfer.is_synchronous;
  to.request.store(Request::none, std::memory_order_relaxed);
  to.written.store(0, std::memory_order_relaxed);
  to.taken.store(0, std::memory_order_relaxed);
  if (!is_large(transfer.bytes) && transfer.bytes > 0) {
    std::byte* const at =
        transfer.bytes <= sizeof to.payload ? to.payload : block(region_.rank(), free);
    std::memcpy(at, transfer.data, transfer.bytes);
  }
  item.slot = free;
  say_slot(item);
  done = !is_large(transfer.bytes) && !transfer.is_synchronous;
  if (!done) held_ |= bit(free);
  full(region_.rank()).fetch_or(bit(free), std::memory_order_acq_rel);
  outbox(region_.rank()).published.store(sequence_, std::memory_order_release);
  Region::fence();
  region_.wake(transfer.peer);
  return true;
}

// How many of a rank's envelopes may be there for one receiver: the others need room too, however
// much that one leaves lying. Between hosts each pair has room of its own.
unsigned Mailbox::room_for_one(std::uint32_t peer) const {
  return region_.ranks() > 2 && !region_.is_far(peer) ? kEnvelopes / 2 : kEnvelopes;
}

unsigned Mailbox::waiting_for(std::uint32_t from, std::uint32_t to, std::uint64_t used) const {
  unsigned count = 0;
  for (; used != 0; used &= used - 1) {
    const int slot = std::countr_zero(used);
    if (slot >= static_cast<int>(kEnvelopes)) break;
    count += envelope(from, slot).to.load(std::memory_order_acquire) == to;
  }
  return count;
}

bool Mailbox::go_on_sending(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  if ((full(region_.rank()).load(std::memory_order_acquire) & bit(item.slot)) == 0) {
    held_ &= ~bit(item.slot);
    done = true;
    return true;
  }
  Envelope& to = envelope(region_.rank(), item.slot);
  if (to.request.load(std::memory_order_acquire) != Request::parts) return false;
  bool moved = false;
  std::uint32_t written = to.written.load(std::memory_order_relaxed);
  while (item.moved < transfer.bytes &&
         written - to.taken.load(std::memory_order_acquire) < kParts) {
    const std::uint64_t length = std::min<std::uint64_t>(kPartBytes, transfer.bytes - item.moved);
    std::memcpy(block(region_.rank(), item.slot) + written % kParts * kPartBytes,
                transfer.data + item.moved, length);
    item.moved += length;
    to.written.store(++written, std::memory_order_release);
    moved = true;
  }
  if (!moved) return false;
  Region::fence();
  region_.wake(transfer.peer);
  return true;
}

bool Mailbox::send_far(Item& item, bool& done) {
  if (item.slot >= 0) return go_on_sending_far(item, done);
  const Transfer& transfer = *item.transfer;
  if (is_blocked_[transfer.peer]) return false;
  tcp::MailHeader envelope{};
  envelope.is_synchronous = transfer.is_synchronous;
  envelope.dtype = transfer.dtype;
  envelope.sequence = ++sequence_;
  envelope.number = item.number;
  envelope.bytes = transfer.bytes;
  envelope.tag = transfer.tag;
  item.sequence = envelope.sequence;
  item.slot = courier_->send(transfer.peer, envelope, transfer.data);
  if (item.slot < 0) {
    is_blocked_[transfer.peer] = true;
    return false;
  }
  done = !is_large(transfer.bytes) && !transfer.is_synchronous;
  return true;
}

// One part after the other, so that other messages get between them. The last has gone when the
// stream has nothing left to do.
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

// Receiving: the oldest envelope that matches, and then its payload.
bool Mailbox::receive(Item& item, bool& done) {
  Transfer& transfer = *item.transfer;
  if (item.stashed == nullptr && item.slot < 0 && !match(item)) return false;
  if (item.stashed != nullptr) return take_stashed(item, done);
  Envelope& from = envelope(transfer.peer, item.slot);
  if (from.bytes != transfer.bytes || from.dtype != transfer.dtype) {
    item.trouble = fail_against(item, from.number, from.bytes, from.dtype);
    return true;
  }
  const bool large = is_large(from.bytes);
  bool moved = true;
  if (!large) {
    const std::byte* const at =
        from.bytes <= sizeof from.payload ? from.payload : block(transfer.peer, item.slot);
    if (from.bytes > 0) std::memcpy(transfer.data, at, from.bytes);
    done = true;
  } else if (region_.is_far(transfer.peer)) {
    moved = take_far(item, done);
  } else if (item.takes_parts || !read(item, from, done)) {
    moved = take_parts(item, from, done);
  }
  if (done) {
    full(transfer.peer).fetch_and(~bit(item.slot), std::memory_order_acq_rel);
    if (region_.is_far(transfer.peer)) courier_->take(transfer.peer, item.slot);
    Region::fence();
    region_.wake(transfer.peer);
    // The sender's memory may have been given up in the meantime.
    if (large && region_.poisoned()) item.trouble = Trouble::aborted;
  }
  return moved;
}

bool Mailbox::match(Item& item) {
  Transfer& transfer = *item.transfer;
  const bool any = transfer.peer == kAnyRank;
  const std::uint32_t ranks = region_.ranks();
  for (std::uint32_t i = 0; i < (any ? ranks : 1); ++i) {
    const std::uint32_t source = any ? (last_source_ + 1 + i) % ranks : transfer.peer;
    if (limits_[source] == 0) {
      limits_[source] = outbox(source).published.load(std::memory_order_acquire) + 1;
    }
    Stashed* const stashed = find_stashed(source, transfer.tag);
    const std::uint64_t limit = stashed != nullptr ? stashed->sequence : limits_[source];
    const int slot = find(source, region_.rank(), &transfer.tag, limit);
    if (slot < 0 && stashed == nullptr) continue;
    if (any) last_source_ = source;
    end_waiting(transfer);  // before others can see that what it waited for is gone
    transfer.peer = source;
    if (slot < 0) {
      stashed->is_wanted = true;
      item.stashed = stashed;
    } else {
      item.slot = slot;
      envelope(source, slot).request.store(Request::matched, std::memory_order_release);
    }
    return true;
  }
  return false;
}

// The oldest that nobody has taken, with a sequence below the limit; -1 if there is none.
int Mailbox::find(std::uint32_t source, std::uint32_t to, const std::int32_t* tag,
                  std::uint64_t limit) const {
  int found = -1;
  for (std::uint64_t bits = full(source).load(std::memory_order_acquire); bits != 0;
       bits &= bits - 1) {
    const int slot = std::countr_zero(bits);
    if (slot >= static_cast<int>(kEnvelopes)) break;
    const Envelope& candidate = envelope(source, slot);
    if (candidate.to.load(std::memory_order_acquire) != to ||
        (tag != nullptr && candidate.tag != *tag) || candidate.sequence >= limit ||
        candidate.request.load(std::memory_order_relaxed) != Request::none) {
      continue;
    }
    if (found < 0 || candidate.sequence < envelope(source, found).sequence) found = slot;
  }
  return found;
}

// Straight from the sender's memory; returns false if that is not possible.
bool Mailbox::read(Item& item, const Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  const pid_t pid = region_.state(transfer.peer).pid.load(std::memory_order_relaxed);
  const std::uint64_t length = std::min(kReadBytes, transfer.bytes - item.moved);
  if (pid == getpid()) {  // ranks may be threads of one process
    std::memcpy(transfer.data + item.moved, reinterpret_cast<std::byte*>(from.address) + item.moved,
                length);
  } else {
    if (!reads_directly_) return false;
    const iovec local{transfer.data + item.moved, length};
    const iovec remote{reinterpret_cast<void*>(from.address + item.moved), length};
    const ssize_t count = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count < 0) {
      if (errno == ESRCH) return true;  // it died, as will be noticed
      reads_directly_ = false;
      return false;
    }
    item.moved += static_cast<std::uint64_t>(count);
    done = item.moved == transfer.bytes;
    return true;
  }
  item.moved += length;
  done = item.moved == transfer.bytes;
  return true;
}

bool Mailbox::take_far(Item& item, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (!item.takes_parts) {
    item.takes_parts = true;
    courier_->request(transfer.peer, item.slot, transfer.data, transfer.bytes);
    return true;
  }
  const std::uint64_t landed = courier_->landed(transfer.peer, item.slot);
  done = landed == transfer.bytes;
  return std::exchange(item.moved, landed) != landed;
}

bool Mailbox::take_parts(Item& item, Envelope& from, bool& done) {
  const Transfer& transfer = *item.transfer;
  if (!item.takes_parts) {
    item.takes_parts = true;
    item.moved = 0;
    from.request.store(Request::parts, std::memory_order_release);
    Region::fence();
    region_.wake(transfer.peer);
    return true;
  }
  std::uint32_t taken = from.taken.load(std::memory_order_relaxed);
  bool moved = false;
  while (item.moved < transfer.bytes && from.written.load(std::memory_order_acquire) != taken) {
    const std::uint64_t length = std::min<std::uint64_t>(kPartBytes, transfer.bytes - item.moved);
    std::memcpy(transfer.data + item.moved,
                block(transfer.peer, item.slot) + taken % kParts * kPartBytes, length);
    item.moved += length;
    from.taken.store(++taken, std::memory_order_release);
    moved = true;
  }
  if (!moved) return false;
  done = item.moved == transfer.bytes;
  Region::fence();
  region_.wake(transfer.peer);
  return true;
}

void Mailbox::arm() {
  if (courier_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  courier_->arm();
}

void Mailbox::finish(double until_s) {
  if (courier_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto is_worth_waiting = [&] {
    return !region_.poisoned() && region_.first_lost() < 0 && now_s() < until_s;
  };
  while (courier_->has_backlog() && is_worth_waiting()) {
    if (!courier_->poll()) usleep(kFinishLookUs);
  }
  courier_->finish_writing();
  // What comes in and is not read would, when the connection is closed, stop what goes out.
  while (courier_->unconfirmed() > 0 && is_worth_waiting()) {
    if (!courier_->poll()) usleep(kFinishLookUs);
  }
  if (!region_.poisoned()) courier_->poll();
}

}  // namespace rallypoint
