#include "store/keyspace.h"

#include <algorithm>
#include <charconv>

namespace rallypoint::store {

void Registry::add(std::string_view key, ConnectionId connection) {
  auto found = by_key_.find(key);
  if (found == by_key_.end()) found = by_key_.emplace(key, std::deque<ConnectionId>()).first;
  found->second.push_back(connection);
}

void Registry::remove(std::string_view key, ConnectionId connection) {
  auto found = by_key_.find(key);
  if (found == by_key_.end()) return;
  auto& waiting = found->second;
  auto position = std::find(waiting.begin(), waiting.end(), connection);
  if (position != waiting.end()) waiting.erase(position);
  if (waiting.empty()) by_key_.erase(found);
}

ConnectionId Registry::pop(std::string_view key) {
  auto found = by_key_.find(key);
  if (found == by_key_.end()) return kNobody;
  const ConnectionId first = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) by_key_.erase(found);
  return first;
}

std::vector<ConnectionId> Registry::pop_all(std::string_view key) {
  auto found = by_key_.find(key);
  if (found == by_key_.end()) return {};
  std::vector<ConnectionId> all(found->second.begin(), found->second.end());
  by_key_.erase(found);
  return all;
}

Value Keyspace::pop_queue(std::string_view key) {
  auto found = queues.find(key);
  Value value = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues.erase(found);
  return value;
}

std::string Keyspace::fenced_text() const {
  return "round " + std::to_string(round) + " of '" + name + "' ended when round " +
         std::to_string(fenced_by) + " began";
}

void Keyspace::clear() {
  table.clear();
  queues.clear();
  waiters.clear();
  takers.clear();
  watchers.clear();
  ephemeral.clear();
}

bool parse_number(std::string_view text, int64_t& number) {
  size_t start = std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size());
  // from_chars takes a minus, but no plus; "+-1" must not pass either.
  if (start + 1 < text.size() && text[start] == '+' && text[start + 1] != '-') ++start;
  const auto result = std::from_chars(text.data() + start, text.data() + text.size(), number);
  return result.ec == std::errc();
}

}  // namespace rallypoint::store
