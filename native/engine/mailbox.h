// Messages from one rank to another: send and receive, matched by source and tag.
//
//   sender's outbox      | 32 envelopes | 32 blocks |
//   receiver             takes the oldest of the sender's envelopes that matches, and clears it
//
// A sender writes to its own outbox, so a pair of ranks needs only one word: how many of one's
// messages the other has taken. Envelopes are used in turn, so a receiver knows where the next
// message will be, and a tiny one fits into that line. Larger ones go in parts through the
// envelope's block: the sender copies in while the receiver copies out, and if the message fits
// into the block, the sender continues at once. Large ones in memory that others can read
// (peer_memory.h) stay there until they are received. Messages between hosts use a transport, and
// appear in a copy of their sender's outbox. A rank that has waited without success takes in the
// messages that fill a sender's outbox: the one it waits for may be behind them.
//
// It never waits: `advance` makes all possible progress, and so does `step` with a transfer that is
// the only one, without the bookkeeping that several need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/layout.h"
#include "engine/outboxes.h"
#include "engine/peer_memory.h"
#include "engine/region.h"
#include "engine/stash.h"
#include "engine/transfer.h"
#include "engine/transport.h"
#include "engine/wait_circles.h"
#include "engine/waiting.h"
#include "engine/ways.h"
#include "engine/work.h"

namespace rallypoint {

// Of one message at a time, so that others make progress too.
inline constexpr std::uint64_t kTurnBytes = 4 << 20;

// For numbers of parts, which may wrap around: only neighbouring ones are compared.
inline bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

class Mailbox final : public Alarm {
 public:
  using Item = PendingTransfer;
  enum class Step { done, moved, blocked, others };

  // `courier` is null if all ranks are on this host.
  Mailbox(Region& region, const PeerMemory& memory, std::unique_ptr<MailTransport> courier,
          WaitPolicy policy);

  // Makes progress with a transfer that nobody else knows. When it returns, the transfer is done,
  // perhaps with trouble; or it must be posted, because `others` come first, or it takes long.
  Step step(Item& item);
  // Takes over a transfer; transfer and work must stay in place until it is done. It begins at once
  // if possible.
  void post(Item item);
  // Makes progress with all transfers; returns whether anything moved. With `has_slept`, it looks
  // for trouble.
  bool advance(bool has_slept);
  bool is_empty() const { return pending_.load(std::memory_order_acquire) == 0 && !has_backlog(); }
  // Whether messages that count as sent still wait for their connection.
  bool has_backlog() const { return courier_ != nullptr && courier_->has_backlog(); }
  void arm() override;
  // Stops sending; waits until that time for messages in transit to other hosts.
  void finish(double until_s);
  std::size_t size() const { return pending_.load(std::memory_order_acquire); }

  // For a waiting receive: the tag of the oldest message from its source that no receive asks for.
  std::optional<std::int32_t> unwanted_tag(const Transfer& receive) const;

  // A thread waits for this transfer, and nothing else in the process will communicate: ranks that
  // then wait for each other in a cycle are in trouble. Null when it no longer waits.
  void set_waiting(const Transfer* transfer);
  // Whether that was said of this transfer last.
  bool is_waiting(const Transfer& transfer) const;
  // Ends the transfer, unless it is done, and with it all operations of all ranks.
  void interrupt(const Transfer& transfer);

 private:
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
  using Items = std::list<Item>;
  // The message whose copying is timed, on both sides.
  struct Timed {
    int slot = -1;  // its envelope; -1: none
    WayTrial* trial = nullptr;
    double copied_s = 0;  // here
  };
  // Where the next message of a sender is expected. Also read by threads that only check for news.
  struct Expected {
    Relaxed<std::uint32_t> slot;
    Relaxed<std::uint64_t> seen;  // the last sequence for which all envelopes were looked at
    std::uint64_t ordinal = kFirstOrdinal;  // all before it have been taken
  };

  bool advance(Items& items, bool has_slept, Items& finished);
  void finish(Items& finished);
  static std::uint64_t queue_of(const Transfer& transfer);
  void enqueue(Item& item);
  void dequeue(Item& item);
  // Each returns whether anything moved.
  bool send(Item& item, bool& done);
  void put(Item& item, int slot);
  bool take_wide(const Item& item);
  bool go_on_sending(Item& item, bool& done);
  bool write_parts(Item& item);
  bool find_place(Item& item, int slot, Place& place);
  void choose_way(Item& item, int slot);
  void copy_out(const Item& item, std::byte* target, std::uint64_t length);
  bool send_far(Item& item, bool& done);
  bool go_on_sending_far(Item& item, bool& done);
  bool take_far(Item& item, const Envelope& from, bool& done);
  int room_for(std::uint32_t peer);
  bool is_full_for(std::uint32_t peer) const;
  void look_at(int slot);
  bool receive(Item& item, bool& done);
  bool has_news(std::uint32_t source, bool looks_closely) const;
  bool match(Item& item);
  int find_expected(std::uint32_t source, std::int32_t tag) const;
  bool take(Item& item, Envelope& from, bool& done);
  bool take_exposed(Item& item, Envelope& from, bool& done);
  bool take_parts(Item& item, const Envelope& from, bool& done);
  void copy_in(Item& item, const Envelope& from, const std::byte* part, std::uint64_t length);
  void release(Item& item, Envelope& from);

  bool advance_stash(bool has_slept);
  bool take_stashed(Item& item, bool& done);

  Trouble look_for_trouble(Item& item);
  std::uint32_t gone_peer(std::uint32_t peer) const;
  bool has_left(std::uint32_t rank) const;
  bool is_cut_off(Item& item) const;
  Trouble fail(Trouble trouble, std::uint32_t culprit, const Item& item);
  Trouble fail_against(const Item& item, std::uint64_t number, std::uint64_t bytes, DType dtype);
  void describe(CallRecord& record, const Item& item) const;

  Region& region_;
  const Outboxes boxes_;
  const PeerMemory& memory_;
  WayTrials trials_;
  WaitPolicy policy_;
  mutable std::mutex mutex_;  // of all below
  PeerViews views_;
  std::unique_ptr<MailTransport> courier_;
  WaitCircles circles_;
  Items sends_;
  Items receives_;
  // How many transfers have not begun, of those that may compete for the same: room at a receiver,
  // or a message.
  std::unordered_map<std::uint64_t, std::size_t> queued_;
  std::uint32_t unsent_ = 0;  // how many of these are sends
  Stash stash_;
  std::atomic<std::size_t> pending_{0};
  std::uint64_t numbers_ = 0;
  std::uint64_t sequence_ = 0;           // of the last message sent
  std::vector<std::uint64_t> ordinals_;  // by receiver: how many messages,
  std::vector<std::uint64_t> taken_;     // and how many were taken as of the last check
  std::vector<double> moved_s_;          // by peer: when bytes of a waiting transfer last moved
  std::uint64_t used_ = 0;               // envelopes not yet seen to be free again
  std::uint32_t receivers_[kEnvelopes];  // whose they were
  int next_ = 0;                         // the envelope in turn
  Timed timed_;
  int wide_slot_ = 0;                  // the envelope that has the wide block,
  std::uint64_t wide_sequence_ = 0;    // as long as its message is this one
  std::vector<Expected> expected_;     // by sender
  std::vector<std::uint64_t> limits_;  // by sender: the last message seen in this pass, plus one
  std::vector<bool> is_blocked_;       // by receiver, during a pass over the sends
  std::uint32_t last_source_ = 0;      // of a message from any rank
};

}  // namespace rallypoint
