// Waits and queues. Invariants: a connection has at most one wait and stands at most once in the
// line of a key; a non-empty queue has no waiting takers, and an empty one does not exist.

#include <unordered_set>

#include "store/state.h"

namespace rallypoint::store {

const char* State::wait(ConnectionId connection, Client& client, const Request& request) {
  if (client.waiting) return "a second wait while one is pending";
  client.waits_with = request.opcode;
  client.asked.assign(request.keys.begin(), request.keys.end());
  await(connection, client);
  return nullptr;
}

// Queues for each requested key that is missing, or answers if all exist.
void State::await(ConnectionId connection, Client& client) {
  std::unordered_set<std::string_view> missing;
  for (const std::string& key : client.asked) {
    if (client.space->has(key) || !missing.insert(key).second) continue;
    client.space->waiters.add(key, connection);
  }
  client.missing = static_cast<uint32_t>(missing.size());
  client.waiting = client.missing > 0;
  if (!client.waiting) answer_wait(connection, client);
}

void State::stop_waiting(ConnectionId connection, Client& client) {
  if (!client.waiting) return;
  Keyspace& space = *client.space;
  Registry& line = client.waits_with == Opcode::kQueueTake ? space.takers : space.waiters;
  for (const std::string& key : client.asked) line.remove(key, connection);
  client.waiting = false;
  client.asked = {};
}

void State::release(Keyspace& space, std::string_view key) {
  if (space.waiters.empty()) return;
  for (ConnectionId connection : space.waiters.pop_all(key)) found(connection);
}

void State::found(ConnectionId connection) {
  Client& client = clients_[connection];
  if (--client.missing > 0) return;
  client.waiting = false;
  // A key may have been deleted while others were awaited; WAIT_GET still owes its value.
  if (client.waits_with == Opcode::kWaitGet) return await(connection, client);
  answer_wait(connection, client);
}

void State::answer_wait(ConnectionId connection, Client& client) {
  Output& output = reply(connection);
  if (client.waits_with == Opcode::kWaitGet) {
    for (const std::string& key : client.asked) output.add_blob(client.space->value(key));
  } else {
    output.add_u8(0);
  }
  client.asked = {};
}

void State::push(Keyspace& space, const Request& request) {
  const ConnectionId taker = space.takers.pop(request.key());
  if (taker != kNobody) {
    clients_[taker].waiting = false;
    clients_[taker].asked = {};
    reply(taker).add_blob(request.value());
    return;
  }
  auto queue = space.queues.find(request.key());
  if (queue == space.queues.end()) {
    queue = space.queues.emplace(request.key(), std::deque<Value>()).first;
  }
  queue->second.emplace_back(request.value());
  const ConnectionId waiter = space.waiters.pop(request.key());
  if (waiter != kNobody) found(waiter);
}

void State::pop(ConnectionId connection, Keyspace& space, std::string_view key) {
  const auto queue = space.queues.find(key);
  const size_t length = queue == space.queues.end() ? 0 : queue->second.size();
  Output& output = reply(connection);
  output.add_i64(static_cast<int64_t>(length));
  if (length > 0) output.add_blob(space.pop_queue(key));
}

const char* State::take(ConnectionId connection, Client& client, const Request& request) {
  if (client.waiting) return "a second wait while one is pending";
  Keyspace& space = *client.space;
  if (space.queues.contains(request.key())) {
    reply(connection).add_blob(space.pop_queue(request.key()));
    return nullptr;
  }
  client.waiting = true;
  client.waits_with = Opcode::kQueueTake;
  client.asked.assign(1, std::string(request.key()));
  client.missing = 1;
  space.takers.add(request.key(), connection);
  return nullptr;
}

}  // namespace rallypoint::store
