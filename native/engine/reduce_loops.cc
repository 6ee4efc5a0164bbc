// The loops of reduce.h, compiled once for each vector width (LOOPS names the namespace).

#include <algorithm>
#include <cstring>

#include "engine/reduce.h"

#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace rallypoint::LOOPS {
namespace {

// Integers add and multiply modulo 2^n, as NumPy's do; in C++ only unsigned ones may.
template <typename T>
struct Wrapping {
  using type = T;
};
template <>
struct Wrapping<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct Wrapping<std::int64_t> {
  using type = std::uint64_t;
};

template <typename T>
struct Sum {
  using W = typename Wrapping<T>::type;
  static T apply(T a, T b) { return static_cast<T>(static_cast<W>(a) + static_cast<W>(b)); }
};
template <typename T>
struct Product {
  using W = typename Wrapping<T>::type;
  static T apply(T a, T b) { return static_cast<T>(static_cast<W>(a) * static_cast<W>(b)); }
};
// A NaN on either side wins, as in NumPy and PyTorch.
template <typename T>
struct Min {
  static T apply(T a, T b) { return a < b || a != a ? a : b; }
};
template <typename T>
struct Max {
  static T apply(T a, T b) { return a > b || a != a ? a : b; }
};

template <typename T, typename Op>
void pair(T* target, const T* a, const T* b, std::size_t items) {
  ELEMENTWISE for (std::size_t i = 0; i < items; ++i) target[i] = Op::apply(a[i], b[i]);
}

template <typename T, typename Op>
void triple(T* target, const T* a, const T* b, const T* c, std::size_t items) {
  ELEMENTWISE for (std::size_t i = 0; i < items; ++i) {
    target[i] = Op::apply(Op::apply(a[i], b[i]), c[i]);
  }
}

template <typename T, typename Op>
void quadruple(T* target, const T* a, const T* b, const T* c, const T* d, std::size_t items) {
  ELEMENTWISE for (std::size_t i = 0; i < items; ++i) {
    target[i] = Op::apply(Op::apply(Op::apply(a[i], b[i]), c[i]), d[i]);
  }
}

// More operands go through a piece of stack, so that the target may be any of them.
template <typename T, typename Op>
void many(T* target, const T* const* operands, std::size_t n, std::size_t items) {
  constexpr std::size_t kPiece = 4096 / sizeof(T);
  T piece[kPiece];
  for (std::size_t at = 0; at < items; at += kPiece) {
    const std::size_t length = std::min(kPiece, items - at);
    quadruple<T, Op>(piece, operands[0] + at, operands[1] + at, operands[2] + at, operands[3] + at,
                     length);
    for (std::size_t k = 4; k < n; ++k) pair<T, Op>(piece, piece, operands[k] + at, length);
    std::memcpy(target + at, piece, length * sizeof(T));
  }
}

template <typename T, typename Op>
void reduce(std::byte* target_bytes, const std::byte* const* operand_bytes, std::size_t n,
            std::size_t items) {
  auto* const target = reinterpret_cast<T*>(target_bytes);
  auto* const* const o = reinterpret_cast<const T* const*>(operand_bytes);
  switch (n) {
    case 1:
      if (target != o[0] && items > 0) std::memmove(target, o[0], items * sizeof(T));
      return;
    case 2:
      return pair<T, Op>(target, o[0], o[1], items);
    case 3:
      return triple<T, Op>(target, o[0], o[1], o[2], items);
    case 4:
      return quadruple<T, Op>(target, o[0], o[1], o[2], o[3], items);
    default:
      return many<T, Op>(target, o, n, items);
  }
}

template <typename T>
Reducer for_type(ReduceOp op) {
  switch (op) {
    case ReduceOp::product:
      return reduce<T, Product<T>>;
    case ReduceOp::min:
      return reduce<T, Min<T>>;
    case ReduceOp::max:
      return reduce<T, Max<T>>;
    default:
      return reduce<T, Sum<T>>;
  }
}

}  // namespace

Reducer reducer(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float32:
      return for_type<float>(op);
    case DType::float64:
      return for_type<double>(op);
    case DType::int32:
      return for_type<std::int32_t>(op);
    default:
      return for_type<std::int64_t>(op);
  }
}

}  // namespace rallypoint::LOOPS
