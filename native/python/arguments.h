// What a call from Python refers to: its arrays, and the blocks in them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/executor.h"
#include "python/buffer.h"

namespace rallypoint::python {

// A call, and what it needs until it has ended.
struct Arguments {
  Call call{};
  std::vector<View> views;
  std::vector<Block> inputs;
  std::vector<Block> outputs;
  std::vector<std::byte> staging;
  std::optional<DType> dtype;  // of all arrays; bytes if there are none
  bool has_lists = false;

  // Each side is an array of all blocks, or a list of one for each, or None; one array may be both.
  // `as` and `held` are View's. Returns whether they can be used, and have one type.
  bool take(nanobind::handle input, nanobind::handle output, std::optional<DType> as, bool held);
  // Arranges the blocks as `program` has them, and sets their places in the call, whose count must
  // be known. Returns whether they fit.
  bool fit(const Program& program, bool uneven);
  // Cuts the array of a side into parts of so many of its rows. Returns whether they add up.
  bool cut(std::vector<Block>& side, const std::vector<std::uint64_t>& sizes, std::uint64_t rows);
  // Whether no input shares memory with an output.
  bool are_apart() const;
  // Whether blocks of one side differ in length.
  bool differ() const;
  // The items of the largest block.
  std::uint64_t largest() const;
  std::uint64_t input_bytes() const;
  std::uint64_t output_bytes() const;
  // The input, scaled, takes the input's place; false if its type cannot be scaled.
  bool premultiply(double factor);

 private:
  bool take(nanobind::handle side, bool writable, std::optional<DType> as, bool held,
            std::vector<Block>& blocks);
  bool fit(std::vector<Block>& blocks, std::uint32_t wanted, bool uneven) const;
};

}  // namespace rallypoint::python
