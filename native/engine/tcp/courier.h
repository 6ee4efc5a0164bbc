// Sends and receives between hosts: carries envelopes and payloads over one stream to each peer.
// The mailbox matches receives with envelopes.
//
//   sender                                     receiver
//   envelope, and its payload if small    ->   the copy of the sender's outbox, in this process
//                                         <-   "send it", once a receive matches a large one
//   parts, from the user's memory         ->   the user's memory
//                                         <-   "taken": the place of the envelope is free again
//
// A pair of ranks has 32 places. A place that is free again is reported with the next frame, or at
// once if there are many, or somebody waits for one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/far_outbox.h"
#include "engine/layout.h"
#include "engine/region.h"
#include "engine/tcp/inlet.h"
#include "engine/tcp/late_connections.h"
#include "engine/tcp/peer_address.h"
#include "engine/tcp/poller.h"
#include "engine/tcp/stream.h"
#include "engine/transport.h"

namespace rallypoint::tcp {

enum class MailKind : std::uint8_t { envelope = 1, request, part, taken };

struct MailHeader {
  std::uint32_t magic;
  MailKind kind;
  std::uint8_t slot;
  std::uint8_t is_synchronous;
  DType dtype;
  std::uint64_t sequence;
  std::uint64_t number;
  std::uint64_t bytes;  // bytes of the message, or of a part
  std::int32_t tag;
  std::uint32_t taken;  // a bit for each place that is free again

  std::size_t payload() const {
    if (kind == MailKind::part) return bytes;
    return kind == MailKind::envelope && FarOutbox::is_small(bytes) ? bytes : 0;
  }
};

class Courier final : public MailTransport {
 public:
  // `late` makes missing connections; null: all exist.
  Courier(Region& region, const std::vector<PeerAddress>& peers,
          std::shared_ptr<LateConnections> late = nullptr);

  int send(std::uint32_t to, const Mail& mail, const std::byte* payload) override;
  bool is_taken(std::uint32_t to, int slot) const override;
  bool is_requested(std::uint32_t to, int slot) const override;
  std::uint64_t last_sent(std::uint32_t to) const override {
    return is_connected(to) ? peer(to).last_sent : 0;
  }
  bool is_idle(std::uint32_t to) const override;
  void send_part(std::uint32_t to, int slot, const std::byte* data, std::uint64_t bytes) override;

  void expect(std::uint32_t from) override {
    if (!is_connected(from)) late_->want(from);
  }
  void request(std::uint32_t from, int slot, std::byte* target, std::uint64_t bytes) override;
  std::uint64_t landed(std::uint32_t from, int slot) const override;
  void take(std::uint32_t from, int slot) override;

  bool poll() override;
  void arm() override;
  bool has_backlog() const override { return backlog_.load(std::memory_order_acquire) != 0; }

  std::optional<Failure> failure() const override {
    return failure_ || late_ == nullptr ? failure_ : late_->failure();
  }
  ConnectionState state(std::uint32_t rank) const override;
  void finish_writing() override;
  std::size_t unconfirmed() const override;

 private:
  struct Frame {
    MailHeader header;
    const std::byte* data;
    std::vector<std::byte> own;
    std::size_t sent = 0;
  };
  struct Landing {
    std::byte* target = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t landed = 0;
  };
  struct Peer {
    Peer(std::uint32_t rank_, int fd) : rank(rank_), stream(fd) {}
    std::uint32_t rank;
    Stream stream;
    Inlet<MailHeader> inlet;
    std::deque<Frame> unsent;
    std::uint64_t last_sent = 0;  // sequence of an envelope
    std::uint32_t in_use = 0;     // places of our envelopes,
    std::uint32_t requested = 0;  // and which of them the peer wants
    std::uint32_t taken = 0;      // of theirs: to be reported
    Landing landings[kEnvelopes];
  };
  class Reader;

  static constexpr std::size_t kNone = ~std::size_t{0};
  bool is_connected(std::uint32_t rank) const { return places_[rank] != kNone; }
  Peer& peer(std::uint32_t rank) const { return *peers_[places_[rank]]; }
  void add(std::uint32_t rank, int fd);
  bool add_late();
  void put(Peer& to, MailHeader header, const std::byte* data, bool copies);
  bool flush(Peer& to);

  Region& region_;
  Poller poller_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::size_t> places_;  // by rank; kNone: there is no connection yet
  std::atomic<std::size_t> backlog_{0};
  std::optional<Failure> failure_;
  std::shared_ptr<LateConnections> late_;
};

}  // namespace rallypoint::tcp
