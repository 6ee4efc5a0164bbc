// The memory of a Python array: NumPy arrays and anything else with a buffer, and tensors through
// the DLPack exchange API (PyTorch's data pointer at a fraction of the cost of its methods).
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "engine/reduce.h"

namespace rallypoint::python {

// Aligned, C-contiguous memory on the CPU that holds its items unmodified, kept alive while the
// view exists. Without the GIL a view may only be moved.
class View {
 public:
  View() = default;
  // `as` is the type of the items, where the array cannot tell (bfloat16 in NumPy). A tensor that
  // is `held` may be given other memory meanwhile; a buffer stays in place in any case.
  View(nanobind::handle object, bool writable, std::optional<DType> as = {}, bool held = false);
  ~View() { release(); }
  View(View&& other) noexcept { swap(other); }
  View& operator=(View&& other) noexcept {
    swap(other);
    return *this;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // Whether the memory can be used; None counts as no memory, of any type.
  bool is_good() const { return kind_ == Kind::none || dtype_.has_value(); }
  bool is_none() const { return kind_ == Kind::none; }
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  std::optional<DType> dtype() const { return dtype_; }

 private:
  enum class Kind : std::uint8_t { none, bad, buffer, tensor };

  bool take_tensor(nanobind::handle object, bool held);
  void take_buffer(nanobind::handle object, bool writable);
  void release();
  void swap(View& other) noexcept {
    std::swap(kind_, other.kind_);
    std::swap(buffer_, other.buffer_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(dtype_, other.dtype_);
  }

  Kind kind_ = Kind::none;
  Py_buffer buffer_{};  // of a tensor: its object only
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::optional<DType> dtype_;
};

}  // namespace rallypoint::python
