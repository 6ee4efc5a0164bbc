// A value of the store: bytes on the heap that keys, queues and unsent replies share by counting
// references, so that sending 8 MiB to a thousand clients copies nothing. One thread only.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

namespace rallypoint::store {

class Value {
 public:
  Value() = default;
  explicit Value(std::string_view bytes) { append(bytes); }
  Value(const Value& other) : block_(other.block_) {
    if (block_) ++block_->references;
  }
  Value(Value&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Value& operator=(Value other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Value() {
    if (block_ && --block_->references == 0) std::free(block_);
  }

  std::string_view view() const {
    return block_ ? std::string_view(bytes(block_), block_->size) : std::string_view();
  }
  uint32_t size() const { return block_ ? block_->size : 0; }

  // Replaces the content in place if nobody else holds it.
  void assign(std::string_view content) {
    if (block_ && block_->references == 1 && block_->size == content.size()) {
      std::memcpy(bytes(block_), content.data(), content.size());
    } else {
      *this = Value(content);
    }
  }

  void append(std::string_view more) {
    if (more.empty()) return;
    if (block_ && block_->references > 1) {
      Value copy;
      copy.grow(block_->size + more.size());
      std::memcpy(bytes(copy.block_), bytes(block_), block_->size);
      std::memcpy(bytes(copy.block_) + block_->size, more.data(), more.size());
      std::swap(block_, copy.block_);
      return;
    }
    const uint32_t before = size();
    grow(before + more.size());
    std::memcpy(bytes(block_) + before, more.data(), more.size());
  }

 private:
  struct Block {
    uint32_t references;
    uint32_t size;
  };

  static char* bytes(Block* block) { return reinterpret_cast<char*>(block + 1); }

  void grow(size_t size) {
    auto* block = static_cast<Block*>(std::realloc(block_, sizeof(Block) + size));
    if (!block) throw std::bad_alloc();
    block->references = 1;
    block->size = static_cast<uint32_t>(size);
    block_ = block;
  }

  Block* block_ = nullptr;
};

}  // namespace rallypoint::store
