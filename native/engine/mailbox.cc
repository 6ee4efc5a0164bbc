#include "engine/mailbox.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/copy.h"
#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr unsigned kFinishLookUs = 200;
constexpr unsigned kLookClosely = 8;  // every eighth check

}  // namespace

Mailbox::Mailbox(Region& region, const PeerMemory& memory, std::unique_ptr<MailTransport> courier,
                 WaitPolicy policy)
    : region_(region),
      boxes_(region),
      memory_(memory),
      policy_(policy),
      views_(memory),
      courier_(std::move(courier)),
      circles_(region, boxes_, courier_.get()),
      stash_(region, boxes_),
      ordinals_(region.ranks(), kFirstOrdinal),
      taken_(region.ranks()),
      moved_s_(region.ranks()),
      expected_(region.ranks()),
      limits_(region.ranks()),
      is_blocked_(region.ranks()) {}

Mailbox::Step Mailbox::step(Item& item) {
  const std::uint32_t peer = item.transfer->peer;
  const bool is_new = item.slot < 0;
  if (is_new) {
    if (peer == kAnyRank || region_.is_far(peer)) return Step::others;
    if (!item.transfer->sends && !has_news(peer, item.looks++ % kLookClosely == 0)) {
      return Step::blocked;
    }
  }
  bool done = false;
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_new && (pending_.load(std::memory_order_relaxed) != 0 || !stash_.is_empty())) {
      return Step::others;
    }
    if (item.number == Item::kUnnumbered) item.number = numbers_++;
    is_blocked_[peer] = false;
    limits_[peer] = kNoLimit;
    if (region_.poisoned()) {
      item.trouble = Trouble::aborted;
    } else {
      moved = item.transfer->sends ? send(item, done) : receive(item, done);
    }
  }
  if (done || item.trouble != Trouble::none) return Step::done;
  return moved ? Step::moved : Step::blocked;
}

// It begins at once unless others wait for the same, which come first. Asking all of them each time
// would take long if there are thousands.
void Mailbox::post(Item item) {
  Items posted;
  Items finished;
  {
    const std::lock_guard lock(mutex_);
    pending_.fetch_add(1, std::memory_order_release);
    if (item.number == Item::kUnnumbered) item.number = numbers_++;
    const bool has_begun = item.slot >= 0;
    const bool sends = item.transfer->sends;
    const bool is_first = has_begun || !queued_.contains(queue_of(*item.transfer));
    posted.push_back(std::move(item));
    if (!has_begun) enqueue(posted.front());
    if (is_first) advance(posted, false, finished);
    Items& items = sends ? sends_ : receives_;
    items.splice(items.end(), posted);
    if (sends) circles_.say_unsent(unsent_);
  }
  finish(finished);
}

// The queue of sends to one receiver, or of receives of one tag from any rank.
std::uint64_t Mailbox::queue_of(const Transfer& transfer) {
  if (transfer.sends) return std::uint64_t{1} << 32 | transfer.peer;
  return static_cast<std::uint32_t>(transfer.tag);
}

void Mailbox::enqueue(Item& item) {
  item.is_queued = true;
  ++queued_[queue_of(*item.transfer)];
  unsent_ += item.transfer->sends;
}

void Mailbox::dequeue(Item& item) {
  item.is_queued = false;
  const auto queue = queued_.find(queue_of(*item.transfer));
  if (--queue->second == 0) queued_.erase(queue);
  unsent_ -= item.transfer->sends;
}

bool Mailbox::advance(bool has_slept) {
  Items finished;
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    if (courier_ != nullptr && !region_.poisoned()) {
      moved = courier_->poll();
      if (const auto failure = courier_->failure()) {
        region_.spread(failure->trouble, static_cast<std::int32_t>(failure->rank), nullptr, nullptr,
                       failure->error);
      }
    }
    moved |= advance(sends_, has_slept, finished);
    moved |= advance(receives_, has_slept, finished);
    moved |= advance_stash(has_slept);
  }
  finish(finished);
  return moved;
}

// In the order in which they were posted, so that messages cannot overtake each other. A message
// that arrives during a pass is left to the next one: a receive must not get what an earlier one
// just missed.
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
      if (item->transfer->peer != kAnyRank) moved_s_[item->transfer->peer] = now_s();
    } else if (has_slept) {
      item->trouble = look_for_trouble(*item);
    }
    if (item->is_queued && (item->has_begun() || done || item->trouble != Trouble::none))
      dequeue(*item);
    if (done || item->trouble != Trouble::none) {
      moved = true;
      circles_.end(*item->transfer);
      finished.splice(finished.end(), items, item);
    }
    item = next;
  }
  if (&items == &sends_) circles_.say_unsent(unsent_);
  return moved;
}

void Mailbox::finish(Items& finished) {
  for (Item& item : finished) {
    pending_.fetch_sub(1, std::memory_order_release);
    item.work->finish(item.trouble);
  }
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
  // Incoming data that is not read would, when the connection is closed, discard outgoing data.
  while (courier_->unconfirmed() > 0 && is_worth_waiting()) {
    if (!courier_->poll()) usleep(kFinishLookUs);
  }
  if (!region_.poisoned()) courier_->poll();
}

}  // namespace rallypoint
