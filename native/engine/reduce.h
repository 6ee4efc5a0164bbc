// Element types, operators, and the loops that combine arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rallypoint {

enum class DType : std::uint8_t { float32, float64, int32, int64 };
inline constexpr unsigned kDTypes = 4;

// torch.distributed's numbers. AVG is a sum that is divided once, at the end.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max };
inline constexpr unsigned kReduceOps = 5;

constexpr std::size_t item_bytes(DType dtype) {
  return dtype == DType::float32 || dtype == DType::int32 ? 4 : 8;
}

// target[i] = operands[0][i] op operands[1][i] op ..., from left to right. The target may be the
// same memory as an operand, but may not overlap one partly.
using Reducer = void (*)(std::byte* target, const std::byte* const* operands,
                         std::size_t operands_n, std::size_t items);

// The widest vectors that this CPU has.
Reducer reducer(DType dtype, ReduceOp op);

// values[i] /= divisor, integers rounded towards zero.
void divide(DType dtype, std::byte* values, std::size_t items, std::uint64_t divisor);

}  // namespace rallypoint
