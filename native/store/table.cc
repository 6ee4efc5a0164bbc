#include "store/table.h"

namespace rallypoint::store {

namespace {

Entry* make_entry(std::string_view key) {
  void* memory = std::malloc(sizeof(Entry) + key.size());
  if (!memory) throw std::bad_alloc();
  auto* entry = new (memory) Entry;
  entry->key_length = static_cast<uint32_t>(key.size());
  std::memcpy(reinterpret_cast<char*>(entry + 1), key.data(), key.size());
  return entry;
}

void free_entry(Entry* entry) {
  entry->~Entry();
  std::free(entry);
}

}  // namespace

// The slot that holds `key`, or the empty one where it belongs.
size_t KeyTable::slot_of(std::string_view key) const {
  size_t slot = home(key);
  while (slots_[slot] && slots_[slot]->key() != key) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

Entry* KeyTable::find(std::string_view key) const { return size_ ? slots_[slot_of(key)] : nullptr; }

Entry& KeyTable::find_or_insert(std::string_view key) {
  if ((size_ + 1) * 4 > slots_.size() * 3) resize(slots_.empty() ? 16 : slots_.size() * 2);
  const size_t slot = slot_of(key);
  if (!slots_[slot]) {
    slots_[slot] = make_entry(key);
    ++size_;
  }
  return *slots_[slot];
}

bool KeyTable::erase(std::string_view key) {
  if (size_ == 0) return false;
  size_t hole = slot_of(key);
  if (!slots_[hole]) return false;
  free_entry(slots_[hole]);
  --size_;
  // Close the gap: entries that probed past the hole move back into it.
  const size_t mask = slots_.size() - 1;
  for (size_t next = (hole + 1) & mask; slots_[next]; next = (next + 1) & mask) {
    const size_t wanted = home(slots_[next]->key());
    if (((next - wanted) & mask) >= ((next - hole) & mask)) {
      slots_[hole] = slots_[next];
      hole = next;
    }
  }
  slots_[hole] = nullptr;
  return true;
}

void KeyTable::clear() {
  for_each([](Entry& entry) { free_entry(&entry); });
  std::vector<Entry*>().swap(slots_);
  size_ = 0;
}

void KeyTable::resize(size_t slots) {
  std::vector<Entry*> old(slots, nullptr);
  old.swap(slots_);
  for (Entry* entry : old) {
    if (entry) slots_[slot_of(entry->key())] = entry;
  }
}

}  // namespace rallypoint::store
