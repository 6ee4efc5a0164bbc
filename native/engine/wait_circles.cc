#include "engine/wait_circles.h"

#include <algorithm>
#include <utility>

namespace rallypoint {
namespace {

constexpr double kProbeS = 0.1;  // between questions

}  // namespace

void WaitCircles::begin(const PendingTransfer& item) {
  const Transfer& transfer = *item.transfer;
  waiting_ = &transfer;
  Waiting& ours = region_.state(region_.rank()).waiting;
  ours.peer.store(transfer.peer, std::memory_order_relaxed);
  ours.tag.store(transfer.tag, std::memory_order_relaxed);
  ours.sends.store(transfer.sends, std::memory_order_relaxed);
  ours.slot.store(transfer.sends ? item.slot : -1, std::memory_order_relaxed);
  ours.epoch.fetch_add(1, std::memory_order_acq_rel);
}

void WaitCircles::end() {
  if (waiting_ != nullptr) end(*waiting_);
}

void WaitCircles::end(const Transfer& transfer) {
  if (waiting_ != &transfer) return;
  waiting_ = nullptr;
  circle_.clear();
  region_.state(region_.rank()).waiting.epoch.fetch_add(1, std::memory_order_acq_rel);
}

void WaitCircles::say_slot(const PendingTransfer& item) {
  if (waiting_ != item.transfer) return;
  Waiting& ours = region_.state(region_.rank()).waiting;
  ours.slot.store(item.slot, std::memory_order_relaxed);
  ours.epoch.fetch_add(2, std::memory_order_acq_rel);
}

void WaitCircles::say_unsent(std::uint32_t count) {
  auto& unsent = region_.state(region_.rank()).waiting.unsent;
  if (unsent.load(std::memory_order_relaxed) == count) return;  // the line is read by others
  unsent.store(count, std::memory_order_release);
}

// Whether the rank waits for a message that is neither there nor on its way, or for one to be taken
// that is not.
bool WaitCircles::is_stuck(std::uint32_t rank, std::uint64_t epoch) const {
  const Waiting& theirs = region_.state(rank).waiting;
  const std::uint32_t peer = theirs.peer.load(std::memory_order_relaxed);
  if (peer >= region_.ranks()) return false;
  bool stuck = false;
  if (theirs.sends.load(std::memory_order_relaxed) == 0) {
    const std::int32_t tag = theirs.tag.load(std::memory_order_relaxed);
    const Waiting& sender = region_.state(peer).waiting;
    stuck = sender.unsent.load(std::memory_order_acquire) == 0 &&
            boxes_.find(peer, rank, &tag, ~std::uint64_t{0}) < 0;
  } else if (const int slot = theirs.slot.load(std::memory_order_relaxed); slot >= 0) {
    stuck = boxes_.envelope(rank, slot).sequence.load(std::memory_order_acquire) != 0 &&
            boxes_.envelope(rank, slot).request.load(std::memory_order_acquire) == Request::none;
  }
  return stuck && theirs.epoch.load(std::memory_order_acquire) == epoch;
}

Trouble WaitCircles::look(const PendingTransfer& item, const Sends& sends) {
  const std::uint32_t peer = item.transfer->peer;
  if (item.transfer != waiting_ || peer == kAnyRank) return Trouble::none;
  if (region_.has_far()) {
    const Trouble trouble = look_afar(item, sends);
    if (trouble != Trouble::none || region_.is_far(peer)) return trouble;
  }
  return look_here();
}

// Follows who waits for whom from this rank. A cycle that is the same at two looks is real.
Trouble WaitCircles::look_here() {
  std::vector<std::uint64_t> circle;
  std::vector<CircleMember> members;
  std::uint32_t rank = region_.rank();
  do {
    const Waiting& waiting = region_.state(rank).waiting;
    const std::uint64_t epoch = waiting.epoch.load(std::memory_order_acquire);
    const std::uint32_t peer = waiting.peer.load(std::memory_order_relaxed);
    if (epoch % 2 == 0 || !is_stuck(rank, epoch) || members.size() == region_.ranks()) {
      circle_.clear();
      return Trouble::none;
    }
    circle.push_back(std::uint64_t{rank} << 40 | epoch);
    members.push_back({rank, peer, waiting.tag.load(std::memory_order_relaxed),
                       waiting.sends.load(std::memory_order_relaxed), epoch});
    rank = peer;
  } while (rank != region_.rank());
  if (circle != circle_) {
    circle_ = std::move(circle);
    return Trouble::none;
  }
  region_.spread_circle(members);
  return Trouble::circle;
}

// Between hosts nobody sees all of a circle, so each member passes on what it knows. A member that
// waits can only be released by the next one, which says that it waits itself, and that whatever it
// has ever sent has been seen; so if all say that, none was released in between.
//
//   host 0   A ----> C   host 1     A, who waits for a rank elsewhere, begins: C gets a probe
//            ^       |              C looks on its host who waits for whom, up to E, who waits for
//            |       v              a rank elsewhere, and has A bring E the probe
//            G <---- E              E sees that all up to it still wait, and asks G
//
Trouble WaitCircles::look_afar(const PendingTransfer& item, const Sends& sends) {
  if (!is_stuck(item)) return Trouble::none;
  const std::uint32_t self = region_.rank();
  const std::uint64_t epoch = region_.state(self).waiting.epoch.load(std::memory_order_relaxed);
  for (Probe& each : region_.messenger()->take_probes()) {
    if (!keeps_waiting(each, sends)) continue;
    if (each.members.front().rank == self) {
      if (each.epoch != epoch) continue;
      region_.spread_circle(each.members);
      return Trouble::circle;
    }
    probe(item, std::move(each));
  }
  if (region_.is_far(item.transfer->peer) && now_s() - probed_s_ > kProbeS) {
    probed_s_ = now_s();
    probe(item, {epoch, 0, -1, {}});
  }
  return Trouble::none;
}

// Whether only its peer can make the transfer proceed.
bool WaitCircles::is_stuck(const PendingTransfer& item) const {
  const std::uint32_t self = region_.rank();
  if (!region_.is_far(item.transfer->peer)) {
    return is_stuck(self, region_.state(self).waiting.epoch.load(std::memory_order_relaxed));
  }
  if (!item.transfer->sends) return item.slot < 0;
  return item.slot >= 0 && !courier_->is_taken(item.transfer->peer, item.slot) &&
         !courier_->is_requested(item.transfer->peer, item.slot);
}

// Whether nothing that this rank has done, or has begun, releases the last member; nor, if that is
// on this host, those before it that are.
bool WaitCircles::keeps_waiting(const Probe& probe, const Sends& sends) const {
  const CircleMember& last = probe.members.back();
  if (!region_.is_far(last.rank)) {
    for (auto each = probe.members.rbegin(); each != probe.members.rend(); ++each) {
      if (region_.is_far(each->rank)) return true;
      if (!is_stuck(each->rank, each->epoch)) return false;
    }
    return false;  // it must have arrived from elsewhere
  }
  if (last.sends == 0) {
    const auto is_for_them = [&](const PendingTransfer& item) {
      return item.transfer->peer == last.rank && item.slot < 0;
    };
    return courier_->last_sent(last.rank) == probe.sequence &&
           std::none_of(sends.begin(), sends.end(), is_for_them);
  }
  if (probe.slot < 0 || probe.slot >= static_cast<int>(kEnvelopes)) return false;
  const Envelope& theirs = boxes_.envelope(last.rank, probe.slot);
  return theirs.sequence == probe.sequence && theirs.request == Request::none;
}

// Passes the probe on to the rank that this one waits for; or, on this host, to the first rank that
// can continue with it.
void WaitCircles::probe(const PendingTransfer& item, Probe probe) {
  const Transfer& transfer = *item.transfer;
  if (region_.is_far(transfer.peer)) {
    if (!add_member(probe, region_.rank())) return;
    probe.slot = transfer.sends ? item.slot : -1;
    probe.sequence = transfer.sends ? item.sequence : boxes_.published(transfer.peer).load();
    region_.messenger()->send_probe(transfer.peer, transfer.peer, probe);
    return;
  }
  const std::uint32_t via = probe.members.back().rank;
  if (!region_.is_far(via)) return;
  const std::uint32_t first = probe.members.front().rank;
  std::uint32_t rank = region_.rank();
  do {
    if (!add_member(probe, rank)) return;
    const CircleMember& added = probe.members.back();
    if (added.epoch % 2 == 0 || !is_stuck(rank, added.epoch)) return;
    rank = added.peer;
  } while (rank != first && !waits_afar(rank));
  region_.messenger()->send_probe(via, rank, probe);
}

bool WaitCircles::waits_afar(std::uint32_t rank) const {
  const std::uint32_t peer = region_.state(rank).waiting.peer.load(std::memory_order_relaxed);
  return peer < region_.ranks() && region_.is_far(peer);
}

// Adds a member, by what it says of itself; not twice.
bool WaitCircles::add_member(Probe& probe, std::uint32_t rank) const {
  const Waiting& waiting = region_.state(rank).waiting;
  const std::uint64_t epoch = waiting.epoch.load(std::memory_order_acquire);
  const std::uint32_t peer = waiting.peer.load(std::memory_order_relaxed);
  const bool was_here = std::any_of(probe.members.begin(), probe.members.end(),
                                    [&](const CircleMember& each) { return each.rank == rank; });
  if (was_here || probe.members.size() == kMostProbed || peer >= region_.ranks()) return false;
  probe.members.push_back({rank, peer, waiting.tag.load(std::memory_order_relaxed),
                           waiting.sends.load(std::memory_order_relaxed), epoch});
  return true;
}

}  // namespace rallypoint
