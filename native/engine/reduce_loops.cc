// The loops of reduce.h, compiled once for each vector width (LOOPS names the namespace).

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "engine/half.h"
#include "engine/reduce.h"

#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace rallypoint::LOOPS {
namespace {

// Integers add and multiply modulo 2^n, like NumPy's. In C++ only unsigned types may do so, and
// only if they are not narrower than int, to which they would be promoted.
template <typename T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using type =
      std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;
};

// Multiplies like NumPy and PyTorch; std::complex would treat infinities specially, at a great
// cost.
template <typename T>
struct Complex {
  T re;
  T im;
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct Product {
  template <typename T>
  static T apply(T a, T b) {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  }
  template <typename T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
// A NaN on either side wins, as in NumPy and PyTorch.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// target[i] = first[i] op rest[i] op ...
template <typename Op, typename T, typename... Rest>
void combine(std::size_t items, T* target, const T* first, const Rest*... rest) {
  ELEMENTWISE for (std::size_t i = 0; i < items; ++i) {
    T value = first[i];
    ((value = Op::apply(value, rest[i])), ...);
    target[i] = value;
  }
}

// More operands are combined in a small buffer on the stack, so that the target may be any of them,
// and four at a time: lines come faster out of several other caches than out of one.
template <typename Op, typename T>
void many(T* target, const T* const* o, std::size_t n, std::size_t items) {
  constexpr std::size_t kPiece = 4096 / sizeof(T);
  alignas(64) std::byte memory[kPiece * sizeof(T)];
  T* const piece = reinterpret_cast<T*>(memory);
  for (std::size_t at = 0; at < items; at += kPiece) {
    const std::size_t length = std::min(kPiece, items - at);
    const auto operand = [&](std::size_t k) { return o[k] + at; };
    std::size_t k = 4;
    combine<Op>(length, piece, operand(0), operand(1), operand(2), operand(3));
    for (; k + 4 <= n; k += 4) {
      combine<Op>(length, piece, piece, operand(k), operand(k + 1), operand(k + 2), operand(k + 3));
    }
    for (; k < n; ++k) combine<Op>(length, piece, piece, operand(k));
    std::memcpy(static_cast<void*>(target + at), piece, length * sizeof(T));
  }
}

template <typename T, typename Op>
void reduce(std::byte* target_bytes, const std::byte* const* operand_bytes, std::size_t n,
            std::size_t items, std::uint64_t) {
  auto* const target = reinterpret_cast<T*>(target_bytes);
  auto* const* const o = reinterpret_cast<const T* const*>(operand_bytes);
  switch (n) {
    case 1:
      if (target != o[0] && items > 0) std::memmove(target_bytes, o[0], items * sizeof(T));
      return;
    case 2:
      return combine<Op>(items, target, o[0], o[1]);
    case 3:
      return combine<Op>(items, target, o[0], o[1], o[2]);
    case 4:
      return combine<Op>(items, target, o[0], o[1], o[2], o[3]);
    default:
      return many<Op>(target, o, n, items);
  }
}

template <typename T>
void average(std::byte* target, const std::byte* const* operands, std::size_t n, std::size_t items,
             std::uint64_t divisor) {
  reduce<T, Sum>(target, operands, n, items, 1);
  auto* const values = reinterpret_cast<T*>(target);
  using Integer = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  // Wide, as the number of ranks need not fit into an item.
  const auto by = static_cast<std::conditional_t<std::is_integral_v<T>, Integer, T>>(divisor);
  for (std::size_t i = 0; i < items; ++i) values[i] = static_cast<T>(values[i] / by);
}

// 16-bit floats: widened piece by piece, combined as float32, rounded once.
template <typename Format, typename Op>
void reduce_half(std::byte* target_bytes, const std::byte* const* operand_bytes, std::size_t n,
                 std::size_t items, std::uint64_t divisor) {
  constexpr std::size_t kPiece = 1024;
  auto* const target = reinterpret_cast<std::uint16_t*>(target_bytes);
  auto* const* const o = reinterpret_cast<const std::uint16_t* const*>(operand_bytes);
  if (n == 1 && divisor <= 1) {
    if (target != o[0] && items > 0) std::memmove(target, o[0], items * sizeof(std::uint16_t));
    return;
  }
  float sum[kPiece];
  float next[kPiece];
  for (std::size_t at = 0; at < items; at += kPiece) {
    const std::size_t length = std::min(kPiece, items - at);
    Format::widen(sum, o[0] + at, length);
    for (std::size_t k = 1; k < n; ++k) {
      Format::widen(next, o[k] + at, length);
      combine<Op>(length, sum, sum, next);
    }
    if (divisor > 1) {
      const auto by = static_cast<float>(divisor);
      for (std::size_t i = 0; i < length; ++i) sum[i] /= by;
    }
    Format::narrow(target + at, sum, length);
  }
}

template <typename T>
Reducer for_integer(ReduceOp op) {
  using U = std::make_unsigned_t<T>;  // the same loops where the sign makes no difference
  switch (op) {
    case ReduceOp::sum:
      return reduce<U, Sum>;
    case ReduceOp::avg:
      return average<T>;
    case ReduceOp::product:
      return reduce<U, Product>;
    case ReduceOp::min:
      return reduce<T, Min>;
    case ReduceOp::max:
      return reduce<T, Max>;
    case ReduceOp::band:
      return reduce<U, And>;
    case ReduceOp::bor:
      return reduce<U, Or>;
    case ReduceOp::bxor:
      return reduce<U, Xor>;
    default:
      return nullptr;
  }
}

// Bytes 0 and 1: a sum is an or, a product an and, as in NumPy.
Reducer for_boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
      return reduce<std::uint8_t, Or>;
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return reduce<std::uint8_t, And>;
    case ReduceOp::bxor:
      return reduce<std::uint8_t, Xor>;
    default:
      return nullptr;
  }
}

template <typename T>
Reducer for_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
      return reduce<T, Sum>;
    case ReduceOp::avg:
      return average<T>;
    case ReduceOp::product:
      return reduce<T, Product>;
    case ReduceOp::min:
      return reduce<T, Min>;
    case ReduceOp::max:
      return reduce<T, Max>;
    default:
      return nullptr;
  }
}

template <typename Format>
Reducer for_half(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
    case ReduceOp::avg:
      return reduce_half<Format, Sum>;
    case ReduceOp::product:
      return reduce_half<Format, Product>;
    case ReduceOp::min:
      return reduce_half<Format, Min>;
    case ReduceOp::max:
      return reduce_half<Format, Max>;
    default:
      return nullptr;
  }
}

// The sum of complex numbers is that of their parts.
template <Reducer kReduceParts>
void by_parts(std::byte* target, const std::byte* const* operands, std::size_t n, std::size_t items,
              std::uint64_t divisor) {
  kReduceParts(target, operands, n, 2 * items, divisor);
}

// Complex numbers have no order. GCC 12 multiplies them with fused instructions if available,
// whatever -ffp-contract says: results would differ in bits from those of CPUs without AVX-512.
// Narrower loops are used instead (reduce.cc).
template <typename T>
Reducer for_complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
      return by_parts<reduce<T, Sum>>;
    case ReduceOp::avg:
      return by_parts<average<T>>;
#if !defined(__AVX512F__)
    case ReduceOp::product:
      return reduce<Complex<T>, Product>;
#endif
    default:
      return nullptr;
  }
}

template <typename T>
void scale_all(std::byte* target_bytes, const std::byte* source_bytes, std::size_t items,
               double factor) {
  auto* const target = reinterpret_cast<T*>(target_bytes);
  const auto* const source = reinterpret_cast<const T*>(source_bytes);
  const T by = static_cast<T>(factor);
  ELEMENTWISE for (std::size_t i = 0; i < items; ++i) target[i] = source[i] * by;
}

template <typename Format>
void scale_half(std::byte* target_bytes, const std::byte* source_bytes, std::size_t items,
                double factor) {
  auto* const target = reinterpret_cast<std::uint16_t*>(target_bytes);
  const auto* const source = reinterpret_cast<const std::uint16_t*>(source_bytes);
  const auto by = static_cast<float>(factor);
  for (std::size_t i = 0; i < items; ++i) target[i] = Format::narrow(Format::widen(source[i]) * by);
}

}  // namespace

Reducer reducer(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float32:
      return for_float<float>(op);
    case DType::float64:
      return for_float<double>(op);
    case DType::int32:
      return for_integer<std::int32_t>(op);
    case DType::int64:
      return for_integer<std::int64_t>(op);
    case DType::int8:
      return for_integer<std::int8_t>(op);
    case DType::int16:
      return for_integer<std::int16_t>(op);
    case DType::uint8:
      return for_integer<std::uint8_t>(op);
    case DType::uint16:
      return for_integer<std::uint16_t>(op);
    case DType::uint32:
      return for_integer<std::uint32_t>(op);
    case DType::uint64:
      return for_integer<std::uint64_t>(op);
    case DType::boolean:
      return for_boolean(op);
    case DType::float16:
      return for_half<Float16>(op);
    case DType::bfloat16:
      return for_half<BFloat16>(op);
    case DType::complex64:
      return for_complex<float>(op);
    case DType::complex128:
      return for_complex<double>(op);
  }
  return nullptr;
}

bool scale(DType dtype, std::byte* target, const std::byte* source, std::size_t items,
           double factor) {
  switch (dtype) {
    case DType::float32:
      return scale_all<float>(target, source, items, factor), true;
    case DType::float64:
      return scale_all<double>(target, source, items, factor), true;
    case DType::complex64:
      return scale_all<float>(target, source, 2 * items, factor), true;
    case DType::complex128:
      return scale_all<double>(target, source, 2 * items, factor), true;
    case DType::float16:
      return scale_half<Float16>(target, source, items, factor), true;
    case DType::bfloat16:
      return scale_half<BFloat16>(target, source, items, factor), true;
    default:
      return false;
  }
}

}  // namespace rallypoint::LOOPS
