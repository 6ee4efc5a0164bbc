#include "store/state.h"

#include <algorithm>
#include <charconv>

namespace rallypoint::store {

namespace {

constexpr double kHandshakeS = 30.0;
constexpr uint8_t kReady = 0;
constexpr uint8_t kNotReady = 1;
constexpr uint8_t kWaitCanceled = 1;

bool has_reply(Opcode opcode) {
  switch (opcode) {
    case Opcode::kValidate:
    case Opcode::kSet:
    case Opcode::kSetEphemeral:
    case Opcode::kAppend:
    case Opcode::kMultiSet:
    case Opcode::kQueuePush:
      return false;
    default:
      return true;
  }
}

bool works_when_fenced(Opcode opcode) {
  return opcode == Opcode::kPing || opcode == Opcode::kCancelWait || opcode == Opcode::kEnter;
}

int64_t wrapping_sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

class Decimal {
 public:
  explicit Decimal(int64_t number) : end_(std::to_chars(text_, text_ + sizeof text_, number).ptr) {}
  std::string_view view() const { return {text_, static_cast<size_t>(end_ - text_)}; }

 private:
  char text_[24];
  char* end_;
};

}  // namespace

void State::connect(ConnectionId connection, double now) {
  if (connection >= clients_.size()) clients_.resize(connection + 1);
  Client& client = clients_[connection];
  client = Client();
  client.since = now;
  client.connected = true;
  client.space = default_;
  default_->members.insert(connection);
}

void State::disconnect(ConnectionId connection) {
  Client& client = clients_[connection];
  stop_waiting(connection, client);
  leave(connection, *client.space);
  client = Client();
}

std::vector<ConnectionId> State::late(double now) const {
  std::vector<ConnectionId> late;
  for (ConnectionId connection = 0; connection < clients_.size(); ++connection) {
    const Client& client = clients_[connection];
    if (client.connected && !client.validated && now - client.since >= kHandshakeS) {
      late.push_back(connection);
    }
  }
  return late;
}

const char* State::handle(ConnectionId connection, const Request& request) {
  Client& client = clients_[connection];
  if (const char* reason = admit(client, request)) return reason;
  if (client.space->fenced && !works_when_fenced(request.opcode)) {
    return refuse(connection, request, ErrorCode::kFenced, client.space->fenced_text(),
                  "a request in a round that has ended");
  }
  return dispatch(connection, client, request);
}

const char* State::admit(Client& client, const Request& request) {
  if (!client.validated) {
    if (request.opcode != Opcode::kValidate) return "a first request that is not VALIDATE";
    if (request.number != kMagic) return "a VALIDATE with a wrong number";
    client.validated = true;
  } else if (request.opcode == Opcode::kValidate) {
    return "a second VALIDATE";
  }
  if (request.opcode >= Opcode::kWaitGet && !client.tagged) return "an extension without the probe";
  return nullptr;
}

const char* State::dispatch(ConnectionId connection, Client& client, const Request& request) {
  Keyspace& space = *client.space;
  switch (request.opcode) {
    case Opcode::kValidate:
      return nullptr;
    case Opcode::kPing:
      return ping(connection, client, static_cast<uint32_t>(request.number)), nullptr;
    case Opcode::kSet:
      return put(space, request.key(), request.value(), kNobody), nullptr;
    case Opcode::kSetEphemeral:
      client.ephemeral = true;
      space.ephemeral[connection].emplace(request.key());
      return put(space, request.key(), request.value(), connection), nullptr;
    case Opcode::kMultiSet:
      for (size_t i = 0; i < request.keys.size(); ++i) {
        put(space, request.keys[i], request.values[i], kNobody);
      }
      return nullptr;
    case Opcode::kAppend:
      return append(space, request);
    case Opcode::kAdd:
      return add(connection, space, request);
    case Opcode::kCompareSet:
      return compare_set(connection, space, request), nullptr;
    case Opcode::kGet:
    case Opcode::kMultiGet:
      return send_values(connection, space, request), nullptr;
    case Opcode::kCheck:
      return check(connection, space, request), nullptr;
    case Opcode::kNumKeys:
      return reply(connection).add_i64(static_cast<int64_t>(space.table.size())), nullptr;
    case Opcode::kListKeys:
      return list_keys(connection, space), nullptr;
    case Opcode::kDeleteKey: {
      const bool there = space.table.find(request.key());
      if (there) remove(space, request.key());
      return reply(connection).add_i64(there), nullptr;
    }
    case Opcode::kWait:
    case Opcode::kWaitGet:
      return wait(connection, client, request);
    case Opcode::kCancelWait:
      stop_waiting(connection, client);
      if (client.tagged) {
        outbox_.output(connection).add_u8(static_cast<uint8_t>(Status::kCanceled));
      } else {
        outbox_.output(connection).add_u8(kWaitCanceled);
      }
      return nullptr;
    case Opcode::kBarrier:
      return barrier(connection, client, request);
    case Opcode::kQueuePush:
      return push(space, request), nullptr;
    case Opcode::kQueuePop:
      return pop(connection, space, request.key()), nullptr;
    case Opcode::kQueueLen: {
      const auto queue = space.queues.find(request.key());
      const size_t length = queue == space.queues.end() ? 0 : queue->second.size();
      return reply(connection).add_i64(static_cast<int64_t>(length)), nullptr;
    }
    case Opcode::kQueueTake:
      return take(connection, client, request);
    case Opcode::kWatch:
      return watch(connection, space, request.key()), nullptr;
    case Opcode::kEnter:
      return enter(connection, client, request);
  }
  return "an opcode that does not exist";
}

// Clients that have probed get an error and continue; the stock protocol has none, so it closes.
const char* State::refuse(ConnectionId connection, const Request& request, ErrorCode code,
                          std::string_view text, const char* reason) {
  if (!clients_[connection].tagged) return reason;
  if (!has_reply(request.opcode)) return nullptr;
  Output& output = outbox_.output(connection);
  output.add_u8(static_cast<uint8_t>(Status::kError));
  output.add_u8(static_cast<uint8_t>(code));
  output.add_blob(text);
  return nullptr;
}

Output& State::reply(ConnectionId connection) {
  Output& output = outbox_.output(connection);
  if (clients_[connection].tagged) output.add_u8(static_cast<uint8_t>(Status::kReply));
  return output;
}

void State::ping(ConnectionId connection, Client& client, uint32_t nonce) {
  if (nonce == kProbe && !client.tagged) {
    reply(connection).add_u32(kProbeAnswer);
    client.tagged = true;
  } else {
    reply(connection).add_u32(nonce);
  }
}

void State::put(Keyspace& space, std::string_view key, std::string_view value, ConnectionId owner) {
  Entry& entry = space.table.find_or_insert(key);
  entry.value.assign(value);
  entry.owner = owner;
  tell(space, EventKind::kSet, key, entry.value);
  release(space, key);
}

void State::remove(Keyspace& space, std::string_view key) {
  space.table.erase(key);
  tell(space, EventKind::kDeleted, key, Value());
}

const char* State::add(ConnectionId connection, Keyspace& space, const Request& request) {
  int64_t before = 0;
  const Entry* entry = space.table.find(request.key());
  if (entry && !parse_number(entry->value.view(), before)) {
    return refuse(connection, request, ErrorCode::kNotANumber,
                  "the value is not a 64-bit decimal number", "an ADD to a value without a number");
  }
  const int64_t sum = wrapping_sum(before, request.number);
  put(space, request.key(), Decimal(sum).view(), kNobody);
  reply(connection).add_i64(sum);
  return nullptr;
}

const char* State::append(Keyspace& space, const Request& request) {
  Entry& entry = space.table.find_or_insert(request.key());
  if (entry.value.size() + request.value().size() > kMaxAppended) {
    return "an APPEND beyond 1 GiB";
  }
  entry.value.append(request.value());
  entry.owner = kNobody;
  tell(space, EventKind::kSet, request.key(), entry.value);
  release(space, request.key());
  return nullptr;
}

void State::compare_set(ConnectionId connection, Keyspace& space, const Request& request) {
  const std::string_view expected = request.values[0];
  const std::string_view wanted = request.values[1];
  const Entry* entry = space.table.find(request.key());
  if (!entry && !expected.empty()) {
    reply(connection).add_blob(expected);  // as in torch: the caller cannot tell
  } else if (!entry || entry->value.view() == expected) {
    put(space, request.key(), wanted, kNobody);
    reply(connection).add_blob(wanted);
  } else {
    reply(connection).add_blob(entry->value);
  }
}

const char* State::barrier(ConnectionId connection, Client& client, const Request& request) {
  if (client.waiting) return "a second wait while one is pending";
  Keyspace& space = *client.space;
  int64_t arrived = 0;
  const Entry* before = space.table.find(request.key());
  if (before && !parse_number(before->value.view(), arrived)) {
    return refuse(connection, request, ErrorCode::kNotANumber,
                  "the value is not a 64-bit decimal number",
                  "a BARRIER on a value without a number");
  }
  arrived = wrapping_sum(arrived, 1);
  Entry& entry = space.table.find_or_insert(request.key());
  entry.value.assign(Decimal(arrived).view());
  entry.owner = kNobody;
  tell(space, EventKind::kSet, request.key(), entry.value);
  if (arrived >= request.number) {
    release(space, request.key());
    reply(connection).add_u8(0);
    return nullptr;
  }
  client.waiting = true;
  client.waits_with = Opcode::kBarrier;
  client.asked.assign(1, std::string(request.key()));
  client.missing = 1;
  space.waiters.add(request.key(), connection);
  return nullptr;
}

void State::check(ConnectionId connection, const Keyspace& space, const Request& request) {
  const bool ready = std::all_of(request.keys.begin(), request.keys.end(),
                                 [&](std::string_view key) { return space.has(key); });
  reply(connection).add_u8(ready ? kReady : kNotReady);
}

void State::list_keys(ConnectionId connection, const Keyspace& space) {
  Output& output = reply(connection);
  output.add_i64(static_cast<int64_t>(space.table.size()));
  space.table.for_each([&](const Entry& entry) { output.add_blob(entry.key()); });
}

void State::send_values(ConnectionId connection, const Keyspace& space, const Request& request) {
  Output& output = reply(connection);
  for (std::string_view key : request.keys) output.add_blob(space.value(key));
}

}  // namespace rallypoint::store
