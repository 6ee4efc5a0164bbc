// What the engine requires of a transport to ranks on other hosts, which share no memory with this
// one.
//
//   Executor, Channel   ->  MessageTransport   numbered messages of collectives
//   Mailbox             ->  MailTransport      sends and receives, matched by tag
//   Region              ->  Messenger          trouble, leave-taking, questions (region.h)
//
// Nothing here ever waits: an operation that is not possible now is requested again. `tcp/`
// implements it, and so does native/tests/adverse_transport.h, for tests. docs/transports.md is the
// guide for a new one.
//
// Threads: calls of a MessageTransport are made under the executor's mutex, calls of a
// MailTransport under the mailbox's, from whichever thread carries the operation out. Those of a
// Messenger come from any thread at any time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/layout.h"
#include "engine/region.h"
#include "engine/waiting.h"

namespace rallypoint {

// The state of the connection with a rank.
enum class ConnectionState : std::uint8_t {
  none,   // not needed yet, or being made: nothing is known of the rank
  open,   // bytes can be sent and received
  ended,  // nothing more will arrive: everything that the rank sent was taken in
};

// A failure from which a transport cannot recover.
struct Failure {
  std::uint32_t rank = 0;
  // corrupt: invalid data arrived; unreachable; exhausted: this rank itself has reached a limit
  Trouble trouble = Trouble::none;
  std::uint32_t error = 0;  // the system's error, if it is one of the last two
};

// This rank's system refuses what it needs.
inline Failure exhausted(const Region& region, int error) {
  return {region.rank(), Trouble::exhausted, static_cast<std::uint32_t>(error)};
}

// The common part of both kinds.
class Transport : public Alarm {
 public:
  // Takes in what has arrived, and continues sending; returns whether anything moved.
  virtual bool poll() = 0;
  // A rank is about to sleep: its bell (Region::wake_self) must ring, once, as soon as `poll` would
  // move anything. Data that arrived before this call counts as well.
  void arm() override = 0;

  // The first failure, if there was one. It is permanent.
  virtual std::optional<Failure> failure() const = 0;
  virtual ConnectionState state(std::uint32_t rank) const = 0;

  // Nothing more will be sent. Ranks that have taken in everything that was sent then see the end
  // of the connection.
  virtual void finish_writing() = 0;
  // Bytes that may still be lost if this process ends now.
  virtual std::size_t unconfirmed() const = 0;
};

// A message of a collective. Both ends compute the same lane and sequence for it.
struct Message {
  std::uint32_t lane;
  std::uint64_t sequence;  // never 0; grows within a lane, not always by one
  std::uint64_t signature;
  std::uint64_t bytes;  // at most kBlockBytes
};

// A message that an operation waits for.
struct Expected {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;
  std::byte* target = nullptr;  // where its payload may be written directly, if it is as expected
  std::uint64_t bytes = 0;
};

// Messages are identified by sender, lane and sequence, so they may arrive in any order.
class MessageTransport : public Transport {
 public:
  // Continues sending a message. While it returns false, it is called again with the same message,
  // and with others of other lanes; the payload stays in place and unchanged. It returns true when
  // the payload's memory may be reused.
  virtual bool send(std::uint32_t rank, const Message& message, std::span<const iovec> payload) = 0;

  // The line of a message once all of it has arrived, or null; `far_payload` is the place of its
  // payload. Valid until `release`.
  virtual const Line* peek(std::uint32_t rank, std::uint32_t lane,
                           std::uint64_t sequence) const = 0;
  // An operation waits for this message, and for no other of the lane. However much else has
  // arrived from the rank, its bytes must be taken in until this message is there; otherwise
  // programs could deadlock. The target may be written only until the message is there.
  virtual void expect(std::uint32_t rank, std::uint32_t lane, const Expected& message) = 0;
  // The message has been used, and its memory may be given back.
  virtual void release(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) = 0;
};

// A far message's line: `offset` is kInline, or the address of the payload in this process.
inline const std::byte* far_payload(const Line& line) {
  return line.offset == kInline ? line.payload : reinterpret_cast<const std::byte*>(line.offset);
}

// The facts about a send that precede its payload.
struct Mail {
  std::uint64_t sequence = 0;  // of the sender's messages, whoever gets them; never 0
  std::uint64_t number = 0;    // of the sender's transfers
  std::uint64_t bytes = 0;
  std::int32_t tag = 0;
  DType dtype = DType::uint8;
  bool is_synchronous = false;
};

// Sends and receives. A pair of ranks has kEnvelopes places in each direction. The mailbox matches
// receives with envelopes: it looks for them in a copy of each sender's outbox (far_outbox.h),
// where they must appear in the order in which they were sent.
class MailTransport : public Transport {
 public:
  // Sender: sends an envelope, with its payload if that is at most kMailBytes, which has been
  // copied or sent on return. Returns the envelope's place, or -1 if all are in use, or there is no
  // connection yet.
  virtual int send(std::uint32_t to, const Mail& mail, const std::byte* payload) = 0;
  // Whether the place is free again, because its message was taken.
  virtual bool is_taken(std::uint32_t to, int slot) const = 0;
  // Whether the receiver wants the payload of a large message.
  virtual bool is_requested(std::uint32_t to, int slot) const = 0;
  virtual std::uint64_t last_sent(std::uint32_t to) const = 0;  // sequence of an envelope; 0: none
  // Whether nothing waits to be sent to the rank; a part may then be sent. Its memory must stay
  // unchanged until this is true again. Parts of a message arrive in order.
  virtual bool is_idle(std::uint32_t to) const = 0;
  virtual void send_part(std::uint32_t to, int slot, const std::byte* data,
                         std::uint64_t bytes) = 0;

  // Receiver: a receive waits for whatever the rank sends next.
  virtual void expect(std::uint32_t from) = 0;
  // Requests the payload of a large message, to be written to `target` part after part;
  virtual void request(std::uint32_t from, int slot, std::byte* target, std::uint64_t bytes) = 0;
  // returns how many bytes of it have arrived;
  virtual std::uint64_t landed(std::uint32_t from, int slot) const = 0;
  // and reports that a message was taken: its place is free again, and its sender learns of that at
  // once if it is synchronous, otherwise before it runs out of places.
  virtual void take(std::uint32_t from, int slot) = 0;

  // Whether envelopes that count as sent still wait to be sent: any thread may ask.
  virtual bool has_backlog() const = 0;
};

// A rank on another host.
struct FarRank {
  std::uint32_t rank;
  std::int32_t pid;  // on its host
};

// The transports of one group, from the ranks of one process to those on other hosts.
struct Transports {
  std::unique_ptr<Messenger> control;
  std::unique_ptr<MessageTransport> messages;
  std::unique_ptr<MailTransport> mail;
};
using MakeTransports = std::function<Transports(Region&)>;

}  // namespace rallypoint
