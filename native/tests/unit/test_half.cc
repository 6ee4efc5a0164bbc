// half.h without the CPU's own instructions: each value of both formats, and what lies between.

#define LOOPS software
#include <cmath>
#include <cstring>

#include "engine/half.h"
#include "tests/unit/cases.h"
#include "tests/unit/formats.h"

namespace {

using namespace rallypoint;
using tests::Format;

template <typename Half>
void check_widening(const Format& format) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float found = Half::widen(static_cast<std::uint16_t>(bits));
    const double expected = format.widen(static_cast<std::uint16_t>(bits));
    CHECK_EQUAL(std::isnan(found), std::isnan(expected));
    if (std::isnan(expected)) continue;
    CHECK_EQUAL(static_cast<double>(found), expected);
    CHECK_EQUAL(std::signbit(found), std::signbit(expected));
  }
}

template <typename Half>
void check_narrowing(const Format& format, float value) {
  if (std::isnan(value)) {
    CHECK(format.is_nan(Half::narrow(value)));
  } else {
    CHECK_EQUAL(Half::narrow(value), format.narrow(value));
  }
}

// Each value, the middle to the next one, and the floats beside these.
template <typename Half>
void check_narrowing_between(const Format& format) {
  for (std::uint32_t bits = 0; bits < 0xFFFF; ++bits) {
    const double value = format.widen(static_cast<std::uint16_t>(bits));
    const double next = format.widen(static_cast<std::uint16_t>(bits + 1));
    for (const double each : {value, (value + next) / 2}) {
      const auto place = static_cast<float>(each);
      check_narrowing<Half>(format, place);
      check_narrowing<Half>(format, std::nextafter(place, INFINITY));
      check_narrowing<Half>(format, std::nextafter(place, -INFINITY));
    }
  }
}

template <typename Half>
void check_narrowing_at_random(const Format& format) {
  for (int i = 0; i < 300'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(tests::chance()());
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    check_narrowing<Half>(format, value);
  }
}

CASE(float16_widens_exactly) { check_widening<software::Float16>(tests::float16()); }
CASE(bfloat16_widens_exactly) { check_widening<software::BFloat16>(tests::bfloat16()); }
CASE(float16_rounds_to_nearest_even) {
  check_narrowing_between<software::Float16>(tests::float16());
  check_narrowing_at_random<software::Float16>(tests::float16());
}
CASE(bfloat16_rounds_to_nearest_even) {
  check_narrowing_between<software::BFloat16>(tests::bfloat16());
  check_narrowing_at_random<software::BFloat16>(tests::bfloat16());
}

}  // namespace
