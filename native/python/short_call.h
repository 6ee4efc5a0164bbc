// One call of the short way (short_way.cc), from its arguments to its result.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace rallypoint::python {

inline constexpr Py_ssize_t kMostParameters = 16;

// What a function does with its arrays; process_group/calls/call.py has the same numbers.
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
  timeout,
  source_splits,  // lists of how many rows of an array are each rank's
  target_splits,
};

// What the package itself knows, and keeps for as long as the process lives.
struct Known {
  PyTypeObject* array;         // numpy.ndarray
  PyTypeObject* group;         // ProcessGroup
  PyTypeObject* op;            // ReduceOp
  PyTypeObject* communicator;  // PythonCommunicator
  PyTypeObject* timedelta;     // datetime.timedelta
  PyObject* defaults;          // the namespace that has the default group,
  PyObject* default_group;     // by this name
  PyObject* fast_path;         // names of a group's attributes
  PyObject* ranks;
  PyObject* total_seconds;  // the name of a method of timedelta
  PyObject* error;          // makes the exception for a call that failed,
  PyObject* work;           // and the work of one that has begun
};
extern Known known;

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

// Returns whether the call is over, with its result, which is null if an exception is set; if not,
// nothing has been done. `count` arguments are given by position, and as many as there are names
// follow them.
bool carry_out(const ShortWay& way, PyObject* const* arguments, Py_ssize_t count, PyObject* names,
               PyObject*& result);

}  // namespace rallypoint::python
