// Operations that Python waits for later, and what they keep alive meanwhile.
//
// Whoever finishes an operation may not hold the GIL. It puts the operation aside; what it kept
// alive is released by the next thread of Python's that comes by.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "python/buffer.h"
#include "python/gil.h"

namespace rallypoint::python {

// Holds the GIL for short waits, gives it up for long ones, and lets Ctrl-C through.
class PythonHost final : public Host {
 public:
  // `is_alone`: whether no other thread of Python's may communicate.
  // `site`: tells where the program stands.
  explicit PythonHost(const nanobind::callable* site, const nanobind::callable* is_alone = nullptr)
      : site_(site), is_alone_(is_alone) {}
  ~PythonHost() override { resume(); }
  void before_wait() override {
    if (thread_ == nullptr) thread_ = PyEval_SaveThread();
  }
  bool is_interrupted() override;
  bool is_alone() override;
  std::string site() override;
  void resume() {
    if (thread_ != nullptr) take_gil(thread_);
    thread_ = nullptr;
  }

 private:
  const nanobind::callable* site_;
  const nanobind::callable* is_alone_;
  PyThreadState* thread_ = nullptr;
};

class PythonWork final : public Work, public std::enable_shared_from_this<PythonWork> {
 public:
  Call call{};
  Transfer transfer;
  bool is_transfer = false;
  nanobind::callable is_alone;
  nanobind::callable site;
  std::shared_ptr<Communicator> communicator;
  std::vector<View> views;
  std::vector<Block> inputs;
  std::vector<Block> outputs;
  std::vector<std::byte> staging;

  // Returns whether it is done; raises what a signal handler raises. Negative: however long it is.
  bool wait(double timeout_s);
  // The same without waiting, but getting on.
  bool test();
  // Ask for it to be returned by next_done; false if it is done already.
  bool watch();
  void release();
  void await_last_step() const;

 private:
  void on_done() override;

  bool is_watched_ = false;  // under the lock of the finished
  bool is_finished_ = false;
};

// Release what finished operations have kept alive. With the GIL.
void release_finished();
// Waits for an operation that was watched to be done; null when the process ends.
std::shared_ptr<PythonWork> next_done();
// The process ends: nothing must touch Python any more.
void close_work();

}  // namespace rallypoint::python
