// Messages through shared memory: numbered lines, and rings for payloads that do not fit into a
// line. Messages to and from ranks on other hosts use a transport; only the sender to such a rank
// needs to know.
//
// A channel connects an ordered list of members that run the same programs in the same order: the
// ranks of the communicator. Every message has a place that both ends compute from the iteration
// and its ordinal, so nothing is negotiated. A line or a piece of a ring is reused only when the
// progress counters of all its receivers show that they are done.
//
// It never waits: an operation that is not possible now returns the member it depends on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/layout.h"
#include "engine/program.h"
#include "engine/region.h"
#include "engine/transport.h"

namespace rallypoint {

class Channel;

// What occupies a place, and who must take it before the place is free.
struct Occupant {
  Channel* channel = nullptr;  // null: free
  std::uint64_t iteration = 0;
  const std::vector<Receiver>* receivers = nullptr;
};

// The sender's ring of payloads: allocated at the tail, freed at the head, oldest first. A lap is
// as long as four of its largest messages, or 64 KiB, so that small ones stay in a small part of
// the caches.
class Ring {
 public:
  explicit Ring(std::byte* base) : base_(base) {}

  // Returns null while full; `blocker` is then the rank that must make progress.
  std::byte* take(std::size_t bytes, const Occupant& occupant, std::uint32_t& blocker);
  std::uint64_t offset(const std::byte* at) const { return static_cast<std::uint64_t>(at - base_); }
  // How many messages of that size there are in a lap.
  static unsigned lap(std::uint64_t bytes) {
    return static_cast<unsigned>(lap_bytes(bytes) / bytes);
  }

 private:
  static std::uint64_t lap_bytes(std::uint64_t bytes) {
    return std::min<std::uint64_t>(kRingBytes, std::max<std::uint64_t>(kLapBytes, 4 * bytes));
  }

  struct Piece {
    std::uint64_t end;
    Occupant occupant;
  };

  std::byte* base_;
  std::uint64_t head_ = 0;
  std::uint64_t tail_ = 0;
  std::uint64_t lap_ = 0;  // bytes of the present one
  std::deque<Piece> pieces_;
};

// The location of a member's lane in the region.
struct Port {
  Line* lines = nullptr;  // null: it is on another host
  const std::byte* ring = nullptr;
  Progress* progress = nullptr;
};

// The place of a message, between reserve and publish.
struct Slot {
  Line* line;
  std::uint64_t offset;
  bool is_touched = false;
};

class Channel {
 public:
  // The channel of all ranks.
  static Channel collective(Region& region, std::deque<Ring>& rings, MessageTransport* wire);

  std::uint32_t self() const { return self_; }
  std::uint32_t rank_of(std::uint32_t member) const { return members_[member]; }
  CallRecord& call(std::uint32_t member, std::uint64_t number) const {
    return calls_[member][number % kCalls];
  }

  // Sender: returns room for a message, or null and the rank that must make progress first. A
  // message that receivers will read elsewhere only needs room for its Place, and its slot's offset
  // is then set to kExposed.
  std::byte* reserve(const Program& program, std::uint32_t lane, const Operation& send,
                     std::uint64_t iteration, std::size_t bytes, Slot& slot,
                     std::uint32_t& blocker);
  void publish(const Slot& slot, const Operation& send, std::uint64_t iteration, std::size_t bytes,
               std::uint64_t signature);

  // Sender: continues a message to a rank on another host; returns whether all of it has been sent.
  bool send_far(const Receiver& to, std::uint32_t lane, const Operation& send,
                std::uint64_t iteration, std::uint64_t signature, std::uint64_t bytes,
                std::span<const iovec> payload) const {
    const Message message{lane, sequence(iteration, send.ordinal), signature, bytes};
    return wire_->send(members_[to.rank], message, payload);
  }

  // Receiver: the line of a message once it has arrived, or null.
  const Line* peek(const Program& program, const Operand& from, std::uint64_t iteration) const;
  // Its payload, or null if the line is invalid.
  const std::byte* payload(const Line& line, const Operand& from) const;
  bool is_far(const Operand& from) const {
    return ports_[from.peer * kLanes + from.lane].lines == nullptr;
  }
  // Announces that a message from another host is awaited; its payload may be written directly to
  // `target`, unless null.
  void expect(const Operand& from, std::uint64_t iteration, std::uint64_t signature,
              std::byte* target, std::uint64_t bytes) const {
    const Expected message{sequence(iteration, from.ordinal), signature, target, bytes};
    wire_->expect(members_[from.peer], from.lane, message);
  }
  // Releases such a message after it was taken.
  void release(const Operand& from, std::uint64_t iteration) const {
    wire_->release(members_[from.peer], from.lane, sequence(iteration, from.ordinal));
  }
  MessageTransport* wire() const { return wire_; }  // null: there are no other hosts
  void set_progress(std::uint32_t lane, std::uint64_t iteration, std::uint32_t operations) {
    ports_[self_ * kLanes + lane].progress->value.store(iteration << kOperationBits | operations,
                                                        std::memory_order_release);
  }
  void wake(std::uint32_t member) const { region_->wake(members_[member]); }

  // Whether all receivers have taken what occupies a place; if not, one that has not.
  bool is_taken(const Occupant& occupant, std::uint32_t& blocker) const;

  std::uint64_t iterations = kFirstOrdinal;  // run so far, the same on all members
  std::uint64_t calls = kFirstOrdinal;

 private:
  Channel() = default;
  static std::uint64_t progress_of(const Occupant& occupant, const Receiver& receiver) {
    return occupant.iteration << kOperationBits | (receiver.operation + 1);
  }
  bool is_taken_cached(const Occupant& occupant, std::uint32_t& blocker);
  static std::uint64_t sequence(std::uint64_t iteration, std::uint32_t ordinal) {
    return iteration << kOperationBits | (ordinal + 1);
  }

  Region* region_ = nullptr;
  MessageTransport* wire_ = nullptr;
  std::uint32_t self_ = 0;
  unsigned lines_ = 0;                  // per lane, a power of two
  std::vector<std::uint32_t> members_;  // their ranks
  std::vector<Port> ports_;             // by member and lane
  std::vector<CallRecord*> calls_;      // by member
  std::vector<Ring*> rings_;            // by lane, of this rank
  std::vector<Occupant> occupants_;     // by lane and line, of this rank
  std::vector<std::uint64_t> seen_;     // progress by member and lane, as last read
};

// On the path of every message, hence in the header for inlining.

// Progress is in the receiver's cache: read it only if the last known value does not suffice.
inline bool Channel::is_taken_cached(const Occupant& occupant, std::uint32_t& blocker) {
  for (const Receiver& receiver : *occupant.receivers) {
    const std::size_t port = receiver.rank * kLanes + receiver.lane;
    const std::uint64_t needed = progress_of(occupant, receiver);
    if (seen_[port] >= needed) continue;
    seen_[port] = ports_[port].progress->value.load(std::memory_order_acquire);
    if (seen_[port] < needed) {
      blocker = members_[receiver.rank];
      return false;
    }
  }
  return true;
}

// The peer may be polling the line: all stores to it are made together, or the cache line would
// bounce between the two cores.
inline void Channel::publish(const Slot& slot, const Operation& send, std::uint64_t iteration,
                             std::size_t bytes, std::uint64_t signature) {
  Line& line = *slot.line;
  line.signature = signature;
  line.offset = slot.offset;
  line.bytes = bytes;
  line.is_touched = slot.is_touched;
  line.sequence.store(sequence(iteration, send.ordinal), std::memory_order_release);
  Region::fence();
  for (const Receiver& receiver : send.receivers) wake(receiver.rank);
}

inline const Line* Channel::peek(const Program& program, const Operand& from,
                                 std::uint64_t iteration) const {
  const std::uint64_t place = (iteration * program.sends + from.ordinal) & (lines_ - 1);
  const Line* const lines = ports_[from.peer * kLanes + from.lane].lines;
  if (lines == nullptr) [[unlikely]] {
    return wire_->peek(members_[from.peer], from.lane, sequence(iteration, from.ordinal));
  }
  const Line& source = lines[place];
  const std::uint64_t arrived = source.sequence.load(std::memory_order_acquire);
  return arrived == sequence(iteration, from.ordinal) ? &source : nullptr;
}

inline const std::byte* Channel::payload(const Line& line, const Operand& from) const {
  if (is_far(from)) [[unlikely]]
    return far_payload(line);
  if (line.offset == kInline) return line.bytes <= kInlineBytes ? line.payload : nullptr;
  if (line.offset == kExposed) return line.payload;
  if (line.bytes > kRingBytes || line.offset > kRingBytes - line.bytes) return nullptr;
  return ports_[from.peer * kLanes + from.lane].ring + line.offset;
}

inline std::byte* Channel::reserve(const Program& program, std::uint32_t lane,
                                   const Operation& send, std::uint64_t iteration,
                                   std::size_t bytes, Slot& slot, std::uint32_t& blocker) {
  const std::uint64_t place = (iteration * program.sends + send.ordinal) & (lines_ - 1);
  Occupant& occupant = occupants_[lane * lines_ + place];
  if (occupant.channel != nullptr && !is_taken_cached(occupant, blocker)) return nullptr;
  const Occupant next{this, iteration, &send.receivers};
  slot = {ports_[self_ * kLanes + lane].lines + place, kInline};
  std::byte* target = slot.line->payload;
  if (bytes > kInlineBytes) {
    target = rings_[lane]->take(bytes, next, blocker);
    if (target == nullptr) return nullptr;
    slot.offset = rings_[lane]->offset(target);
  }
  occupant = next;
  return target;
}

}  // namespace rallypoint
