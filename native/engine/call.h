// One call of a collective, as its caller describes it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "engine/program.h"
#include "engine/reduce.h"

namespace rallypoint {

// What is called, in eight bytes that are compared with those of the last call.
struct Operator {
  std::uint16_t collective;
  DType dtype;
  ReduceOp op;
  std::int32_t root;  // for a send or recv: the tag

  std::uint64_t bits() const { return std::bit_cast<std::uint64_t>(*this); }
};

struct Block {
  std::byte* at;
  std::uint64_t items;
};

struct Call {
  const Program* program;
  Operator what;
  std::uint64_t count;     // items of a block; if lengths differ, of the largest
  const std::byte* input;  // all blocks, one after the other,
  std::byte* output;
  double timeout_s;
  const Block* input_blocks = nullptr;  // or, unless null, each at its own place
  const Block* output_blocks = nullptr;
  // If a rank does not know the lengths of all blocks, the largest is agreed on first, by an
  // all_reduce of one integer.
  const Program* agreement = nullptr;

  bool has_tables() const { return input_blocks != nullptr || output_blocks != nullptr; }
};

}  // namespace rallypoint
