// The arena as Python sees it: blocks as NumPy arrays of bytes, which release them at their end.

#include "python/arena.h"

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

#include "engine/arena.h"
#include "engine/peer_memory.h"

namespace nb = nanobind;

// For allocators of other libraries: `rallypoint._native`'s file exports these two.
extern "C" {
[[gnu::visibility("default")]] void* rallypoint_allocate(std::size_t bytes) {
  return rallypoint::Arena::instance().allocate(bytes);
}
[[gnu::visibility("default")]] void rallypoint_release(void* at) {
  rallypoint::Arena::instance().release(static_cast<std::byte*>(at));
}
}

namespace rallypoint::python {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;

nb::object allocate(std::size_t bytes) {
  std::byte* const at = Arena::instance().allocate(bytes);
  if (at == nullptr) return nb::none();
  const nb::capsule owner(at, [](void* block) noexcept { rallypoint_release(block); });
  return nb::cast(Bytes(at, {bytes}, owner));
}

}  // namespace

void bind_arena(nb::module_& module) {
  module.def("allocate", &allocate);
  module.def("adopt", [](std::uintptr_t base, std::size_t bytes, int fd) {
    return Arena::instance().adopt(reinterpret_cast<std::byte*>(base), bytes, fd);
  });
  module.def("abandon", [](std::uintptr_t base, bool is_used) {
    Arena::instance().abandon(reinterpret_cast<std::byte*>(base), is_used);
  });
  module.def("let_peers_read", [] { PeerMemory::let_peers_read(); });
}

}  // namespace rallypoint::python
