#include "python/refusal.h"

#include <nanobind/stl/string.h>

#include <exception>
#include <string>

namespace nb = nanobind;

namespace rallypoint::python {

void set_refusal(const std::system_error& refused) {
  const std::string text = refused.what();
  const std::string call = text.substr(0, text.find(": "));
  try {
    const nb::object error = nb::module_::import_("rallypoint.base.refusals")
                                 .attr("refused")(call, refused.code().value());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (nb::python_error& other) {
    other.restore();
  }
}

void bind_refusals() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& refused) {
      set_refusal(refused);
    }
  });
}

}  // namespace rallypoint::python
