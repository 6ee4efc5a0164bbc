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
#include "engine/peer_memory.h"
#include "engine/reading.h"
#include "engine/reduce.h"
#include "engine/region.h"
#include "engine/transport.h"
#include "engine/waiting.h"
#include "engine/work.h"

namespace rallypoint {

inline constexpr std::uint32_t kAnyRank = ~std::uint32_t{0};
inline constexpr std::uint64_t kTurnBytes = 4 << 20;  // of a message at a time: others get on too

// Of parts, whose numbers may have passed the largest one: only neighbours are compared.
inline bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

// Whether its sender must stay until it is received, or nearly.
inline bool is_large(std::uint64_t bytes) { return bytes > kMailBytes; }

// One send or receive.
struct Transfer {
  bool sends = false;
  bool is_synchronous = false;  // a send that waits until it is received
  std::uint32_t peer = 0;       // kAnyRank: whoever sends; afterwards, who did
  std::uint32_t asked = 0;      // what `peer` was when it was posted
  std::int32_t tag = 0;
  DType dtype = DType::uint8;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  double timeout_s = 0;
};

class Mailbox final : public Alarm {
  struct Stashed;
  static constexpr std::uint64_t kUnnumbered = ~std::uint64_t{0};

 public:
  // A transfer on its way.
  struct Item {
    Transfer* transfer = nullptr;
    std::shared_ptr<Work> work = nullptr;
    std::uint64_t number = kUnnumbered;  // of this rank's transfers
    int slot = -1;                       // its envelope, once there is one
    std::uint64_t sequence = 0;          // of its message, if it sends
    std::uint64_t moved = 0;             // bytes of a message that goes in parts
    ReadingTrial* trial = nullptr;       // in which this message is timed,
    double posted_s = 0;                 // from then on
    std::uint32_t before = 0;            // parts of messages before it
    bool takes_parts = false;
    bool is_queued = false;  // not begun when it was posted
    std::uint64_t seen = 0;  // if it receives: messages before this one are not for it
    unsigned looks = 0;      // in vain, of `step`
    double began_s = 0;      // when it was first looked at in vain
    double cut_off_s = 0;    // when its peer was first seen without a connection
    bool was_gone = false;   // its peer, at the last look
    Trouble trouble = Trouble::none;
    Stashed* stashed = nullptr;  // the message that it takes, if that was taken in
  };
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
  // A message that was taken in before anyone wanted it.
  struct Stashed {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t sequence = 0;
    Transfer transfer;
    Item item;
    bool is_whole = false;
    bool is_wanted = false;  // by a receive
  };
  // Where the next message of a sender is expected. Read also by who only looks for news.
  struct Expected {
    Relaxed<std::uint32_t> slot;
    Relaxed<std::uint64_t> seen;  // the last sequence for which all envelopes were looked at
    std::uint64_t ordinal = kFirstOrdinal;  // all before it have been taken
  };

  // Where the parts of a message go, one after the other and then again from the start.
  struct Room {
    std::byte* at;
    std::uint64_t part;  // bytes
    std::uint32_t parts;
    Parts& progress;

    bool holds(std::uint64_t bytes) const { return bytes <= part * parts; }
  };

  Envelope& envelope(std::uint32_t rank, int slot) const;
  std::byte* block(std::uint32_t rank, int slot) const;
  Room room_of(std::uint32_t rank, int slot, std::uint64_t bytes, bool is_wide) const;
  Room room_of(std::uint32_t rank, int slot) const {
    return room_of(rank, slot, envelope(rank, slot).bytes, envelope(rank, slot).is_wide);
  }
  Outbox& outbox(std::uint32_t rank) const {
    return *region_.at<Outbox>(rank, region_.layout().outbox(rank));
  }
  std::atomic<std::uint64_t>& taken(std::uint32_t by, std::uint32_t from) const {
    return region_.at<std::atomic<std::uint64_t>>(by, region_.layout().taken(by))[from];
  }
  std::uint64_t sequence_for(std::uint32_t to, std::uint32_t from, int slot) const;

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
  unsigned room_for_one(std::uint32_t peer) const;
  unsigned waiting_for(std::uint32_t from, std::uint32_t to) const;
  int room_for(std::uint32_t peer);
  bool is_full_for(std::uint32_t peer) const;
  void look_at(int slot);
  bool receive(Item& item, bool& done);
  bool has_news(std::uint32_t source, bool looks_closely) const;
  bool match(Item& item);
  int find_expected(std::uint32_t source, std::int32_t tag) const;
  // A tag of null is any tag.
  int find(std::uint32_t source, std::uint32_t to, const std::int32_t* tag,
           std::uint64_t limit) const;
  bool take(Item& item, Envelope& from, bool& done);
  bool take_exposed(Item& item, Envelope& from, bool& done);
  bool take_parts(Item& item, const Envelope& from, bool& done);
  void release(Item& item, Envelope& from);

  bool advance_stash(bool has_slept);
  bool is_crowded(std::uint32_t source) const;
  bool take_in(std::uint32_t source, bool costly);
  Stashed* find_stashed(std::uint32_t source, std::int32_t tag);
  bool take_stashed(Item& item, bool& done);

  Trouble look_for_trouble(Item& item);
  std::uint32_t gone_peer(std::uint32_t peer) const;
  bool has_left(std::uint32_t rank) const;
  bool is_cut_off(Item& item) const;
  Trouble fail(Trouble trouble, std::uint32_t culprit, const Item& item);
  Trouble fail_against(const Item& item, std::uint64_t number, std::uint64_t bytes, DType dtype);
  void describe(CallRecord& record, const Item& item) const;
  void end_waiting(const Transfer& transfer);
  void say_slot(const Item& item);
  void say_unsent();
  bool is_stuck(std::uint32_t rank, std::uint64_t epoch) const;
  Trouble look_for_circle();
  Trouble look_for_far_circle(const Item& item);
  bool is_stuck(const Item& item) const;
  bool keeps_waiting(const Probe& probe) const;
  void probe(const Item& item, Probe probe);
  bool waits_afar(std::uint32_t rank) const;
  bool add_member(Probe& probe, std::uint32_t rank) const;

  Region& region_;
  const PeerMemory& memory_;
  ReadingTrials trials_;
  unsigned spins_;
  mutable std::mutex mutex_;  // of all below
  PeerViews views_;
  std::unique_ptr<MailTransport> courier_;
  Items sends_;
  Items receives_;
  // How many have not begun, of those that may be after the same: room at a receiver, or a message.
  std::unordered_map<std::uint64_t, std::size_t> queued_;
  std::uint32_t unsent_ = 0;  // how many of these are sends
  std::list<Stashed> stash_;
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
  const Transfer* waiting_ = nullptr;    // see set_waiting
  std::vector<std::uint64_t> circle_;    // seen at the last look
  double probed_s_ = 0;                  // when other hosts were last asked
};

}  // namespace rallypoint
