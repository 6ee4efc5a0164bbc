// A function of Python's that communicates, and a short way for its usual form: arrays that the
// engine takes as they are, no time-out of its own, nothing in the background. Then none of the
// function's code runs, which would take longer than all the rest of a small call. Every other form
// of the call, and whatever the engine refuses, is left to the function: to carry out, or to raise
// an error for.

#include "python/short_way.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <optional>

#include "python/communicator.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

constexpr Py_ssize_t kMostParameters = 16;

// What a function does with its arrays; process_group/calls/short_way.py has the same numbers.
enum class Form : int {
  in_place,   // one array is input and output
  onto_root,  // the same, but only the root has an output
  apart,      // an input and an output; if there is a root, only it has the one that is a list
  cut,        // an input and an output, and the input is cut along its first dimension
  nothing,    // no arrays
  send,
  receive,
};

// What a parameter is; others must be None, or the call is not for the short way.
enum class Role : int {
  other,
  source,
  target,
  sources,  // a list of arrays
  targets,
  root,
  root_in_group,
  group,
  op,
  background,
  algorithm,
  tag,
};

// What the package itself knows, and keeps for as long as the process lives.
struct Known {
  PyTypeObject* array;         // numpy.ndarray
  PyTypeObject* group;         // ProcessGroup
  PyTypeObject* op;            // ReduceOp
  PyTypeObject* communicator;  // PythonCommunicator
  PyObject* defaults;          // the namespace that has the default group,
  PyObject* default_group;     // by this name
  PyObject* at_once;           // names of a group's attributes
  PyObject* ranks;
  PyObject* error;  // makes the exception for a call that failed
};
Known known{};

struct ShortWay {
  PyObject ob_base;
  vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* function;
  PyObject* names;  // of its parameters,
  Py_ssize_t parameters;
  Py_ssize_t positional;  // and how many of them may be given by position
  Role roles[kMostParameters];
  std::uint32_t collective;
  Form form;
  PyObject* default_root;  // or null
  bool needs_root;
};

// A group, and its attribute `at_once`, a tuple: its communicator; its members' ranks in it by
// their global ranks; the numbers of algorithms that calls have asked for; whether barriers are the
// engine's.
class Group {
 public:
  explicit Group(PyObject* group)
      : group_(nb::borrow(group)), parts_(nb::steal(PyObject_GetAttr(group, known.at_once))) {
    if (!parts_.is_valid()) PyErr_Clear();
    const bool is_there = parts_.is_valid() && PyTuple_Check(parts_.ptr());
    if (is_there && Py_TYPE(part(0)) == known.communicator) {
      communicator_ = nb::inst_ptr<PythonCommunicator>(part(0));
    }
  }
  PythonCommunicator* communicator() const { return communicator_; }
  // Null with an exception set.
  nb::object global_rank(int rank) const {
    const auto ranks = nb::steal(PyObject_GetAttr(group_.ptr(), known.ranks));
    return nb::steal(ranks.is_valid() ? PySequence_GetItem(ranks.ptr(), rank) : nullptr);
  }
  std::optional<std::uint32_t> rank_of(PyObject* global_rank) const {
    return number_in(part(1), global_rank);
  }
  std::optional<std::uint32_t> variant_of(PyObject* algorithm) const {
    return number_in(part(2), algorithm);
  }
  bool has_barriers() const { return part(3) == Py_True; }

 private:
  PyObject* part(Py_ssize_t index) const { return PyTuple_GetItem(parts_.ptr(), index); }
  static std::optional<std::uint32_t> number_in(PyObject* dict, PyObject* key) {
    PyObject* const found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr) {
      PyErr_Clear();
      return {};
    }
    return static_cast<std::uint32_t>(PyLong_AsUnsignedLongMask(found));
  }

  nb::object group_;
  nb::object parts_;
  PythonCommunicator* communicator_ = nullptr;
};

// The arguments of one call, by role; null if not given, or None.
class Given {
 public:
  // Returns whether all of them have a place here.
  bool take(const ShortWay& way, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (count > way.positional) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!put(way.roles[i], arguments[i])) return false;
    }
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
      const Py_ssize_t place = find(way, PyTuple_GetItem(names, i));
      if (place < count || !put(way.roles[place], arguments[count + i])) return false;
    }
    return true;
  }
  PyObject* operator[](Role role) const { return by_role_[static_cast<int>(role)]; }

 private:
  static constexpr int kRoles = static_cast<int>(Role::tag) + 1;

  bool put(Role role, PyObject* value) {
    if (value == Py_None) return true;
    if (role == Role::other) return false;
    by_role_[static_cast<int>(role)] = value;
    return true;
  }
  // Names are interned as a rule: what is not found is left to the function.
  static Py_ssize_t find(const ShortWay& way, PyObject* name) {
    for (Py_ssize_t i = 0; i < way.parameters; ++i) {
      if (PyTuple_GetItem(way.names, i) == name) return i;
    }
    return -1;
  }

  PyObject* by_role_[kRoles] = {};
};

// Whether the engine may look at it: an array, or what may be a tensor, but nothing else that just
// happens to have a buffer.
bool is_array(PyObject* value) {
  return value != nullptr && (Py_TYPE(value) == known.array || PyObject_CheckBuffer(value) == 0);
}

bool is_list(PyObject* value) { return value != nullptr && PyList_CheckExact(value) != 0; }

bool is_cut_evenly(PyObject* array, std::uint32_t ranks) {
  if (array == nullptr || Py_TYPE(array) != known.array) return false;
  const Py_ssize_t length = PyObject_Size(array);
  if (length < 0) PyErr_Clear();
  return length >= 0 && length % static_cast<Py_ssize_t>(ranks) == 0;
}

// One call, from its arguments to its result.
class ShortCall {
 public:
  explicit ShortCall(const ShortWay& way) : way_(way) {}

  // Returns whether the call is over; if not, nothing has been done.
  bool carry_out(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (!given_.take(way_, arguments, count, names)) return false;
    PyObject* const background = given_[Role::background];
    if (background != nullptr && background != Py_False) return false;
    PyObject* const named = given_[Role::group];
    PyObject* const group =
        named != nullptr ? named : PyDict_GetItemWithError(known.defaults, known.default_group);
    if (group == nullptr || Py_TYPE(group) != known.group) return false;
    const Group members(group);
    if (members.communicator() == nullptr || !find_op() || !find_root(members)) return false;
    if (PyObject* const algorithm = given_[Role::algorithm]) {
      const auto found = members.variant_of(algorithm);
      if (!found) return false;
      variant_ = *found;
    }
    const int code = run(members);
    if (way_.form == Form::receive && code >= 0) {
      result_ = members.global_rank(code);
      return true;
    }
    if (code == 0) {
      result_ = nb::none();
      return true;
    }
    if (code > PythonCommunicator::kFailed && code < 0) return false;
    fail(group, code);
    return true;
  }
  // Null with an exception set.
  PyObject* result() { return result_.release().ptr(); }

 private:
  bool find_op() {
    PyObject* const op = given_[Role::op];
    if (op == nullptr) return true;
    if (Py_TYPE(op) != known.op) return false;
    op_ = static_cast<std::uint32_t>(PyLong_AsUnsignedLongMask(op));
    return true;
  }

  // Without one, a receive is from any rank.
  bool find_root(const Group& members) {
    if (given_[Role::root_in_group] != nullptr) return false;
    PyObject* root = given_[Role::root];
    if (root == nullptr) root = way_.default_root;
    if (root == nullptr) return !way_.needs_root;
    if (PyLong_CheckExact(root) == 0) return false;
    root_ = members.rank_of(root);
    return root_.has_value();
  }

  // Returns a code of PythonCommunicator, with an exception set if it threw one: then kThrew.
  int run(const Group& members) {
    try {
      return run(*members.communicator(), members);
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
    return kThrew;
  }

  int run(PythonCommunicator& engine, const Group& members) {
    const std::uint32_t kind = way_.collective + variant_;
    const std::uint32_t root = root_.value_or(0);
    const bool is_root = root == engine.rank();
    PyObject* const source = given_[Role::source];
    PyObject* const target = given_[Role::target];
    switch (way_.form) {
      case Form::in_place:
        return is_array(source) ? engine.run(kind, op_, root, source, source) : kNot;
      case Form::onto_root:
        if (!is_array(source)) return kNot;
        return engine.run(kind, op_, root, source, is_root ? source : Py_None);
      case Form::cut:
        if (!is_cut_evenly(source, engine.ranks())) return kNot;
        [[fallthrough]];
      case Form::apart: {
        const Side input = side(source, given_[Role::sources], is_root);
        const Side output = side(target, given_[Role::targets], is_root);
        if (!input.is_good || !output.is_good) return kNot;
        return engine.run_apart(kind, op_, root, input.arrays, output.arrays);
      }
      case Form::nothing:
        return members.has_barriers() ? engine.run(kind, 0, 0, Py_None, Py_None) : kNot;
      case Form::send:
        if (!is_array(source) || is_root || !find_tag()) return kNot;
        return engine.send(root, tag_, source);
      case Form::receive:
        if (!is_array(target) || (root_ && is_root) || !find_tag()) return kNot;
        return engine.receive(root_ ? static_cast<int>(root) : -1, tag_, target);
    }
    return kNot;
  }

  struct Side {
    PyObject* arrays;
    bool is_good;
  };
  // An array, or a list of them, which only the root has if there is one.
  Side side(PyObject* array, PyObject* list, bool is_root) const {
    if (array != nullptr) return {array, list == nullptr && is_array(array)};
    if (root_ && !is_root) return {Py_None, list == nullptr};
    return {list, is_list(list)};
  }

  bool find_tag() {
    PyObject* const tag = given_[Role::tag];
    if (tag == nullptr) return true;
    if (PyLong_CheckExact(tag) == 0) return false;
    const long value = PyLong_AsLong(tag);
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    tag_ = static_cast<std::int32_t>(value);
    return tag_ == value;
  }

  // Raises the error of a call that has failed.
  void fail(PyObject* group, int code) {
    if (code == kThrew) return;
    const auto first = {Role::source, Role::target, Role::sources};
    const auto given = std::find_if(first.begin(), first.end(),
                                    [&](Role role) { return given_[role] != nullptr; });
    PyObject* const what = given == first.end() ? Py_None : given_[*given];
    try {
      const nb::object error = nb::handle(known.error)(
          nb::handle(group), code, nb::handle(way_.function).attr("__name__"), nb::handle(what),
          op_, root_.value_or(0), variant_);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error& error) {
      error.restore();
    }
  }

  static constexpr int kNot = PythonCommunicator::kBadBuffer;  // for the function
  static constexpr int kThrew = -1000;

  const ShortWay& way_;
  Given given_;
  std::uint32_t op_ = 0;
  std::optional<std::uint32_t> root_;  // in the group
  std::uint32_t variant_ = 0;
  std::int32_t tag_ = 0;
  nb::object result_;
};

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  const auto& way = *reinterpret_cast<const ShortWay*>(self);
  ShortCall call(way);
  if (call.carry_out(arguments, PyVectorcall_NARGS(flags), names)) return call.result();
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
      [](nb::handle array, nb::handle group, nb::handle op, nb::handle defaults, nb::handle error) {
        for (nb::handle each : {array, group, op, defaults, error}) each.inc_ref();
        known = {type_of(array),
                 type_of(group),
                 type_of(op),
                 type_of(nb::type<PythonCommunicator>()),
                 defaults.ptr(),
                 PyUnicode_InternFromString("_default"),
                 PyUnicode_InternFromString("at_once"),
                 PyUnicode_InternFromString("ranks"),
                 error.ptr()};
      },
      nb::arg("array"), nb::arg("group"), nb::arg("op"), nb::arg("defaults"), nb::arg("error"));
}

}  // namespace rallypoint::python
