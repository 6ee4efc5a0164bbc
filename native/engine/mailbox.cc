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
constexpr double kCutOffS = 0.5;
constexpr unsigned kFinishLookUs = 200;
constexpr std::int32_t kSend = 4;      // schedule/collective.py
constexpr std::int32_t kReceive = -1;  // a CallRecord's collective

std::uint64_t bit(int slot) { return std::uint64_t{1} << slot; }

bool is_large(std::uint64_t bytes) { return bytes > kMailBytes; }

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
      finished.splice(finished.end(), items, item);
    }
    item = next;
  }
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
  // Keep room for the others, however much one rank leaves lying.
  const unsigned most = region_.ranks() > 2 ? kEnvelopes / 2 : kEnvelopes;
  const auto free = std::countr_one(static_cast<std::uint32_t>(used));
  if (free >= static_cast<int>(kEnvelopes) || waiting_for(transfer.peer, used) >= most) {
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
  to.request.store(Request::none, std::memory_order_relaxed);
  to.written.store(0, std::memory_order_relaxed);
  to.taken.store(0, std::memory_order_relaxed);
  if (!is_large(transfer.bytes) && transfer.bytes > 0) {
    std::byte* const at =
        transfer.bytes <= sizeof to.payload ? to.payload : block(region_.rank(), free);
    std::memcpy(at, transfer.data, transfer.bytes);
  }
  item.slot = free;
  done = !is_large(transfer.bytes) && !transfer.is_synchronous;
  if (!done) held_ |= bit(free);
  full(region_.rank()).fetch_or(bit(free), std::memory_order_acq_rel);
  outbox(region_.rank()).published.store(sequence_, std::memory_order_release);
  Region::fence();
  region_.wake(transfer.peer);
  return true;
}

unsigned Mailbox::waiting_for(std::uint32_t rank, std::uint64_t used) const {
  unsigned count = 0;
  for (; used != 0; used &= used - 1) {
    count += envelope(region_.rank(), std::countr_zero(used)).to == rank;
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
  if (item.slot < 0 && !match(item)) return false;
  Envelope& from = envelope(transfer.peer, item.slot);
  if (from.bytes != transfer.bytes || from.dtype != transfer.dtype) {
    item.trouble = fail_against(item, from);
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
    const int slot = find(source, region_.rank(), transfer.tag, limits_[source]);
    if (slot < 0) continue;
    if (any) last_source_ = source;
    transfer.peer = source;
    item.slot = slot;
    envelope(source, slot).request.store(Request::matched, std::memory_order_release);
    return true;
  }
  return false;
}

// The oldest that nobody has taken, with a sequence below the limit; -1 if there is none.
int Mailbox::find(std::uint32_t source, std::uint32_t to, std::int32_t tag,
                  std::uint64_t limit) const {
  int found = -1;
  for (std::uint64_t bits = full(source).load(std::memory_order_acquire); bits != 0;
       bits &= bits - 1) {
    const int slot = std::countr_zero(bits);
    if (slot >= static_cast<int>(kEnvelopes)) break;
    const Envelope& candidate = envelope(source, slot);
    if (candidate.to.load(std::memory_order_acquire) != to || candidate.tag != tag ||
        candidate.sequence >= limit ||
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

// A peer that is gone may have sent its last message just before: believe it the second time.
Trouble Mailbox::look_for_trouble(Item& item) {
  const Transfer& transfer = *item.transfer;
  if (item.began_s == 0) item.began_s = now_s();
  const bool was_gone = std::exchange(item.was_gone, true);
  if (const int lost = region_.first_lost(); lost >= 0) {
    return was_gone ? fail(Trouble::peer_lost, static_cast<std::uint32_t>(lost), item)
                    : Trouble::none;
  }
  if (const std::uint32_t gone = gone_peer(transfer.peer); gone != kAnyRank) {
    return was_gone ? fail(Trouble::peer_left, gone, item) : Trouble::none;
  }
  item.was_gone = false;
  if (is_cut_off(item)) return fail(Trouble::peer_lost, transfer.peer, item);
  if (now_s() - item.began_s > transfer.timeout_s) {
    return fail(Trouble::timeout, transfer.peer == kAnyRank ? region_.rank() : transfer.peer, item);
  }
  if (item.transfer != waiting_ || transfer.peer == kAnyRank) return Trouble::none;
  return region_.is_far(transfer.peer) ? look_for_far_circle(item) : look_for_circle();
}

// The peer, if it left; for any rank, the last of the others, if all left.
std::uint32_t Mailbox::gone_peer(std::uint32_t peer) const {
  if (peer != kAnyRank) return has_left(peer) ? peer : kAnyRank;
  std::uint32_t gone = kAnyRank;
  for (std::uint32_t rank = 0; rank < region_.ranks(); ++rank) {
    if (rank == region_.rank()) continue;
    if (!has_left(rank)) return kAnyRank;
    gone = rank;
  }
  return gone;
}

// Who left another host may have messages under way.
bool Mailbox::has_left(std::uint32_t rank) const {
  return region_.presence(rank) == Presence::left &&
         (!region_.is_far(rank) || courier_->has_ended(rank));
}

// Without a connection, although its host says nothing.
bool Mailbox::is_cut_off(Item& item) const {
  const std::uint32_t peer = item.transfer->peer;
  if (peer == kAnyRank || !region_.is_far(peer) || !courier_->has_ended(peer)) return false;
  if (item.cut_off_s == 0) item.cut_off_s = now_s();
  return now_s() - item.cut_off_s > kCutOffS;
}

void Mailbox::describe(CallRecord& record, const Item& item) const {
  const Transfer& transfer = *item.transfer;
  record.number.store(item.number + 1, std::memory_order_relaxed);
  record.count = transfer.bytes / item_bytes(transfer.dtype);
  record.collective = transfer.sends ? kSend : kReceive;
  record.reduce_op = static_cast<std::int32_t>(transfer.peer);
  record.dtype = static_cast<std::int32_t>(transfer.dtype);
  record.root = transfer.tag;
}

Trouble Mailbox::fail(Trouble trouble, std::uint32_t culprit, const Item& item) {
  CallRecord ours{};
  describe(ours, item);
  region_.spread(trouble, static_cast<std::int32_t>(culprit), nullptr, &ours, 0, 0,
                 item.transfer->timeout_s);
  return trouble;
}

Trouble Mailbox::fail_against(const Item& item, const Envelope& from) {
  CallRecord ours{};
  CallRecord theirs{};
  describe(ours, item);
  theirs.number.store(from.number + 1, std::memory_order_relaxed);
  theirs.count = from.bytes / item_bytes(from.dtype);
  theirs.collective = kSend;
  theirs.reduce_op = static_cast<std::int32_t>(from.to);
  theirs.dtype = static_cast<std::int32_t>(from.dtype);
  theirs.root = from.tag;
  region_.spread(Trouble::mismatch, static_cast<std::int32_t>(item.transfer->peer), &theirs, &ours);
  return Trouble::mismatch;
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
