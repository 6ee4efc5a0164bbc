#include "engine/copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace rallypoint {

#if defined(__x86_64__)

bool has_short_string_moves() {
  static const bool has = [] {
    constexpr unsigned kFeatures = 7;
    constexpr unsigned kFastShortRepMovsb = 1 << 4;  // FSRM, in edx
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) != 0 && (d & kFastShortRepMovsb) != 0;
  }();
  return has;
}

void copy_past_caches(std::byte* target, const std::byte* source, std::size_t bytes) {
  constexpr std::size_t kLine = kCacheLineBytes;
  const std::size_t lead = -reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = std::min(bytes, lead);
  if (head > 0) std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* const from = reinterpret_cast<const __m128i*>(source + at);
    auto* const to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  if (at < bytes) std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();  // otherwise other threads might see later stores first
}

#else

bool has_short_string_moves() { return false; }

void copy_past_caches(std::byte* target, const std::byte* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);
}

#endif

// Several readers of one message may do so at a time, and read it meanwhile: no value changes.
[[gnu::no_sanitize("thread")]] void touch(const std::byte* data, std::size_t bytes) {
  const std::size_t before = reinterpret_cast<std::uintptr_t>(data) % kCacheLineBytes;
  auto* const first = const_cast<volatile std::byte*>(data - before);
  for (std::size_t at = 0; at < before + bytes; at += kCacheLineBytes) first[at] = first[at];
}

}  // namespace rallypoint
