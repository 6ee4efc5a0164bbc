// A runner of tests in one header. A case is a function; a check that fails prints its place and
// values, and the case continues.
//
//   CASE(halves_round_to_even) { CHECK_EQUAL(narrow(1.0F), 0x3C00); }
//
// Random cases draw only from `chance()`; its seed is printed when something fails, and given back
// as the second argument of the program (main.cc).
#pragma once

#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

namespace rallypoint::tests {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

inline std::uint64_t& failures() {
  static std::uint64_t count = 0;
  return count;
}

inline std::mt19937_64& chance() {
  static std::mt19937_64 generator;
  return generator;
}

// Characters as numbers.
template <typename T>
auto printable(const T& value) {
  if constexpr (sizeof(T) == 1 && std::is_integral_v<T>) {
    return static_cast<int>(value);
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<std::int64_t>(value);
  } else {
    return value;
  }
}

template <typename A, typename B>
void check_equal(const A& found, const B& expected, const char* text, const char* file, int line) {
  if (found == expected) return;
  // A wrong loop fails for each of its items.
  if (++failures() <= 20) {
    std::cerr << file << ":" << line << ": " << text << " is " << printable(found) << ", not "
              << printable(expected) << "\n";
  }
}

}  // namespace rallypoint::tests

#define CASE(name)                                                           \
  static void name();                                                        \
  static const rallypoint::tests::Registration register_##name{#name, name}; \
  static void name()
#define CHECK_EQUAL(found, expected) \
  rallypoint::tests::check_equal(found, expected, #found, __FILE__, __LINE__)
#define CHECK(condition) CHECK_EQUAL(static_cast<bool>(condition), true)
