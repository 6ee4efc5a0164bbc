// Element types, operators, and the loops that combine arrays. A new type also needs its rows in
// native/python/buffer.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rallypoint {

enum class DType : std::uint8_t {
  float32,
  float64,
  int32,
  int64,
  int8,
  int16,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  float16,
  bfloat16,
  complex64,
  complex128,
};
inline constexpr unsigned kDTypes = 15;

// The numbers are torch.distributed's. PREMUL_SUM is a sum of inputs that were scaled before.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
inline constexpr unsigned kReduceOps = 9;

constexpr std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::int16:
    case DType::uint16:
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float32:
    case DType::int32:
    case DType::uint32:
      return 4;
    case DType::complex128:
      return 16;
    default:
      return 8;
  }
}
inline constexpr std::size_t kMostItemBytes = 16;

// target[i] = operands[0][i] op operands[1][i] op ..., from left to right. The target may be the
// same memory as an operand, but may not overlap one partly. For avg, the sum is then divided by
// `divisor`, integers rounded towards zero. 16-bit floats are combined as float32, and rounded
// once.
using Reducer = void (*)(std::byte* target, const std::byte* const* operands,
                         std::size_t operands_n, std::size_t items, std::uint64_t divisor);

// The loop for the widest vectors that this CPU has, or null if the operator does not apply.
Reducer reducer(DType dtype, ReduceOp op);

// target[i] = source[i] * factor; returns false, and does nothing, for integers. They may be the
// same memory.
bool scale(DType dtype, std::byte* target, const std::byte* source, std::size_t items,
           double factor);

}  // namespace rallypoint
