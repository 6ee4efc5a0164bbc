// Calls of a communicator, carried out one after the other by any thread that has time: the
// progress thread, or a thread that waits for one of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "engine/executor.h"
#include "engine/flight_record.h"
#include "engine/progress_thread.h"
#include "engine/work.h"

namespace rallypoint {

class Queue {
 public:
  Queue(Executor& executor, GroupRecord& record) : executor_(executor), record_(record) {}

  bool is_empty() const { return waiting_.load(std::memory_order_acquire) == 0; }
  std::size_t size() const { return waiting_.load(std::memory_order_acquire); }
  // The call must stay where it is until the work is done.
  void push(const Call& call, std::shared_ptr<Work> work);
  // The same for a call that the executor runs already, while there is no other, and that has
  // waited for this long. The caller holds the executor's mutex.
  void adopt(const Call& call, std::shared_ptr<Work> work, std::uint64_t waited_ns);
  std::shared_ptr<Work> first();  // null if there is none
  // Makes all possible progress with the first call. The caller holds the executor's mutex.
  Step advance(bool has_slept, Host& host);

 private:
  struct Item {
    const Call* call = nullptr;
    std::shared_ptr<Work> work;
    bool is_recorded = true;  // as queued
  };

  void pop(Trouble trouble);
  void count_wait(bool is_blocked);

  Executor& executor_;
  GroupRecord& record_;  // written under the executor's mutex
  std::mutex mutex_;     // of calls_
  std::deque<Item> calls_;
  std::atomic<std::size_t> waiting_{0};
  // The first one; under the executor's mutex.
  bool has_begun_ = false;
  std::uint64_t idle_since_ns_ = 0;  // 0: it moves
  std::uint64_t waited_ns_ = 0;
};

}  // namespace rallypoint
