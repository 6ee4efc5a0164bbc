// Messages from one rank to another: send and receive, matched by source and tag.
//
//   sender's outbox      | 32 envelopes | 32 blocks |
//   receiver             takes the oldest of the sender's envelopes that matches, and clears it
//
// Who sends writes its own outbox, so that a pair of ranks needs no more than a word: how many of
// the one's messages the other has taken. Envelopes are used in turn, so a receiver knows where the
// next message will be, and a tiny one is all in that line. Others go in parts through the
// envelope's block, copied in by the sender while the receiver copies out; if they fit into it, the
// sender goes on. Large ones in memory that is in reach (peer_memory.h) stay there until they are
// received. Messages between hosts go by a transport, and appear in a copy of their sender's
// outbox. A rank that waits in vain takes in what fills a sender's outbox: what it waits for may be
// behind.
//
// It never waits: `advance` gets on as far as that goes, and so does `step` with a transfer that
// is the only one, without any of what it takes to have several.
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
#include "engine/reading.h"
#include "engine/region.h"
#include "engine/stash.h"
#include "engine/transfer.h"
#include "engine/transport.h"
#include "engine/wait_circles.h"
#include "engine/waiting.h"
#include "engine/work.h"

namespace rallypoint {

inline constexpr std::uint64_t kTurnBytes = 4 << 20;  // of a message at a time: others get on too

// Of parts, whose numbers may have passed the largest one: only neighbours are compared.
inline bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

class Mailbox final : public Alarm {
 public:
  using Item = PendingTransfer;
  enum class Step { done, moved, blocked, others };

  // `courier` is null if all ranks are on this host. `spins`: how often to look for a part that is
  // being copied, before getting on with something else.
  Mailbox(Region& region, const PeerMemory& memory, std::unique_ptr<MailTransport> courier,
          unsigned spins);

  // Gets on with a transfer that nobody else knows of. It is done, perhaps with trouble; or, if
  // `others` come first, or it takes long, it must be posted.
  Step step(Item& item);
  // Takes care of it from now on; transfer and work must stay where they are until it is done.
  // Begins at once, if that is possible.
  void post(Item item);
  // Gets on with all; returns whether anything moved. Who has slept looks for trouble.
  bool advance(bool has_slept);
  bool is_empty() const { return pending_.load(std::memory_order_acquire) == 0 && !has_backlog(); }
  // Whether messages that count as sent wait for their connection.
  bool has_backlog() const { return courier_ != nullptr && courier_->has_backlog(); }
  void arm() override;
  // Sends nothing more; until the time, waits for what is on its way to other hosts.
  void finish(double until_s);
  std::size_t size() const { return pending_.load(std::memory_order_acquire); }

  // Of a receive that waits: the tag of the oldest message from there that nobody has asked for.
  std::optional<std::int32_t> unwanted_tag(const Transfer& receive) const;

  // A thread waits for this transfer, and nobody else in the process will do anything: then ranks
  // that wait for each other in a circle are in trouble. Null when it waits no more.
  void set_waiting(const Transfer* transfer);
  // Ends the transfer, unless it is done, and with it all operations of all ranks.
  void interrupt(const Transfer& transfer);

 private:
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
  using Items = std::list<Item>;
  // Where the next message of a sender is expected. Read also by who only looks for news.
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
  bool find_place(Item& item, Place& place);
  bool is_to_be_read(Item& item);
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
  ReadingTrials trials_;
  unsigned spins_;
  mutable std::mutex mutex_;  // of all below
  PeerViews views_;
  std::unique_ptr<MailTransport> courier_;
  WaitCircles circles_;
  Items sends_;
  Items receives_;
  // How many have not begun, of those that may be after the same: room at a receiver, or a message.
  std::unordered_map<std::uint64_t, std::size_t> queued_;
  std::uint32_t unsent_ = 0;  // how many of these are sends
  Stash stash_;
  std::atomic<std::size_t> pending_{0};
  std::uint64_t numbers_ = 0;
  std::uint64_t sequence_ = 0;           // of the last message sent
  std::vector<std::uint64_t> ordinals_;  // by receiver: how many messages,
  std::vector<std::uint64_t> taken_;     // and how many were taken when last looked up
  std::uint64_t used_ = 0;               // envelopes that have not been seen to be free again
  std::uint32_t receivers_[kEnvelopes];  // whose they were
  int next_ = 0;                         // the envelope in turn
  int wide_slot_ = 0;                    // the envelope that has the wide block,
  std::uint64_t wide_sequence_ = 0;      // as long as its message is this one
  std::vector<Expected> expected_;       // by sender
  std::vector<std::uint64_t> limits_;    // by sender: the last message seen in this pass, plus one
  std::vector<bool> is_blocked_;         // by receiver, during a pass over the sends
  std::uint32_t last_source_ = 0;        // of a message from any rank
};

}  // namespace rallypoint
