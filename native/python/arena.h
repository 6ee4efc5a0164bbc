#pragma once

#include <nanobind/nanobind.h>

namespace rallypoint::python {

void bind_arena(nanobind::module_& module);

}  // namespace rallypoint::python
