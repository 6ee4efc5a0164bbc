// 16-bit floats by definition, slowly: a value is looked up among all that the format has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace rallypoint::tests {

class Format {
 public:
  Format(int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int largest = (1 << exponent_bits) - 1;
    infinity_ = static_cast<std::uint16_t>(largest << fraction_bits);
    for (std::uint32_t bits = 0; bits <= infinity_; ++bits) {
      const int exponent = static_cast<int>(bits >> fraction_bits);
      const auto fraction = static_cast<double>(bits & ((1U << fraction_bits) - 1));
      const double whole = exponent == 0 ? fraction : fraction + std::ldexp(1.0, fraction_bits);
      // Where infinity stands, the next value would be if the format went on.
      magnitudes_.push_back(std::ldexp(whole, std::max(exponent, 1) - bias - fraction_bits));
    }
  }

  bool is_nan(std::uint16_t bits) const { return (bits & 0x7FFF) > infinity_; }

  double widen(std::uint16_t bits) const {
    const std::uint16_t magnitude = bits & 0x7FFF;
    double value = NAN;
    if (magnitude <= infinity_) value = magnitudes_[magnitude];
    if (magnitude == infinity_) value = INFINITY;
    return (bits & 0x8000) != 0 ? -value : value;
  }

  // To the nearest, of two that are as near to the one whose last bit is 0.
  std::uint16_t narrow(double value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return 0x7FFF;
    const double magnitude = std::fabs(value);
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    if (above == magnitudes_.end()) return sign | infinity_;
    auto bits = static_cast<std::uint16_t>(above - magnitudes_.begin());
    if (bits > 0) {
      const double over = *above - magnitude;
      const double under = magnitude - magnitudes_[bits - 1];
      if (under < over || (under == over && bits % 2 == 1)) --bits;
    }
    return sign | bits;
  }

 private:
  std::uint16_t infinity_ = 0;
  std::vector<double> magnitudes_;  // by bits, from 0 to infinity
};

inline const Format& float16() {
  static const Format format(5, 10);
  return format;
}
inline const Format& bfloat16() {
  static const Format format(8, 7);
  return format;
}

}  // namespace rallypoint::tests
