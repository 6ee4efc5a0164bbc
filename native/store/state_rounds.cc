// What the stock server lacks: watches, keys tied to a connection, rounds that fence older ones.

#include <algorithm>
#include <set>

#include "store/state.h"

namespace rallypoint::store {

namespace {

constexpr size_t kMaxUnread = 64 << 20;  // for a watcher that does not read

}  // namespace

void State::send_event(ConnectionId connection, EventKind kind, std::string_view key,
                       const Value& value) {
  Output& output = outbox_.output(connection);
  if (output.pending() > kMaxUnread) {
    clients_[connection].lost_events = true;
    return;
  }
  output.add_u8(static_cast<uint8_t>(Status::kEvent));
  output.add_u8(static_cast<uint8_t>(kind));
  output.add_blob(key);
  output.add_blob(value);
}

void State::tell(Keyspace& space, EventKind kind, std::string_view key, const Value& value) {
  for (const Watcher& watcher : space.watchers) {
    if (key.starts_with(watcher.prefix)) send_event(watcher.connection, kind, key, value);
  }
}

void State::watch(ConnectionId connection, Keyspace& space, std::string_view prefix) {
  space.watchers.push_back({connection, std::string(prefix)});
  space.table.for_each([&](const Entry& entry) {
    if (!entry.key().starts_with(prefix)) return;
    send_event(connection, EventKind::kSet, entry.key(), entry.value);
  });
  reply(connection).add_u8(0);
}

const char* State::enter(ConnectionId connection, Client& client, const Request& request) {
  if (client.waiting) return "a second wait while one is pending";
  const auto found = rounds_.find(request.key());
  std::shared_ptr<Keyspace> current = found == rounds_.end() ? nullptr : found->second;
  if (current && request.number < current->round) {
    Keyspace stale(request.key(), request.number);
    stale.fenced_by = current->round;
    return refuse(connection, request, ErrorCode::kFenced, stale.fenced_text(), "");
  }
  if (!current || request.number > current->round) {
    auto space = std::make_shared<Keyspace>(request.key(), request.number);
    rounds_[std::string(request.key())] = space;
    if (current) fence(*current, request.number);
    current = space;
  }
  leave(connection, *client.space);
  client.space = current;
  current->members.insert(connection);
  reply(connection).add_i64(request.number);
  return nullptr;
}

// Ends a round: its keys are deleted at once, and connections that wait or watch in it are told
// why.
void State::fence(Keyspace& space, int64_t by) {
  space.fenced = true;
  space.fenced_by = by;
  const std::string text = space.fenced_text();
  std::set<ConnectionId> watching;
  for (const Watcher& watcher : space.watchers) watching.insert(watcher.connection);
  for (ConnectionId connection : watching) {
    send_event(connection, EventKind::kFenced, "", Value(text));
  }
  const std::set<ConnectionId> members(space.members.begin(), space.members.end());
  for (ConnectionId connection : members) {
    Client& client = clients_[connection];
    if (!client.waiting) continue;
    client.waiting = false;
    client.asked = {};
    Output& output = outbox_.output(connection);
    output.add_u8(static_cast<uint8_t>(Status::kError));
    output.add_u8(static_cast<uint8_t>(ErrorCode::kFenced));
    output.add_blob(text);
  }
  space.clear();
}

void State::leave(ConnectionId connection, Keyspace& space) {
  space.members.erase(connection);
  std::erase_if(space.watchers,
                [&](const Watcher& watcher) { return watcher.connection == connection; });
  const auto owned = space.ephemeral.find(connection);
  if (owned == space.ephemeral.end()) return;
  const std::set<std::string> keys(owned->second.begin(), owned->second.end());
  space.ephemeral.erase(owned);
  for (const std::string& key : keys) {
    const Entry* entry = space.table.find(key);
    if (entry && entry->owner == connection) remove(space, key);
  }
}

}  // namespace rallypoint::store
