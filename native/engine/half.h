// 16-bit floats as float32 and back: widening is exact, narrowing rounds to the nearest, ties to
// even. A NaN stays a NaN. Included by the loops, and compiled for each vector width.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace rallypoint::LOOPS {

struct BFloat16 {
  static float widen(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000 : rounded) >> 16);
  }
  static void widen(float* target, const std::uint16_t* source, std::size_t items) {
    for (std::size_t i = 0; i < items; ++i) target[i] = widen(source[i]);
  }
  static void narrow(std::uint16_t* target, const float* source, std::size_t items) {
    for (std::size_t i = 0; i < items; ++i) target[i] = narrow(source[i]);
  }
};

// IEEE binary16: 5 bits of exponent (bias 15), 10 of fraction.
struct Float16 {
  static constexpr std::uint32_t kRebias = (127 - 15) << 23;

  static float widen(std::uint16_t bits) {
    const std::uint32_t magnitude = std::uint32_t{bits & 0x7FFFU} << 13;
    const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
    std::uint32_t wide = magnitude + kRebias;
    if (magnitude >= 0x1FU << 23) wide += kRebias;  // infinity or NaN: the largest exponent
    if (magnitude < 1U << 23) {                     // subnormal: a multiple of 2^-24
      wide = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude >> 13) * 0x1p-24F);
    }
    return std::bit_cast<float>(wide | sign);
  }
  static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    std::uint32_t half = (magnitude - kRebias + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    if (magnitude < 0x38800000) {  // below 2^-14: subnormal
      // Adding 0.5 leaves multiples of 2^-24 in the last bits, rounded as float addition does.
      half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
    }
    if (magnitude >= 0x47800000) half = 0x7C00;  // 2^16 or more
    if (magnitude > 0x7F800000) half = 0x7E00;
    return static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000));
  }
#if defined(__F16C__)
  static void widen(float* target, const std::uint16_t* source, std::size_t items) {
    std::size_t i = 0;
    for (; i + 8 <= items; i += 8) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(target + i, _mm256_cvtph_ps(bits));
    }
    for (; i < items; ++i) target[i] = _cvtsh_ss(source[i]);
  }
  static void narrow(std::uint16_t* target, const float* source, std::size_t items) {
    std::size_t i = 0;
    for (; i + 8 <= items; i += 8) {
      const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), bits);
    }
    for (; i < items; ++i) target[i] = _cvtss_sh(source[i], _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static void widen(float* target, const std::uint16_t* source, std::size_t items) {
    for (std::size_t i = 0; i < items; ++i) target[i] = widen(source[i]);
  }
  static void narrow(std::uint16_t* target, const float* source, std::size_t items) {
    for (std::size_t i = 0; i < items; ++i) target[i] = narrow(source[i]);
  }
#endif
};

}  // namespace rallypoint::LOOPS
