// For libFuzzer: an encoded program, as a user's algorithm may give it to the engine
// (scripts/fuzz).

#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/program.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::int32_t> words(size / sizeof(std::int32_t));
  if (!words.empty()) std::memcpy(words.data(), data, words.size() * sizeof(std::int32_t));
  rallypoint::Program program;
  rallypoint::decode(words, program);
  return 0;
}
