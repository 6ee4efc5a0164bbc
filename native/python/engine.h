// Adds the engine to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace rallypoint::python {

void bind_engine(nanobind::module_& module);

}  // namespace rallypoint::python
