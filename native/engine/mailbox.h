// Messages from one rank to another: send and receive, matched by source and tag.
//
//   sender's outbox      | full bits | 32 envelopes | 32 blocks |
//   receiver             reads the sender's bits, takes the oldest envelope that matches, clears
//                        its bit
//
// Who sends writes its own outbox only, so that there is nothing for each pair of ranks; a receiver
// clears bits and writes `request`. Small messages wait in their block, and the sender goes on. A
// large one waits in the sender's memory, and its receiver reads it from there, or, where the
// kernel forbids that, asks for it in parts through the block. Messages between hosts go by
// courier, and appear in a copy of their sender's outbox. A rank that waits in vain takes in what
// fills a sender's outbox: what it waits for may be behind.
//
// It never waits: `advance` gets on as far as that goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/layout.h"
#include "engine/reduce.h"
#include "engine/region.h"
#include "engine/tcp/courier.h"
#include "engine/waiting.h"
#include "engine/work.h"

namespace rallypoint {

inline constexpr std::uint32_t kAnyRank = ~std::uint32_t{0};

// Whether a message stays in its sender's memory until it is received.
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
 public:
  // `courier` is null if all ranks are on this host.
  Mailbox(Region& region, std::unique_ptr<tcp::Courier> courier);

  // Both must stay where they are until the work is done. Begins at once, if that is possible.
  void post(Transfer& transfer, std::shared_ptr<Work> work);
  // Gets on with all; returns whether anything moved. Who has slept looks for trouble.
  bool advance(bool has_slept);
  bool is_empty() const { return pending_.load(std::memory_order_acquire) == 0 && !has_backlog(); }
  // Whether messages that count as sent wait for their connection.
  bool has_backlog() const { return courier_ != nullptr && courier_->has_backlog(); }
  void arm() override;
  // Sends nothing more; until the time, waits for what is on its way to other hosts.
  void finish(double until_s);
  std::size_t size() const { return pending_.load(std::memory_order_acquire); }

  // A thread waits for this transfer, and nobody else in the process will do anything: then ranks
  // that wait for each other in a circle are in trouble. Null when it waits no more.
  void set_waiting(const Transfer* transfer);

 private:
  struct Stashed;
  struct Item {
    Transfer* transfer = nullptr;
    std::shared_ptr<Work> work;
    std::uint64_t number = 0;    // of this rank's transfers
    int slot = -1;               // its envelope, once there is one
    std::uint64_t sequence = 0;  // of its envelope, if that went to another host
    std::uint64_t moved = 0;     // bytes of a large message
    bool takes_parts = false;
    double began_s = 0;     // when it was first looked at in vain
    double cut_off_s = 0;   // when its peer was first seen without a connection
    bool was_gone = false;  // its peer, at the last look
    Trouble trouble = Trouble::none;
    Stashed* stashed = nullptr;  // the message that it takes, if that was taken in
  };
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

  Envelope& envelope(std::uint32_t rank, int slot) const;
  std::byte* block(std::uint32_t rank, int slot) const;
  Outbox& outbox(std::uint32_t rank) const {
    return *region_.at<Outbox>(rank, region_.layout().outbox(rank));
  }
  std::atomic<std::uint64_t>& full(std::uint32_t rank) const { return outbox(rank).full; }

  bool advance(Items& items, bool has_slept, Items& finished);
  void finish(Items& finished);
  // Each returns whether anything moved.
  bool send(Item& item, bool& done);
  bool go_on_sending(Item& item, bool& done);
  bool send_far(Item& item, bool& done);
  bool go_on_sending_far(Item& item, bool& done);
  bool take_far(Item& item, bool& done);
  unsigned room_for_one(std::uint32_t peer) const;
  unsigned waiting_for(std::uint32_t from, std::uint32_t to, std::uint64_t used) const;
  bool receive(Item& item, bool& done);
  bool match(Item& item);
  // A tag of null is any tag.
  int find(std::uint32_t source, std::uint32_t to, const std::int32_t* tag,
           std::uint64_t limit) const;
  bool read(Item& item, const Envelope& from, bool& done);
  bool take_parts(Item& item, Envelope& from, bool& done);

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
  std::mutex mutex_;  // of all below
  std::unique_ptr<tcp::Courier> courier_;
  Items sends_;
  Items receives_;
  std::list<Stashed> stash_;
  std::atomic<std::size_t> pending_{0};
  std::uint64_t numbers_ = 0;
  std::uint64_t held_ = 0;             // envelopes whose senders wait for their end
  std::uint64_t sequence_ = 0;         // of the last message sent
  std::vector<std::uint64_t> limits_;  // by sender: the last message seen in this pass, plus one
  std::vector<bool> is_blocked_;       // by receiver, during a pass over the sends
  std::uint32_t last_source_ = 0;      // of a message from any rank
  bool reads_directly_ = true;         // until the kernel says no
  const Transfer* waiting_ = nullptr;  // see set_waiting
  std::vector<std::uint64_t> circle_;  // seen at the last look
  double probed_s_ = 0;                // when other hosts were last asked
};

}  // namespace rallypoint
