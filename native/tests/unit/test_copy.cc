// Copies of every length write what they should and nothing beside it.

#include <cstddef>
#include <cstring>
#include <vector>

#include "engine/copy.h"
#include "tests/unit/cases.h"

namespace {

using rallypoint::copy;

constexpr std::size_t kMost = 5000;  // past every length at which the way changes
constexpr std::size_t kAround = 70;
constexpr std::byte kUntouched{0xA5};

void check(std::size_t bytes, std::size_t from, std::size_t to, bool past_caches) {
  std::vector<std::byte> source(from + bytes);
  for (std::size_t i = 0; i < bytes; ++i) source[from + i] = static_cast<std::byte>(7 * i % 251);
  std::vector<std::byte> target(to + bytes + kAround, kUntouched);
  std::vector<std::byte> expected = target;
  for (std::size_t i = 0; i < bytes; ++i) expected[to + i] = source[from + i];
  copy(target.data() + to, source.data() + from, bytes, past_caches);
  CHECK(target == expected);
}

CASE(a_copy_writes_all_of_its_bytes_and_no_others) {
  for (std::size_t bytes = 0; bytes <= kMost; bytes += bytes < 130 ? 1 : 61) {
    for (const bool past_caches : {false, true}) {
      for (const std::size_t shift : {0, 1, 63}) {
        check(bytes, shift, kAround - shift, past_caches);
        check(bytes, 0, shift, past_caches);
      }
    }
  }
  for (const std::size_t edge : {rallypoint::kStringBytes, rallypoint::kLongestString}) {
    for (std::size_t bytes = edge - 2; bytes <= edge + 2; ++bytes) check(bytes, 3, 5, false);
  }
}

}  // namespace
