// Operations that Python waits for later, and what they keep alive meanwhile.
//
// The thread that finishes an operation may not hold the GIL. It puts the operation aside; the next
// Python thread that comes by releases what it kept alive.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "engine/communicator.h"
#include "engine/process.h"
#include "python/arguments.h"
#include "python/gil.h"

namespace rallypoint::python {

// Before a call begins: raises CallerError in a signal handler that has interrupted one of several
// calls which must be made in a row (engine/interruption.py).
void refuse_among_others();

// Holds the GIL for short waits, releases it for long ones, and lets Ctrl-C through: an exception
// of a signal handler, wherever it was raised, ends the wait, and `finish` raises it again when the
// engine has released everything. No exception passes through the engine.
class PythonHost final : public Host {
 public:
  // `is_alone`: whether no other thread of Python's may communicate. `site`: returns where the
  // program is.
  explicit PythonHost(const nanobind::callable* site, const nanobind::callable* is_alone = nullptr)
      : site_(site), is_alone_(is_alone) {
    refuse_among_others();
  }
  ~PythonHost() override { resume(); }
  PythonHost(const PythonHost&) = delete;
  PythonHost& operator=(const PythonHost&) = delete;
  void before_wait() override {
    if (thread_ == nullptr) thread_ = PyEval_SaveThread();
  }
  bool is_interrupted() override;
  bool runs_handlers() override;
  bool is_alone() override;
  std::string site() override;
  // The wait is over, however it ended.
  void finish() {
    resume();
    if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  }

 private:
  void resume() {
    if (thread_ != nullptr) take_gil(thread_);
    thread_ = nullptr;
  }
  // With the GIL: what a function of Python's answers; other exceptions than errors, such as
  // Ctrl-C, stay set.
  template <typename Question, typename Answer>
  Answer ask(const Question& question, Answer otherwise);

  const nanobind::callable* site_;
  const nanobind::callable* is_alone_;
  PyThreadState* thread_ = nullptr;
};

inline constexpr int kNotDone = -1;

class PythonWork final : public Work,
                         public Arguments,
                         public std::enable_shared_from_this<PythonWork> {
 public:
  Transfer transfer;
  bool is_transfer = false;
  nanobind::callable is_alone;
  nanobind::callable site;
  std::shared_ptr<Communicator> communicator;

  // Returns its trouble once it is done; else kNotDone. Raises what a signal handler raises. A
  // negative time means no limit.
  int wait(double timeout_s);
  // The same without waiting, but making progress.
  int test();
  // The same without making progress.
  int end() const { return is_done() ? static_cast<int>(trouble()) : kNotDone; }
  // Requests that next_done returns it; false if it is done already.
  bool watch();
  void release();
  void await_last_step() const;

 private:
  void on_done() override;
  void refuse_in_child() const;

  const unsigned generation_ = generation();
  bool is_watched_ = false;  // under the lock of the finished
  bool is_finished_ = false;
};

// Release what finished operations have kept alive. With the GIL.
void release_finished();
// The same at the end of a block, so that nobody has to be called for what this thread finishes
// within it. Begins and ends with the GIL.
class Releasing {
 public:
  Releasing();
  ~Releasing();
  Releasing(const Releasing&) = delete;
  Releasing& operator=(const Releasing&) = delete;

 private:
  bool outer_;
};
// Waits until a watched operation is done; null when the process ends.
std::shared_ptr<PythonWork> next_done();
// In a signal handler: the Python frame of the call that it has interrupted; otherwise
// None.
nanobind::object interrupted_frame();
// The process ends: from now on nothing must access Python.
void close_work();

}  // namespace rallypoint::python
