#include "python/work.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

constexpr double kForeverS = 1e9;

// Never destroyed: threads may outlive whatever else ends with the process.
struct Finished {
  std::mutex mutex;
  std::vector<std::shared_ptr<PythonWork>> to_release;
  std::deque<std::shared_ptr<PythonWork>> watched;
  std::condition_variable is_watched;
  std::atomic<bool> has_any{false};
  bool is_closed = false;
};

Finished& finished() {
  static auto* const state = new Finished;
  return *state;
}

int release_later(void*) {
  release_finished();
  return 0;
}

}  // namespace

bool PythonHost::is_interrupted() {
  const bool released = thread_ != nullptr;
  resume();
  const bool interrupted = PyErr_CheckSignals() != 0;
  if (released && !interrupted) before_wait();
  return interrupted;
}

bool PythonHost::is_alone() {
  if (is_alone_ == nullptr) return false;
  const bool released = thread_ != nullptr;
  resume();
  const bool alone = nb::cast<bool>((*is_alone_)());
  if (released) before_wait();
  return alone;
}

std::string PythonHost::site() {
  if (site_ == nullptr || !site_->is_valid()) return {};
  const bool released = thread_ != nullptr;
  resume();
  std::string text;
  try {
    text = nb::cast<std::string>((*site_)());
  } catch (const std::exception&) {  // what only tells must not fail
    PyErr_Clear();
  }
  if (released) before_wait();
  return text;
}

// Between on_done and done there is one more step, of a thread that waits for nobody.
void PythonWork::await_last_step() const {
  while (!is_done()) sleep(1000);
}

bool PythonWork::wait(double timeout_s) {
  if (communicator == nullptr) {
    await_last_step();  // it has been released already
  } else if (!is_done()) {
    // Another thread may release what this work holds as soon as it is done: keep what is called.
    const std::shared_ptr<Communicator> kept = communicator;
    const nb::callable kept_site = site;
    const nb::callable kept_is_alone = is_alone;
    PythonHost host(&kept_site, kept_is_alone.is_valid() ? &kept_is_alone : nullptr);
    const double most_s = timeout_s < 0 ? kForeverS : timeout_s;
    const bool done =
        is_transfer ? kept->wait(transfer, *this, most_s, host) : kept->wait(*this, most_s, host);
    host.resume();
    if (!done && PyErr_Occurred() != nullptr) throw nb::python_error();
  }
  release_finished();
  return is_done();
}

bool PythonWork::test() {
  if (communicator == nullptr) {
    await_last_step();
  } else if (!is_done()) {
    const std::shared_ptr<Communicator> kept = communicator;
    kept->progress(false);
  }
  release_finished();
  return is_done();
}

bool PythonWork::watch() {
  {
    const std::lock_guard lock(finished().mutex);
    if (!is_finished_) {
      is_watched_ = true;
      return true;
    }
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
  if (state.is_closed) return;
  state.to_release.push_back(shared_from_this());
  if (is_watched_) {
    state.watched.push_back(shared_from_this());
    state.is_watched.notify_one();
  }
  // Python's main thread will come by, if nobody else does.
  if (!state.has_any.exchange(true)) Py_AddPendingCall(release_later, nullptr);
}

void release_finished() {
  Finished& state = finished();
  if (!state.has_any.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<PythonWork>> works;
  {
    const std::lock_guard lock(state.mutex);
    works.swap(state.to_release);
    state.has_any.store(false, std::memory_order_relaxed);
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

void close_work() {
  Finished& state = finished();
  const std::lock_guard lock(state.mutex);
  state.is_closed = true;
  state.is_watched.notify_all();
}

}  // namespace rallypoint::python
