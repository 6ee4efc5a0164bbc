#include "python/short_call.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>

#include "python/communicator.h"
#include "python/refusal.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

// Within a handler: what was thrown becomes Python's error.
void set_error() {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::system_error& refused) {
    set_refusal(refused);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

// A group, and its attribute `fast_path`: a FastPath of process_group/groups/group.py.
class Group {
 public:
  explicit Group(PyObject* group)
      : group_(nb::borrow(group)), parts_(nb::steal(PyObject_GetAttr(group, known.fast_path))) {
    if (!parts_.is_valid()) PyErr_Clear();
    const bool is_there = parts_.is_valid() && PyTuple_Check(parts_.ptr());
    if (is_there && Py_TYPE(part(kCommunicator)) == known.communicator) {
      communicator_ = nb::inst_ptr<PythonCommunicator>(part(kCommunicator));
    }
  }
  PythonCommunicator* communicator() const { return communicator_; }
  // Null with an exception set.
  nb::object global_rank(int rank) const {
    const auto ranks = nb::steal(PyObject_GetAttr(group_.ptr(), known.ranks));
    return nb::steal(ranks.is_valid() ? PySequence_GetItem(ranks.ptr(), rank) : nullptr);
  }
  std::optional<std::uint32_t> rank_of(PyObject* global_rank) const {
    return number_in(part(kRanks), global_rank);
  }
  std::optional<std::uint32_t> variant_of(PyObject* algorithm) const {
    return number_in(part(kVariants), algorithm);
  }
  bool has_barriers() const { return part(kHasBarriers) == Py_True; }

 private:
  enum Part : Py_ssize_t { kCommunicator, kRanks, kVariants, kHasBarriers };

  PyObject* part(Part which) const { return PyTuple_GetItem(parts_.ptr(), which); }
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
  static constexpr int kRoles = static_cast<int>(Role::target_splits) + 1;

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

// The length of an array's first dimension; negative if it has none, or is no array of NumPy's.
Py_ssize_t rows_of(PyObject* array) {
  if (array == nullptr || Py_TYPE(array) != known.array) return -1;
  const Py_ssize_t length = PyObject_Size(array);
  if (length < 0) PyErr_Clear();
  return length;
}

bool is_cut_evenly(PyObject* array, std::uint32_t ranks) {
  const Py_ssize_t rows = rows_of(array);
  return rows >= 0 && rows % static_cast<Py_ssize_t>(ranks) == 0;
}

// An array cut into one part for each rank: as the list says, evenly without one. Not if the list
// is anything else.
std::optional<PythonCommunicator::Cut> cut_of(PyObject* array, PyObject* sizes,
                                              std::uint32_t ranks) {
  const Py_ssize_t rows = rows_of(array);
  if (rows < 0) return {};
  PythonCommunicator::Cut cut{array, {}, static_cast<std::uint64_t>(rows)};
  if (sizes == nullptr) {
    if (!is_cut_evenly(array, ranks)) return {};
    cut.sizes.assign(ranks, cut.rows / ranks);
    return cut;
  }
  if (!is_list(sizes) || PyList_Size(sizes) != static_cast<Py_ssize_t>(ranks)) return {};
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    PyObject* const size = PyList_GetItem(sizes, rank);
    if (PyLong_CheckExact(size) == 0) return {};
    const long value = PyLong_AsLong(size);
    if (value < 0) {
      PyErr_Clear();
      return {};
    }
    cut.sizes.push_back(static_cast<std::uint64_t>(value));
  }
  return cut;
}

// One call, from its arguments to its result.
class ShortCall {
 public:
  explicit ShortCall(const ShortWay& way) : way_(way) {}

  // Returns whether the call is over; if not, nothing has been done.
  bool carry_out(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (!given_.take(way_, arguments, count, names)) return false;
    PyObject* const background = given_[Role::background];
    if (background != nullptr && background != Py_False && background != Py_True) return false;
    PyObject* const named = given_[Role::group];
    PyObject* const group =
        named != nullptr ? named : PyDict_GetItemWithError(known.defaults, known.default_group);
    if (group == nullptr || Py_TYPE(group) != known.group) return false;
    const Group members(group);
    if (members.communicator() == nullptr || !find_op() || !find_root(members)) return false;
    if (!find_timeout()) return false;
    if (PyObject* const algorithm = given_[Role::algorithm]) {
      const auto found = members.variant_of(algorithm);
      if (!found) return false;
      variant_ = *found;
    }
    if (background == Py_True) return begin(members, group);
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
    PyObject* root = given_[Role::root];
    if (PyObject* const place = given_[Role::root_in_group]) {
      if (root != nullptr || PyLong_CheckExact(place) == 0) return false;
      const long value = PyLong_AsLong(place);
      if (PyErr_Occurred() != nullptr) PyErr_Clear();
      if (value < 0 || value >= static_cast<long>(members.communicator()->ranks())) return false;
      root_ = static_cast<std::uint32_t>(value);
      return true;
    }
    if (root == nullptr) root = way_.default_root;
    if (root == nullptr) return !way_.needs_root;
    if (PyLong_CheckExact(root) == 0) return false;
    root_ = members.rank_of(root);
    return root_.has_value();
  }

  bool find_timeout() {
    PyObject* const timeout = given_[Role::timeout];
    if (timeout == nullptr) return true;
    if (Py_TYPE(timeout) != known.timedelta) return false;
    const auto seconds =
        nb::steal(PyObject_CallMethodObjArgs(timeout, known.total_seconds, nullptr));
    timeout_s_ = seconds.is_valid() ? PyFloat_AsDouble(seconds.ptr()) : -1;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    return timeout_s_ > 0;
  }

  // Begins a call in the background: its work is the result. As `carry_out`.
  bool begin(const Group& members, PyObject* group) {
    PyObject* const source = given_[Role::source];
    PyObject* const target = given_[Role::target];
    const bool is_in_place = way_.form == Form::in_place;
    const bool is_apart = way_.form == Form::apart || way_.form == Form::cut;
    if (!is_array(source) || !(is_in_place || (is_apart && is_array(target)))) return false;
    PythonCommunicator& engine = *members.communicator();
    if (way_.form == Form::cut && (!is_cut_evenly(source, engine.ranks()) || has_splits())) {
      return false;
    }
    PyObject* const filled = is_in_place ? source : target;
    try {
      const nb::object native =
          engine.submit(way_.collective + variant_, op_, root_.value_or(0), source, filled, -1, 1,
                        false, timeout_s_, true, is_in_place, false);
      if (PyLong_Check(native.ptr()) != 0) return false;  // for the function
      result_ = nb::handle(known.work)(
          native, nb::handle(group), nb::handle(way_.function).attr("__name__"), nb::handle(source),
          nb::handle(filled), op_, root_.value_or(0), variant_);
    } catch (...) {
      set_error();
    }
    return true;
  }
  bool has_splits() const {
    return given_[Role::source_splits] != nullptr || given_[Role::target_splits] != nullptr;
  }

  // Returns a code of PythonCommunicator, with an exception set if it threw one: then kThrew.
  int run(const Group& members) {
    try {
      return run(*members.communicator(), members);
    } catch (...) {
      set_error();
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
        return is_array(source) ? engine.run(kind, op_, root, source, source, timeout_s_) : kNot;
      case Form::onto_root:
        if (!is_array(source)) return kNot;
        return engine.run(kind, op_, root, source, is_root ? source : Py_None, timeout_s_);
      case Form::cut:
        if (has_splits()) {
          const auto input = cut_of(source, given_[Role::source_splits], engine.ranks());
          const auto output = cut_of(target, given_[Role::target_splits], engine.ranks());
          return input && output ? engine.run_cut(kind, *input, *output, timeout_s_) : kNot;
        }
        if (!is_cut_evenly(source, engine.ranks())) return kNot;
        [[fallthrough]];
      case Form::apart: {
        const Side input = side(source, given_[Role::sources], is_root);
        const Side output = side(target, given_[Role::targets], is_root);
        if (!input.is_good || !output.is_good) return kNot;
        return engine.run_apart(kind, op_, root, input.arrays, output.arrays, timeout_s_);
      }
      case Form::nothing:
        if (!members.has_barriers()) return kNot;
        return engine.run(kind, 0, 0, Py_None, Py_None, timeout_s_);
      case Form::send:
        if (!is_array(source) || is_root || !find_tag()) return kNot;
        return engine.send(root, tag_, source, timeout_s_);
      case Form::receive:
        if (!is_array(target) || (root_ && is_root) || !find_tag()) return kNot;
        return engine.receive(root_ ? static_cast<int>(root) : -1, tag_, target, timeout_s_);
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
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
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
  double timeout_s_ = -1;  // the group's
  nb::object result_;
};

}  // namespace

Known known{};

bool carry_out(const ShortWay& way, PyObject* const* arguments, Py_ssize_t count, PyObject* names,
               PyObject*& result) {
  ShortCall call(way);
  if (!call.carry_out(arguments, count, names)) return false;
  result = call.result();
  return true;
}

}  // namespace rallypoint::python
