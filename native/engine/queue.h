// Calls of a communicator that are carried out one after the other by whoever has time: the
// progress thread, or a thread that waits for one of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "engine/executor.h"
#include "engine/progress_thread.h"
#include "engine/work.h"

namespace rallypoint {

class CallWork : public Work {
 public:
  Call call{};
};

class Queue {
 public:
  explicit Queue(Executor& executor) : executor_(executor) {}

  bool is_empty() const { return waiting_.load(std::memory_order_acquire) == 0; }
  std::size_t size() const { return waiting_.load(std::memory_order_acquire); }
  void push(std::shared_ptr<CallWork> work);
  std::shared_ptr<CallWork> first();  // null if there is none
  // Gets on with the first call as far as that goes. The caller holds the executor's mutex.
  Executor::Step advance(bool has_slept, Host& host);

 private:
  void pop(Trouble trouble);

  Executor& executor_;
  std::mutex mutex_;  // of calls_
  std::deque<std::shared_ptr<CallWork>> calls_;
  std::atomic<std::size_t> waiting_{0};
  std::shared_ptr<CallWork> current_;  // of who holds the executor's mutex
};

}  // namespace rallypoint
