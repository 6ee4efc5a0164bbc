#include "python/arguments.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

bool differ_among(const std::vector<Block>& blocks) {
  return std::any_of(blocks.begin(), blocks.end(),
                     [&](const Block& block) { return block.items != blocks[0].items; });
}

std::uint64_t items_of(const std::vector<Block>& blocks) {
  std::uint64_t items = 0;
  for (const Block& block : blocks) items += block.items;
  return items;
}

}  // namespace

bool Arguments::take(nb::handle input, nb::handle output, std::optional<DType> as, bool held) {
  dtype = as;
  if (input.is(output)) {
    if (!take(output, true, as, held, outputs)) return false;
    inputs = outputs;
  } else if (!take(input, false, as, held, inputs) || !take(output, true, as, held, outputs)) {
    return false;
  }
  if (!dtype && views.empty() && !has_lists) dtype = DType::uint8;
  return dtype.has_value();
}

bool Arguments::take(nb::handle side, bool writable, std::optional<DType> as, bool held,
                     std::vector<Block>& blocks) {
  const auto add = [&](nb::handle array) {
    View view(array, writable, as, held);
    if (!view.is_good()) return false;
    if (view.is_none()) return true;
    if (!dtype) dtype = view.dtype();
    if (view.dtype() != dtype) return false;
    blocks.push_back({view.data(), view.bytes() / item_bytes(*dtype)});
    views.push_back(std::move(view));
    return true;
  };
  if (!nb::isinstance<nb::list>(side) && !nb::isinstance<nb::tuple>(side)) return add(side);
  has_lists = true;
  return std::all_of(side.begin(), side.end(), add);
}

bool Arguments::fit(const Program& program, bool uneven) {
  call.program = &program;
  call.input = inputs.empty() ? nullptr : inputs[0].at;
  call.output = outputs.empty() ? nullptr : outputs[0].at;
  const bool needs_tables = has_lists || uneven;
  if (!fit(inputs, program.input_blocks, uneven) || !fit(outputs, program.output_blocks, uneven)) {
    return false;
  }
  call.input_blocks = needs_tables ? inputs.data() : nullptr;
  call.output_blocks = needs_tables ? outputs.data() : nullptr;
  return true;
}

// One array for each block or, if all have the same length, a single array of them.
bool Arguments::fit(std::vector<Block>& blocks, std::uint32_t wanted, bool uneven) const {
  const bool is_nothing = blocks.empty() && call.count == 0 && !has_lists && !uneven;
  if (wanted == 0 || is_nothing) return true;
  if (blocks.size() == wanted) return uneven || items_of(blocks) == wanted * call.count;
  if (uneven || blocks.size() != 1 || blocks[0].items != wanted * call.count) return false;
  if (!has_lists) return true;
  const std::uint64_t step = call.count * item_bytes(*dtype);
  std::byte* const first = blocks[0].at;
  blocks.clear();
  for (std::uint32_t i = 0; i < wanted; ++i) blocks.push_back({first + i * step, call.count});
  return true;
}

bool Arguments::cut(std::vector<Block>& side, const std::vector<std::uint64_t>& sizes,
                    std::uint64_t rows) {
  if (side.size() != 1) return false;
  const Block whole = side[0];
  const std::uint64_t row = rows == 0 ? 0 : whole.items / rows;
  std::uint64_t begin = 0;
  side.clear();
  for (const std::uint64_t size : sizes) {
    if (size > rows - begin) return false;
    side.push_back({whole.at + begin * row * item_bytes(*dtype), size * row});
    begin += size;
  }
  has_lists = true;
  return begin == rows;
}

bool Arguments::are_apart() const {
  const std::uint64_t item = item_bytes(*dtype);
  const auto overlap = [&](const Block& one, const Block& other) {
    return one.at < other.at + other.items * item && other.at < one.at + one.items * item;
  };
  return std::none_of(inputs.begin(), inputs.end(), [&](const Block& input) {
    return std::any_of(outputs.begin(), outputs.end(),
                       [&](const Block& output) { return overlap(input, output); });
  });
}

bool Arguments::differ() const { return differ_among(inputs) || differ_among(outputs); }

std::uint64_t Arguments::largest() const {
  std::uint64_t most = 0;
  for (const auto& blocks : {std::cref(inputs), std::cref(outputs)}) {
    for (const Block& block : blocks.get()) most = std::max(most, block.items);
  }
  return most;
}

std::uint64_t Arguments::input_bytes() const { return items_of(inputs) * item_bytes(*dtype); }
std::uint64_t Arguments::output_bytes() const { return items_of(outputs) * item_bytes(*dtype); }

bool Arguments::premultiply(double factor) {
  const std::uint64_t item = item_bytes(*dtype);
  staging.resize(items_of(inputs) * item);
  std::byte* at = staging.data();
  for (Block& block : inputs) {
    if (!scale(*dtype, at, block.at, block.items, factor)) return false;
    block.at = at;
    at += block.items * item;
  }
  call.input = staging.data();
  return true;
}

}  // namespace rallypoint::python
