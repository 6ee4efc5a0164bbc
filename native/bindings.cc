// The one file that includes nanobind. It turns Python objects into plain pointers and sizes and
// back, and decides nothing.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, module) { module.doc() = "Rallypoint's native core."; }
