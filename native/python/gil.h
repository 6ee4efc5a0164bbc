// Releasing the GIL and taking it again, even if the interpreter ends meanwhile.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace rallypoint::python {

// Takes the GIL after PyEval_SaveThread. Before Python 3.14, a thread that does so while the
// interpreter ends is unwound there, which no destructor and no binding survives: instead it stays
// here until the process is gone.
inline void take_gil(PyThreadState* thread) {
  try {
    PyEval_RestoreThread(thread);
  } catch (...) {  // the unwinding, which cannot be undone
    for (;;) pause();
  }
}

// The GIL is released while this lives.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { take_gil(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace rallypoint::python
