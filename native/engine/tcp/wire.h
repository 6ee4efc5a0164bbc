// Messages of collectives between hosts: frames over a few streams to each peer.
//
//   sender    the user's memory -> socket
//   receiver  socket -> the user's memory, if the operation that takes the message already waits
//                    -> or else a block, until it comes to that
//
// Nothing is granted or acknowledged: a receiver that has taken in enough from a peer stops reading
// from it, and TCP stops the peer. It continues to read, however much it has, while an operation
// waits for a message of that peer; so no order of messages can deadlock a program. Consecutive
// messages of a lane take different streams, so one lane uses all of them, and may overtake each
// other; the receiver tells them apart by their sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/layout.h"
#include "engine/region.h"
#include "engine/tcp/inlet.h"
#include "engine/tcp/late_connections.h"
#include "engine/tcp/peer_address.h"
#include "engine/tcp/poller.h"
#include "engine/tcp/stream.h"
#include "engine/transport.h"

namespace rallypoint::tcp {

struct WireHeader {
  std::uint32_t magic;
  std::uint32_t lane;
  std::uint64_t sequence;
  std::uint64_t signature;
  std::uint64_t bytes;

  std::size_t payload() const { return bytes; }
};

class Wire final : public MessageTransport {
 public:
  // `late` makes missing connections; null: all exist.
  Wire(Region& region, const std::vector<PeerAddress>& peers,
       std::shared_ptr<LateConnections> late = nullptr);

  bool send(std::uint32_t rank, const Message& message, std::span<const iovec> payload) override;
  const Line* peek(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) const override;
  void expect(std::uint32_t rank, std::uint32_t lane, const Expected& message) override;
  void release(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) override;

  bool poll() override;
  void arm() override;
  std::optional<Failure> failure() const override {
    return failure_ || late_ == nullptr ? failure_ : late_->failure();
  }
  ConnectionState state(std::uint32_t rank) const override;
  void finish_writing() override;
  std::size_t unconfirmed() const override;

 private:
  struct Connection;
  struct Arrival {
    Line line;
    Connection* connection = nullptr;  // by which it came
    std::unique_ptr<std::byte[]> block;
    bool is_complete = false;
    bool is_released = false;
  };
  struct Connection {
    Connection(std::uint32_t rank_, std::size_t place_, int fd)
        : rank(rank_), place(place_), stream(fd) {}
    std::uint32_t rank;
    std::size_t place;
    Stream stream;
    Inlet<WireHeader> inlet;
    WireHeader sending{};  // its message in progress
    std::size_t sent = 0;  // and how much of it has been sent
    bool is_sending = false;
    Arrival* arriving = nullptr;
    std::size_t blocks = 0;  // blocks that hold messages from it
    std::size_t lines = 0;   // and small messages that need no block
  };
  class Reader;

  // The connection for a message; both ends compute it.
  Connection& connection(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) const {
    const std::uint64_t piece = (sequence >> kOperationBits) + sequence;
    return *connections_[first_[rank] + (lane + piece) % streams_[rank]];
  }
  std::size_t port(std::uint32_t rank, std::uint32_t lane) const { return rank * kLanes + lane; }
  bool is_awaited(const Connection& connection) const;
  bool wants(const Connection& connection) const;
  void look_again(const Connection& connection);
  std::unique_ptr<std::byte[]> take_block();
  void add(std::uint32_t rank, const std::vector<int>& fds);
  bool add_late();

  Region& region_;
  Poller poller_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<std::size_t> first_;             // by rank: the first of its connections,
  std::vector<std::uint32_t> streams_;         // and their number; 0: none yet
  std::vector<std::deque<Arrival>> arrivals_;  // by rank and lane
  std::vector<Expected> expected_;             // by rank and lane; sequence 0: none
  std::vector<std::unique_ptr<std::byte[]>> free_;
  std::optional<Failure> failure_;
  std::shared_ptr<LateConnections> late_;
};

}  // namespace rallypoint::tcp
