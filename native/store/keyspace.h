// One flat set of keys and queues, with the connections that wait for them or watch them. Unbound
// connections share one; each round of a fenced namespace has its own, which ends with the round.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/table.h"

namespace rallypoint::store {

struct StringHash : std::hash<std::string_view> {
  using is_transparent = void;
};
template <typename T>
using ByName = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

// Connections in order of arrival, per key.
class Registry {
 public:
  void add(std::string_view key, ConnectionId connection);
  void remove(std::string_view key, ConnectionId connection);
  // Takes the first, or kNobody.
  ConnectionId pop(std::string_view key);
  // Takes all of them.
  std::vector<ConnectionId> pop_all(std::string_view key);
  void clear() { by_key_.clear(); }
  bool empty() const { return by_key_.empty(); }

 private:
  ByName<std::deque<ConnectionId>> by_key_;
};

struct Watcher {
  ConnectionId connection;
  std::string prefix;
};

struct Keyspace {
  Keyspace() = default;
  Keyspace(std::string_view name_, int64_t round_) : name(name_), round(round_) {}

  bool has(std::string_view key) const { return table.find(key) || queues.contains(key); }
  Value value(std::string_view key) const {
    const Entry* entry = table.find(key);
    return entry ? entry->value : Value();
  }
  Value pop_queue(std::string_view key);
  std::string fenced_text() const;
  void clear();

  std::string name;
  int64_t round = 0;
  bool fenced = false;
  int64_t fenced_by = 0;
  KeyTable table;
  ByName<std::deque<Value>> queues;  // never an empty one
  Registry waiters;
  Registry takers;  // empty for a key that has a queue
  std::vector<Watcher> watchers;
  std::unordered_set<ConnectionId> members;
  std::unordered_map<ConnectionId, std::unordered_set<std::string>> ephemeral;  // may be outdated
};

// Parses a counter like torch: blanks, a sign, digits, then anything. False: not a 64-bit number.
bool parse_number(std::string_view text, int64_t& number);

}  // namespace rallypoint::store
