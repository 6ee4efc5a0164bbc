// The data still to be sent to a connection: small parts, which are copied, and references to large
// values, as pieces for one writev. Pure: it touches no socket.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/value.h"
#include "store/wire.h"

namespace rallypoint::store {

class Output {
 public:
  void add_u8(uint8_t number) { add(&number, sizeof number); }
  void add_u32(uint32_t number) { add(&number, sizeof number); }
  void add_i64(int64_t number) { add(&number, sizeof number); }
  void add(std::string_view bytes) { add(bytes.data(), bytes.size()); }
  void add_blob(std::string_view bytes) {
    add_i64(static_cast<int64_t>(bytes.size()));
    add(bytes.data(), bytes.size());
  }
  void add_blob(const Value& value) {
    if (value.size() < kCopyBelow) return add_blob(value.view());
    add_i64(value.size());
    add_reference(value);
  }

  size_t pending() const { return pending_; }
  // Fills at most `capacity` pieces, in order; returns how many.
  int pieces(iovec* vectors, int capacity) const;
  // The first `size` bytes are sent.
  void consume(size_t size);

 private:
  static constexpr uint32_t kCopyBelow = 2048;  // below this, a copy costs less than a piece
  static constexpr size_t kKeepCapacity = 256;  // of each of ten thousand idle connections
  struct Reference {
    size_t after;  // how many bytes of copied_, from its start, go before this value
    Value value;
  };

  void add(const void* bytes, size_t size) {
    copied_.append(static_cast<const char*>(bytes), size);
    pending_ += size;
  }
  void add_reference(const Value& value) {
    references_.push_back({copied_.size(), value});
    pending_ += value.size();
  }

  std::string copied_;  // everything but the references, sent or not, until nothing is pending
  std::vector<Reference> references_;
  size_t copied_sent_ = 0;
  size_t first_reference_ = 0;
  size_t reference_sent_ = 0;  // of the first reference
  size_t pending_ = 0;
};

}  // namespace rallypoint::store
