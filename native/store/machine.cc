#include "store/machine.h"

#include <utility>

namespace rallypoint::store {

namespace {

constexpr size_t kPauseAbove = 256 << 10;    // output of one connection that nobody reads
constexpr size_t kOwnShare = 64 << 10;       // what a connection may buffer in any case
constexpr size_t kMaxBuffered = 1ull << 30;  // over all connections
constexpr size_t kKeepCapacity = 4 << 10;

}  // namespace

ConnectionId Machine::open(double now, std::string_view nonce) {
  ConnectionId id;
  if (free_.empty()) {
    id = static_cast<ConnectionId>(connections_.size());
    connections_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  if (!token_.empty()) {
    connections_[id].gate = std::make_unique<Gate>();
    connections_[id].nonce = nonce;
  }
  state_.connect(id, now);
  return id;
}

void Machine::close(ConnectionId id) {
  state_.disconnect(id);
  buffered_ -= connections_[id].counted;
  connections_[id] = Connection();
  free_.push_back(id);
}

Output& Machine::output(ConnectionId id) {
  Connection& connection = connections_[id];
  if (!connection.touched) {
    connection.touched = true;
    touched_.push_back(id);
  }
  return connection.output;
}

const std::vector<ConnectionId>& Machine::take_touched() {
  taken_.clear();
  taken_.swap(touched_);
  for (ConnectionId id : taken_) connections_[id].touched = false;
  return taken_;
}

const char* Machine::receive(ConnectionId id, std::string_view bytes) {
  Connection& connection = connections_[id];
  connection.paused = false;
  size_t consumed = 0;
  const char* reason;
  if (connection.input.empty()) {
    reason = parse(id, bytes, consumed);
    if (consumed < bytes.size()) connection.input.assign(bytes.substr(consumed));
  } else {
    connection.input.append(bytes);
    reason = parse(id, connection.input, consumed);
    connection.input.erase(0, consumed);
    if (connection.input.empty() && connection.input.capacity() > kKeepCapacity) {
      connection.input = std::string();
    }
  }
  return reason ? reason : account(id);
}

const char* Machine::pass_gate(ConnectionId id, std::string_view bytes, size_t& consumed) {
  Connection& connection = connections_[id];
  switch (connection.gate->feed(token_, connection.nonce, bytes, consumed, output(id))) {
    case Gate::Outcome::kIncomplete:
      break;
    case Gate::Outcome::kPassed:
      connection.gate.reset();
      connection.nonce = std::string();
      break;
    case Gate::Outcome::kRefused:
      return connection.gate->refusal();
  }
  return nullptr;
}

const char* Machine::parse(ConnectionId id, std::string_view bytes, size_t& consumed) {
  Connection& connection = connections_[id];
  if (connection.gate) {
    const char* reason = pass_gate(id, bytes, consumed);
    if (reason || connection.gate) return reason;
  }
  while (consumed < bytes.size()) {
    if (connection.output.pending() > kPauseAbove) {
      connection.paused = true;
      return nullptr;
    }
    switch (connection.parser.next(bytes.substr(consumed), request_)) {
      case Parser::Outcome::kIncomplete:
        return nullptr;
      case Parser::Outcome::kViolation:
        return connection.parser.violation();
      case Parser::Outcome::kRequest:
        consumed += connection.parser.consumed();
        ++requests_;
        if (const char* reason = state_.handle(id, request_)) return reason;
    }
  }
  return nullptr;
}

// Keeps the total of buffered bytes within bounds, at the expense of those that buffer much.
const char* Machine::account(ConnectionId id) {
  Connection& connection = connections_[id];
  const size_t now = connection.input.size() + connection.output.pending();
  buffered_ += now - connection.counted;
  connection.counted = now;
  if (now > kOwnShare && buffered_ > kMaxBuffered) return "too much buffered by all connections";
  return nullptr;
}

}  // namespace rallypoint::store
