// Copies data, also around the caches, and touches what was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rallypoint {

inline constexpr std::uint64_t kHugeBytes = 16 << 20;  // about the size of caches
inline constexpr std::size_t kCacheLineBytes = 64;
inline constexpr std::uint64_t kStringBytes = 1 << 10;
inline constexpr std::uint64_t kLongestString = 4 << 10;

// Writes around the caches: a target that is not in them need not be read first.
void copy_past_caches(std::byte* target, const std::byte* source, std::size_t bytes);

// Writes each line that holds the data, without changing it. A line that its writer and a reader
// both have in their caches is slow to get back for the writer's next data on some processors; one
// that the reader has written moves at once.
void touch(const std::byte* data, std::size_t bytes);

// Whether `rep movsb` is as quick as a loop for short data, as the processor says.
bool has_short_string_moves();

// As copy, by the processor's own instruction: it writes whole lines, which need not be read first
// from the core of their last reader.
inline void move_string(std::byte* target, const std::byte* source, std::size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(bytes) : : "memory");
#else
  std::memcpy(target, source, bytes);
#endif
}

// Into memory that another core reads. C libraries begin to move strings at 2 KiB or later.
inline void copy(std::byte* target, const std::byte* source, std::size_t bytes, bool past_caches) {
  if (past_caches) {
    copy_past_caches(target, source, bytes);
  } else if (bytes >= kStringBytes && bytes <= kLongestString && has_short_string_moves()) {
    move_string(target, source, bytes);
  } else if (bytes > 0) {
    std::memcpy(target, source, bytes);
  }
}

// One part of a message, to its receiver.
inline void copy_part(std::byte* target, const std::byte* source, std::size_t bytes,
                      std::uint64_t message_bytes) {
  copy(target, source, bytes, message_bytes >= kHugeBytes);
}

}  // namespace rallypoint
