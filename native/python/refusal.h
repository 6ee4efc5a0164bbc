// What the system refuses native code, as an exception of Python: a std::system_error, whose word
// is the call's name, becomes the SystemCallError of base/refusals.py, which has the sentences.
#pragma once

#include <nanobind/nanobind.h>

#include <system_error>

namespace rallypoint::python {

// Sets the exception. Needs the GIL.
void set_refusal(const std::system_error& refused);

// From now on, functions of the module that throw one raise that exception.
void bind_refusals();

}  // namespace rallypoint::python
