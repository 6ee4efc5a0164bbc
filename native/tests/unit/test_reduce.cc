// The loops of each vector width against item by item, for each type and operator.

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <type_traits>

#include "engine/reduce.h"
#include "tests/unit/cases.h"
#include "tests/unit/formats.h"

#define DECLARE_LOOPS(name)                                                              \
  namespace rallypoint::name {                                                           \
  Reducer reducer(DType dtype, ReduceOp op);                                             \
  bool scale(DType dtype, std::byte* target, const std::byte* source, std::size_t items, \
             double factor);                                                             \
  }
DECLARE_LOOPS(baseline)
#if defined(__x86_64__)
DECLARE_LOOPS(avx2)
DECLARE_LOOPS(avx512)
#endif

namespace {

using namespace rallypoint;
using tests::chance;

// Numbers of ranks, some of which do not fit into an item.
constexpr std::uint64_t kDivisors[] = {3, 127, 128, 200, 255, 256, 257, 70'000};

struct Width {
  Reducer (*reducer)(DType, ReduceOp);
  bool (*scale)(DType, std::byte*, const std::byte*, std::size_t, double);
};

// What the engine chooses, and all that this CPU can run.
std::vector<Width> widths() {
  std::vector<Width> all{{rallypoint::reducer, rallypoint::scale},
                         {baseline::reducer, baseline::scale}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back({avx2::reducer, avx2::scale});
  if (__builtin_cpu_supports("avx512f")) all.push_back({avx512::reducer, avx512::scale});
#endif
  return all;
}

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

// Two items, as NumPy combines them.
template <typename T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (IsComplex<T>::value) {
    if (op != ReduceOp::product) return a + b;
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::product) return a * b;
    if (op == ReduceOp::min || op == ReduceOp::max) {
      if (std::isnan(a) || std::isnan(b)) return NAN;
      return op == ReduceOp::min ? std::min(b, a) : std::max(b, a);
    }
    return a + b;
  } else {
    using Wide = unsigned __int128;  // sums and products modulo 2^128 are so modulo less as well
    const auto wide_a = static_cast<Wide>(a);
    const auto wide_b = static_cast<Wide>(b);
    switch (op) {
      case ReduceOp::product:
        return static_cast<T>(wide_a * wide_b);
      case ReduceOp::min:
        return std::min(a, b);
      case ReduceOp::max:
        return std::max(a, b);
      case ReduceOp::band:
        return static_cast<T>(wide_a & wide_b);
      case ReduceOp::bor:
        return static_cast<T>(wide_a | wide_b);
      case ReduceOp::bxor:
        return static_cast<T>(wide_a ^ wide_b);
      default:
        return static_cast<T>(wide_a + wide_b);
    }
  }
}

template <typename T>
T divide(T sum, std::uint64_t divisor) {
  if constexpr (IsComplex<T>::value) {
    const auto by = static_cast<typename T::value_type>(divisor);
    return {sum.real() / by, sum.imag() / by};
  } else if constexpr (std::is_floating_point_v<T>) {
    return sum / static_cast<T>(divisor);
  } else {
    return static_cast<T>(static_cast<__int128>(sum) / static_cast<__int128>(divisor));
  }
}

template <typename T>
bool is_same(T found, T expected) {
  if constexpr (IsComplex<T>::value) {
    return is_same(found.real(), expected.real()) && is_same(found.imag(), expected.imag());
  } else if constexpr (std::is_floating_point_v<T>) {
    return found == expected || (std::isnan(found) && std::isnan(expected));
  } else {
    return found == expected;
  }
}

// Any bits; for floats also infinities, NaNs and numbers that are neither huge nor tiny.
template <typename T>
T draw() {
  if constexpr (IsComplex<T>::value) {
    return {draw<typename T::value_type>(), draw<typename T::value_type>()};
  } else if constexpr (std::is_floating_point_v<T>) {
    switch (chance()() % 64) {
      case 0:
        return INFINITY;
      case 1:
        return NAN;
      case 2:
        return -0.0;
      default:
        return static_cast<T>(std::normal_distribution<double>(0, 10)(chance()));
    }
  } else {
    return static_cast<T>(chance()());
  }
}

// Reduces `operands` with each width and calls `check` with the result.
template <typename T, typename Check>
void reduce(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& operands,
            std::uint64_t divisor, Check check) {
  const std::size_t items = operands[0].size();
  for (const Width& width : widths()) {
    const Reducer reducer = width.reducer(dtype, op);
    // Not each width has loops for everything; what is chosen must be there.
    if (reducer == nullptr && width.reducer != rallypoint::reducer) continue;
    // Into memory of its own, and over one of the operands.
    const std::size_t over = chance()() % operands.size();
    for (const bool in_place : {false, true}) {
      std::vector<std::vector<T>> own = operands;
      std::vector<T> apart(items);
      std::vector<const std::byte*> places;
      for (auto& each : own) places.push_back(reinterpret_cast<const std::byte*>(each.data()));
      std::vector<T>& target = in_place ? own[over] : apart;
      reducer(reinterpret_cast<std::byte*>(target.data()), places.data(), places.size(), items,
              op == ReduceOp::avg ? divisor : 1);
      check(target);
    }
  }
}

// Lengths around vectors' and pieces' ends.
constexpr std::size_t kLengths[] = {0, 1, 7, 64, 1025, 4097};

template <typename T>
void check_type(DType dtype) {
  for (unsigned number = 0; number < kReduceOps; ++number) {
    const auto op = static_cast<ReduceOp>(number);
    if (baseline::reducer(dtype, op) == nullptr) continue;
    for (std::size_t n = 1; n <= 9; ++n) {
      const std::size_t items = kLengths[chance()() % std::size(kLengths)];
      std::vector<std::vector<T>> operands(n, std::vector<T>(items));
      for (auto& each : operands) std::generate(each.begin(), each.end(), draw<T>);
      std::vector<T> expected = operands[0];
      for (std::size_t k = 1; k < n; ++k) {
        for (std::size_t i = 0; i < items; ++i)
          expected[i] = combine(op, expected[i], operands[k][i]);
      }
      const std::uint64_t divisor = kDivisors[n % std::size(kDivisors)];
      if (op == ReduceOp::avg) {
        std::transform(expected.begin(), expected.end(), expected.begin(),
                       [&](T sum) { return divide(sum, divisor); });
      }
      reduce(dtype, op, operands, divisor, [&](const std::vector<T>& found) {
        for (std::size_t i = 0; i < items; ++i) CHECK(is_same(found[i], expected[i]));
      });
    }
  }
}

CASE(numbers_are_combined_as_one_by_one) {
  for (int round = 0; round < 10; ++round) {
    check_type<float>(DType::float32);
    check_type<double>(DType::float64);
    check_type<std::int8_t>(DType::int8);
    check_type<std::int16_t>(DType::int16);
    check_type<std::int32_t>(DType::int32);
    check_type<std::int64_t>(DType::int64);
    check_type<std::uint8_t>(DType::uint8);
    check_type<std::uint16_t>(DType::uint16);
    check_type<std::uint32_t>(DType::uint32);
    check_type<std::uint64_t>(DType::uint64);
    check_type<std::complex<float>>(DType::complex64);
    check_type<std::complex<double>>(DType::complex128);
  }
}

// Combined as float32 from left to right, and rounded once, also by the CPU's own instructions.
void check_half(DType dtype, const tests::Format& format) {
  constexpr ReduceOp kOps[] = {ReduceOp::sum,     ReduceOp::premul_sum, ReduceOp::avg,
                               ReduceOp::product, ReduceOp::min,        ReduceOp::max};
  for (const ReduceOp op : kOps) {
    for (std::size_t n = 2; n <= 6; ++n) {
      const std::size_t items = kLengths[chance()() % std::size(kLengths)];
      std::vector<std::vector<std::uint16_t>> operands(n, std::vector<std::uint16_t>(items));
      for (auto& each : operands) {
        std::generate(each.begin(), each.end(),
                      [] { return static_cast<std::uint16_t>(chance()()); });
      }
      reduce(dtype, op, operands, kDivisors[0], [&](const std::vector<std::uint16_t>& found) {
        for (std::size_t i = 0; i < items; ++i) {
          auto value = static_cast<float>(format.widen(operands[0][i]));
          for (std::size_t k = 1; k < n; ++k)
            value = combine(op, value, static_cast<float>(format.widen(operands[k][i])));
          if (op == ReduceOp::avg) value /= static_cast<float>(kDivisors[0]);
          const std::uint16_t expected = format.narrow(value);
          CHECK_EQUAL(format.is_nan(found[i]), format.is_nan(expected));
          // 0 and -0 are the same minimum.
          if (!format.is_nan(expected) && format.widen(expected) != 0)
            CHECK_EQUAL(found[i], expected);
          if (format.widen(expected) == 0) CHECK_EQUAL(format.widen(found[i]), 0.0);
        }
      });
    }
  }
}

CASE(sixteen_bit_floats_are_rounded_once) {
  for (int round = 0; round < 4; ++round) {
    check_half(DType::float16, tests::float16());
    check_half(DType::bfloat16, tests::bfloat16());
  }
}

// As in NumPy: a sum is an or, a product an and.
CASE(booleans_stay_booleans) {
  const std::vector<std::vector<std::uint8_t>> operands{{0, 0, 1, 1}, {0, 1, 0, 1}};
  const auto check = [&](ReduceOp op, const std::vector<std::uint8_t>& expected) {
    reduce(DType::boolean, op, operands, 1,
           [&](const std::vector<std::uint8_t>& found) { CHECK(found == expected); });
  };
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::bor}) check(op, {0, 1, 1, 1});
  for (const ReduceOp op : {ReduceOp::product, ReduceOp::min, ReduceOp::band})
    check(op, {0, 0, 0, 1});
  check(ReduceOp::bxor, {0, 1, 1, 0});
}

CASE(operators_that_make_no_sense_are_not_there) {
  for (const Width& width : widths()) {
    for (const DType dtype : {DType::float32, DType::float16, DType::complex64}) {
      for (const ReduceOp op : {ReduceOp::band, ReduceOp::bor, ReduceOp::bxor})
        CHECK(width.reducer(dtype, op) == nullptr);
    }
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max})
      CHECK(width.reducer(DType::complex128, op) == nullptr);
    CHECK(width.reducer(DType::int32, ReduceOp::premul_sum) == nullptr);
    CHECK(width.reducer(DType::boolean, ReduceOp::avg) == nullptr);
  }
}

CASE(scaling_rounds_once_and_leaves_integers_alone) {
  for (const Width& width : widths()) {
    std::vector<float> numbers(1025);
    std::generate(numbers.begin(), numbers.end(), draw<float>);
    const std::vector<float> before = numbers;
    auto* const place = reinterpret_cast<std::byte*>(numbers.data());
    CHECK(width.scale(DType::float32, place, place, numbers.size(), 0.1));
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(is_same(numbers[i], before[i] * 0.1F));

    std::vector<std::uint16_t> halves(1 << 16);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    auto* const half_place = reinterpret_cast<std::byte*>(halves.data());
    CHECK(width.scale(DType::float16, half_place, half_place, halves.size(), 0.1));
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const auto value = static_cast<float>(tests::float16().widen(static_cast<std::uint16_t>(i)));
      const std::uint16_t expected = tests::float16().narrow(value * 0.1F);
      if (!tests::float16().is_nan(expected)) CHECK_EQUAL(halves[i], expected);
    }
    std::int32_t whole = 7;
    auto* const whole_place = reinterpret_cast<std::byte*>(&whole);
    CHECK(!width.scale(DType::int32, whole_place, whole_place, 1, 0.5));
    CHECK_EQUAL(whole, 7);
  }
}

}  // namespace
