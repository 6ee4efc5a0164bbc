// Runs all cases, or those whose names contain a word:
//
//   unit_tests [WORD [SEED]]

#include <chrono>
#include <cstdlib>
#include <string_view>

#include "tests/unit/cases.h"

int main(int count, char** words) {
  using namespace rallypoint::tests;
  const std::string_view wanted = count > 1 ? words[1] : "";
  const std::uint64_t seed =
      count > 2 ? std::strtoull(words[2], nullptr, 10) : std::random_device{}();
  unsigned ran = 0;
  for (const Case& each : cases()) {
    if (std::string_view(each.name).find(wanted) == std::string_view::npos) continue;
    const std::uint64_t before = failures();
    const auto began = std::chrono::steady_clock::now();
    chance().seed(seed);
    each.run();
    const auto taken = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - began);
    ++ran;
    if (failures() == before) continue;
    std::cerr << "FAILED " << each.name << " (" << taken.count() << " ms); to repeat: " << words[0]
              << " " << each.name << " " << seed << "\n";
  }
  std::cout << ran << " native cases, " << failures() << " failed checks\n";
  return failures() == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
