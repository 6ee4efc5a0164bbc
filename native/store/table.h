// The keys of one keyspace: an open-addressing table of pointers to entries, each one block of
// memory with its key in it. A third smaller than std::unordered_map for the keys that jobs use.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "store/value.h"

namespace rallypoint::store {

using ConnectionId = uint32_t;
inline constexpr ConnectionId kNobody = UINT32_MAX;

struct Entry {
  Value value;
  ConnectionId owner = kNobody;  // the connection whose end deletes the key
  uint32_t key_length = 0;

  std::string_view key() const { return {reinterpret_cast<const char*>(this + 1), key_length}; }
};

class KeyTable {
 public:
  KeyTable() = default;
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;
  ~KeyTable() { clear(); }

  size_t size() const { return size_; }
  Entry* find(std::string_view key) const;
  Entry& find_or_insert(std::string_view key);
  bool erase(std::string_view key);
  void clear();

  template <typename Visitor>
  void for_each(Visitor visit) const {
    for (Entry* entry : slots_) {
      if (entry) visit(*entry);
    }
  }

 private:
  size_t home(std::string_view key) const {
    return std::hash<std::string_view>{}(key) & (slots_.size() - 1);
  }
  size_t slot_of(std::string_view key) const;
  void resize(size_t slots);

  std::vector<Entry*> slots_;  // a power of two, at most 3/4 full
  size_t size_ = 0;
};

}  // namespace rallypoint::store
