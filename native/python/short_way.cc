// A function of Python's that communicates, and a short way for its usual forms: arrays that the
// engine takes as they are. Then none of the function's code runs, which would take longer than all
// the rest of a small call. Every other form of the call, and whatever the engine refuses, is left
// to the function: to carry out, or to raise an error for.

#include "python/short_way.h"

#include <structmember.h>

#include <cstddef>

#include "python/communicator.h"
#include "python/short_call.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  const auto& way = *reinterpret_cast<const ShortWay*>(self);
  PyObject* result = nullptr;
  if (carry_out(way, arguments, PyVectorcall_NARGS(flags), names, result)) return result;
  return PyObject_Vectorcall(way.function, arguments, flags, names);
}

// (function, names of its parameters, how many of them may be given by position, what each of them
// is, collective, form, the root if none is given, or None, and whether one must be given)
PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* function = nullptr;
  PyObject* names = nullptr;
  PyObject* roles = nullptr;
  Py_ssize_t positional = 0;
  unsigned collective = 0;
  int form = 0;
  PyObject* default_root = nullptr;
  int needs_root = 0;
  if (PyArg_ParseTuple(arguments, "OO!nO!IiOp", &function, &PyTuple_Type, &names, &positional,
                       &PyTuple_Type, &roles, &collective, &form, &default_root,
                       &needs_root) == 0) {
    return nullptr;
  }
  const Py_ssize_t parameters = PyTuple_Size(names);
  if (parameters > kMostParameters || PyTuple_Size(roles) != parameters) {
    PyErr_SetString(PyExc_ValueError, "too many parameters, or not a role for each");
    return nullptr;
  }
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* const self = allocate(type, 0);
  if (self == nullptr) return nullptr;
  auto& way = *reinterpret_cast<ShortWay*>(self);
  way.vectorcall = call;
  way.function = Py_NewRef(function);
  way.names = Py_NewRef(names);
  way.parameters = parameters;
  way.positional = positional;
  for (Py_ssize_t i = 0; i < parameters; ++i) {
    way.roles[i] = static_cast<Role>(PyLong_AsLong(PyTuple_GetItem(roles, i)));
  }
  way.collective = collective;
  way.form = static_cast<Form>(form);
  way.default_root = default_root == Py_None ? nullptr : Py_NewRef(default_root);
  way.needs_root = needs_root != 0;
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const auto& way = *reinterpret_cast<const ShortWay*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(way.dict);
  Py_VISIT(way.function);
  return 0;
}

int clear(PyObject* self) {
  auto& way = *reinterpret_cast<ShortWay*>(self);
  Py_CLEAR(way.dict);
  Py_CLEAR(way.function);
  Py_CLEAR(way.names);
  Py_CLEAR(way.default_root);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// What else is asked of a function: its name as text, and a method of it.
PyObject* repr(PyObject* self) {
  return PyObject_Repr(reinterpret_cast<const ShortWay*>(self)->function);
}

PyObject* bind(PyObject* self, PyObject* object, PyObject* type) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  PyObject* const function = reinterpret_cast<const ShortWay*>(self)->function;
  const auto get =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(function), Py_tp_descr_get));
  return get(function, object, type);
}

PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyTypeObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(ShortWay, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(ShortWay, dict), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMethodDef methods[] = {
      {"__reduce__", reduce, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr},
  };
  static PyType_Spec spec = {"rallypoint._native.ShortWay", sizeof(ShortWay), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyTypeObject* type_of(nb::handle object) { return reinterpret_cast<PyTypeObject*>(object.ptr()); }

}  // namespace

void bind_short_way(nb::module_& module) {
  module.attr("ShortWay") = nb::steal(reinterpret_cast<PyObject*>(make_type()));
  module.def(
      "know",
      [](nb::handle array, nb::handle group, nb::handle op, nb::handle timedelta,
         nb::handle defaults, nb::handle error, nb::handle work) {
        for (nb::handle each : {array, group, op, timedelta, defaults, error, work}) each.inc_ref();
        known = {type_of(array),
                 type_of(group),
                 type_of(op),
                 type_of(nb::type<PythonCommunicator>()),
                 type_of(timedelta),
                 defaults.ptr(),
                 PyUnicode_InternFromString("_default"),
                 PyUnicode_InternFromString("fast_path"),
                 PyUnicode_InternFromString("ranks"),
                 PyUnicode_InternFromString("total_seconds"),
                 error.ptr(),
                 work.ptr()};
      },
      nb::arg("array"), nb::arg("group"), nb::arg("op"), nb::arg("timedelta"), nb::arg("defaults"),
      nb::arg("error"), nb::arg("work"));
}

}  // namespace rallypoint::python
