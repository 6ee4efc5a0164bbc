// The whole server except the sockets: bytes of many connections in, bytes out. It limits what is
// buffered for each of them and for all. Tests drive it directly; server.cc gives it sockets.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "store/gate.h"
#include "store/output.h"
#include "store/state.h"
#include "store/wire.h"

namespace rallypoint::store {

class Machine : private Outbox {
 public:
  // With a token, nothing is parsed before a client has proved that it knows it.
  explicit Machine(std::string token = {}) : state_(*this), token_(std::move(token)) {}

  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  bool needs_nonce() const { return !token_.empty(); }
  // `nonce` is kNonce random bytes where one is needed, never the same twice.
  ConnectionId open(double now, std::string_view nonce = {});
  // Handles what `bytes` completes. Returns null, or why the connection must be closed.
  const char* receive(ConnectionId id, std::string_view bytes);
  // Handles what was deferred while too much output was pending.
  const char* resume(ConnectionId id) { return receive(id, {}); }
  void close(ConnectionId id);
  std::vector<ConnectionId> late(double now) const { return state_.late(now); }

  // A paused connection must not be read from before its output has drained and it was resumed.
  bool paused(ConnectionId id) const { return connections_[id].paused; }
  Output& pending_output(ConnectionId id) { return connections_[id].output; }
  // The connections that got output since this was last called; valid until the next call.
  const std::vector<ConnectionId>& take_touched();

  bool owns_ephemeral(ConnectionId id) const { return state_.owns_ephemeral(id); }
  bool lost_events(ConnectionId id) const { return state_.lost_events(id); }
  size_t keys() const { return state_.keys(); }
  uint64_t requests() const { return requests_; }

 private:
  struct Connection {
    Parser parser;
    std::unique_ptr<Gate> gate;  // until it is passed
    std::string nonce;
    std::string input;  // the beginning of a request that is incomplete or deferred
    Output output;
    size_t counted = 0;  // how much of buffered_ is this connection's
    bool touched = false;
    bool paused = false;
  };

  Output& output(ConnectionId id) override;
  const char* pass_gate(ConnectionId id, std::string_view bytes, size_t& consumed);
  const char* parse(ConnectionId id, std::string_view bytes, size_t& consumed);
  const char* account(ConnectionId id);

  State state_;
  const std::string token_;
  std::deque<Connection> connections_;  // by id; references stay valid
  std::vector<ConnectionId> free_;
  std::vector<ConnectionId> touched_;
  std::vector<ConnectionId> taken_;
  Request request_;  // kept to reuse its memory
  size_t buffered_ = 0;
  uint64_t requests_ = 0;
};

}  // namespace rallypoint::store
