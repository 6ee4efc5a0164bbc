// What prevents a send or receive from making progress, and how all ranks are told.

#include <algorithm>
#include <utility>

#include "engine/collective.h"
#include "engine/mailbox.h"

namespace rallypoint {
namespace {

constexpr double kCutOffS = 0.5;
constexpr std::int32_t kReceive = -1;  // a CallRecord's collective

}  // namespace

// A peer that is gone may have sent its last message just before: trust the observation only the
// second time.
Trouble Mailbox::look_for_trouble(Item& item) {
  const Transfer& transfer = *item.transfer;
  if (item.began_s == 0) item.began_s = now_s();
  if (!transfer.sends && transfer.peer != kAnyRank && region_.is_far(transfer.peer)) {
    courier_->expect(transfer.peer);
  }
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
  // Time without progress: while bytes move to or from the peer, this transfer may have to wait.
  const bool is_from_any = transfer.peer == kAnyRank;
  const double since_s =
      is_from_any ? item.began_s : std::max(item.began_s, moved_s_[transfer.peer]);
  if (now_s() - since_s > transfer.timeout_s) {
    return fail(Trouble::timeout, is_from_any ? region_.rank() : transfer.peer, item);
  }
  return circles_.look(item, sends_);
}

// The peer, if it has left; for a receive from any rank, the last of the others, if all have left.
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

// A rank that left on another host may have messages in transit.
bool Mailbox::has_left(std::uint32_t rank) const {
  return region_.presence(rank) == Presence::left &&
         (!region_.is_far(rank) || courier_->state(rank) != ConnectionState::open);
}

// Whether the peer has no connection although its host reports nothing.
bool Mailbox::is_cut_off(Item& item) const {
  const std::uint32_t peer = item.transfer->peer;
  if (peer == kAnyRank || !region_.is_far(peer)) return false;
  if (courier_->state(peer) != ConnectionState::ended) return false;
  if (item.cut_off_s == 0) item.cut_off_s = now_s();
  return now_s() - item.cut_off_s > kCutOffS;
}

void Mailbox::set_waiting(const Transfer* transfer) {
  const std::lock_guard lock(mutex_);
  circles_.end();
  if (transfer == nullptr) return;
  const Items& items = transfer->sends ? sends_ : receives_;
  const auto item = std::find_if(items.begin(), items.end(),
                                 [&](const Item& each) { return each.transfer == transfer; });
  if (item != items.end() && (transfer->sends || !item->has_begun())) circles_.begin(*item);
}

bool Mailbox::is_waiting(const Transfer& transfer) const {
  const std::lock_guard lock(mutex_);
  return circles_.is_waiting(transfer);
}

void Mailbox::describe(CallRecord& record, const Item& item) const {
  const Transfer& transfer = *item.transfer;
  record.number.store(item.number + 1, std::memory_order_relaxed);
  record.count = transfer.bytes / item_bytes(transfer.dtype);
  record.collective = transfer.sends ? collective::kSend : kReceive;
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

void Mailbox::interrupt(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  for (const Item& item : transfer.sends ? sends_ : receives_) {
    if (item.transfer == &transfer) fail(Trouble::interrupted, region_.rank(), item);
  }
}

Trouble Mailbox::fail_against(const Item& item, std::uint64_t number, std::uint64_t bytes,
                              DType dtype) {
  CallRecord ours{};
  CallRecord theirs{};
  describe(ours, item);
  theirs.number.store(number + 1, std::memory_order_relaxed);
  theirs.count = bytes / item_bytes(dtype);
  theirs.collective = collective::kSend;
  theirs.reduce_op = static_cast<std::int32_t>(region_.rank());
  theirs.dtype = static_cast<std::int32_t>(dtype);
  theirs.root = item.transfer->tag;
  region_.spread(Trouble::mismatch, static_cast<std::int32_t>(item.transfer->peer), &theirs, &ours);
  return Trouble::mismatch;
}

}  // namespace rallypoint
