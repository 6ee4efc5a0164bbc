// Adds the short way of calls to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace rallypoint::python {

void bind_short_way(nanobind::module_& module);

}  // namespace rallypoint::python
