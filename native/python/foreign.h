// Adds the records of other backends' groups to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace rallypoint::python {

void bind_foreign(nanobind::module_& module);

}  // namespace rallypoint::python
