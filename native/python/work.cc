#include "python/work.h"

#include <nanobind/stl/string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "engine/progress_thread.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

constexpr double kForeverS = 1e9;

struct Finished {
  std::mutex mutex;
  std::vector<std::shared_ptr<PythonWork>> to_release;
  std::deque<std::shared_ptr<PythonWork>> watched;
  std::condition_variable is_watched;
  std::atomic<bool> has_any{false};    // to release
  std::atomic<bool> is_called{false};  // Python's main thread, to release them
  bool is_closed = false;
};

// Whether this thread is about to release them.
thread_local bool comes_by = false;

Finished& finished() {
  static constinit PerProcess<Finished> state;
  return state.get();
}

int release_later(void*) {
  release_finished();
  return 0;
}

// Python runs signal handlers only there.
bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// The Python frame of the main thread that made the call which handlers may interrupt now; null:
// they interrupt none.
std::atomic<PyObject*> interrupted{nullptr};

// Handlers may run within this block, which begins with the GIL.
class Interruptible {
 public:
  Interruptible() : is_main_(is_main_thread()), outer_(interrupted) {
    if (is_main_) interrupted = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  }
  ~Interruptible() {
    if (is_main_) interrupted = outer_;
  }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  bool is_main_;
  PyObject* outer_;
};

nb::object interruption(const char* function) {
  return nb::module_::import_("rallypoint.engine.interruption").attr(function);
}

}  // namespace

Releasing::Releasing() : outer_(std::exchange(comes_by, true)) {}

Releasing::~Releasing() {
  comes_by = outer_;
  release_finished();
}

void refuse_among_others() {
  if (interrupted != nullptr && is_main_thread()) interruption("refuse_among_others")();
}

bool PythonHost::is_interrupted() {
  const bool released = thread_ != nullptr;
  resume();
  const Interruptible handlers_run;
  const bool has_raised = PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
  if (released && !has_raised) before_wait();
  return has_raised;
}

bool PythonHost::runs_handlers() {
  return is_main_thread() && ask([] { return interruption("may_run_handlers")(); }, false);
}

template <typename Question, typename Answer>
Answer PythonHost::ask(const Question& question, Answer otherwise) {
  const bool released = thread_ != nullptr;
  resume();
  if (PyErr_Occurred() == nullptr) {
    const Interruptible handlers_run;
    try {
      otherwise = nb::cast<Answer>(question());
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) error.restore();
    } catch (const nb::cast_error&) {  // a function that only informs must not fail
    }
  }
  if (released) before_wait();
  return otherwise;
}

bool PythonHost::is_alone() { return is_alone_ != nullptr && ask(*is_alone_, false); }

std::string PythonHost::site() {
  if (site_ == nullptr || !site_->is_valid()) return {};
  return ask(*site_, std::string());
}

// Between on_done and done there is one more step, by a thread that waits for nobody.
void PythonWork::await_last_step() const {
  while (!is_done()) sleep(1000);
}

// If it was done before the fork, the child knows as much as its parent.
void PythonWork::refuse_in_child() const {
  if (generation_ == generation() || is_done()) return;
  throw nb::value_error(
      "this operation belongs to the process that forked this one; wait for it there");
}

int PythonWork::wait(double timeout_s) {
  refuse_in_child();
  const Releasing releasing;
  if (communicator == nullptr) {
    await_last_step();  // it has been released already
  } else if (!is_done()) {
    // Another thread may release what this work holds as soon as it is done: keep the object that
    // is called.
    const std::shared_ptr<Communicator> kept = communicator;
    const nb::callable kept_site = site;
    const nb::callable kept_is_alone = is_alone;
    PythonHost host(&kept_site, kept_is_alone.is_valid() ? &kept_is_alone : nullptr);
    const double most_s = timeout_s < 0 ? kForeverS : timeout_s;
    if (is_transfer) {
      kept->wait(transfer, *this, most_s, host);
    } else {
      kept->wait(*this, most_s, host);
    }
    host.finish();
  }
  return end();
}

int PythonWork::test() {
  refuse_in_child();
  const Releasing releasing;
  if (communicator == nullptr) {
    await_last_step();
  } else if (!is_done()) {
    // Making progress may mean carrying out a whole large collective.
    const std::shared_ptr<Communicator> kept = communicator;
    const WithoutGil without_gil;
    kept->progress(false);
  }
  return end();
}

bool PythonWork::watch() {
  refuse_in_child();
  bool is_under_way = false;
  {
    const std::lock_guard lock(finished().mutex);
    is_under_way = is_watched_ = !is_finished_;
  }
  if (is_under_way) {
    // A thread that only asks does not help, unlike one that waits.
    ProgressThread::instance().notify(true);
    return true;
  }
  await_last_step();
  return false;
}

void PythonWork::release() {
  views.clear();
  is_alone = nb::callable();
  site = nb::callable();
  communicator.reset();
}

void PythonWork::on_done() {
  Finished& state = finished();
  const std::lock_guard lock(state.mutex);
  is_finished_ = true;
  // This also happens when the process ends, and no thread will come by: this thread may be the
  // last to know of it, and must not release it.
  state.to_release.push_back(shared_from_this());
  if (state.is_closed) return;
  if (is_watched_) {
    state.watched.push_back(shared_from_this());
    state.is_watched.notify_one();
  }
  state.has_any.store(true, std::memory_order_relaxed);
  // Python's main thread will come by, if nobody else does.
  if (!comes_by && !state.is_called.exchange(true)) Py_AddPendingCall(release_later, nullptr);
}

void release_finished() {
  Finished& state = finished();
  if (!state.has_any.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<PythonWork>> works;
  {
    const std::lock_guard lock(state.mutex);
    works.swap(state.to_release);
    state.has_any.store(false, std::memory_order_relaxed);
    state.is_called.store(false, std::memory_order_relaxed);
  }
  for (const auto& work : works) work->release();
}

std::shared_ptr<PythonWork> next_done() {
  Finished& state = finished();
  std::unique_lock lock(state.mutex);
  state.is_watched.wait(lock, [&] { return state.is_closed || !state.watched.empty(); });
  if (state.is_closed) return nullptr;
  std::shared_ptr<PythonWork> work = std::move(state.watched.front());
  state.watched.pop_front();
  lock.unlock();
  work->await_last_step();
  return work;
}

nb::object interrupted_frame() {
  PyObject* const frame = is_main_thread() ? interrupted.load() : nullptr;
  return frame == nullptr ? nb::none() : nb::borrow(frame);
}

void close_work() {
  Finished& state = finished();
  const std::lock_guard lock(state.mutex);
  state.is_closed = true;
  state.is_watched.notify_all();
}

}  // namespace rallypoint::python
