// Splits a stream into frames: a header of fixed size, and the payload that it announces.
//
// Many small frames are read at once. The payload of a large one is read directly into its target,
// which the owner provides:
//
//   std::byte* begin(const Header&)   where the payload goes; null if the header makes no sense
//   void end(const Header&)           all of it has come
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/tcp/stream.h"

namespace rallypoint::tcp {

inline constexpr std::size_t kInletBytes = 8 << 10;
inline constexpr std::size_t kReadAtOnce = 1 << 20;  // from one peer, so that others are read too

template <typename Header>
class Inlet {
 public:
  enum class Result { nothing, moved, corrupt };

  template <typename Owner>
  Result read(Stream& stream, Owner&& owner) {
    Result result = Result::nothing;
    for (std::size_t total = 0; total < kReadAtOnce;) {
      const std::size_t rest = in_payload_ ? bytes_ - got_ : 0;
      iovec spans[2] = {{target_ + got_, rest}, {buffer_.data() + end_, buffer_.size() - end_}};
      const std::size_t wanted = rest + spans[1].iov_len;
      const std::size_t count = rest > 0 ? stream.read(spans, 2) : stream.read(spans + 1, 1);
      if (count == 0) break;
      result = Result::moved;
      total += count;
      const std::size_t direct = std::min(count, rest);
      got_ += direct;
      end_ += count - direct;
      if (!parse(owner)) return Result::corrupt;
      if (count < wanted) break;  // there is no more at present
    }
    return result;
  }

 private:
  template <typename Owner>
  bool parse(Owner&& owner) {
    std::size_t at = 0;
    for (;;) {
      if (in_payload_) {
        const std::size_t count = std::min(bytes_ - got_, end_ - at);
        if (count > 0) std::memcpy(target_ + got_, buffer_.data() + at, count);
        got_ += count;
        at += count;
        if (got_ < bytes_) break;
        in_payload_ = false;
        owner.end(header_);
      }
      if (end_ - at < sizeof(Header)) break;
      std::memcpy(&header_, buffer_.data() + at, sizeof(Header));
      at += sizeof(Header);
      target_ = owner.begin(header_);
      if (target_ == nullptr) return false;
      bytes_ = header_.payload();
      got_ = 0;
      in_payload_ = true;
    }
    std::memmove(buffer_.data(), buffer_.data() + at, end_ - at);
    end_ -= at;
    return true;
  }

  std::array<std::byte, kInletBytes> buffer_;
  std::size_t end_ = 0;  // end of the data in the buffer
  Header header_{};
  bool in_payload_ = false;
  std::byte* target_ = nullptr;
  std::size_t bytes_ = 0;  // of the payload,
  std::size_t got_ = 0;    // and how many have arrived
};

}  // namespace rallypoint::tcp
