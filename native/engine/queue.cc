#include "engine/queue.h"

#include <utility>

namespace rallypoint {

void Queue::push(std::shared_ptr<CallWork> work) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(work));
  waiting_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<CallWork> Queue::first() {
  const std::lock_guard lock(mutex_);
  return calls_.empty() ? nullptr : calls_.front();
}

Executor::Step Queue::advance(bool has_slept, Host& host) {
  if (current_ == nullptr) {
    {
      const std::lock_guard lock(mutex_);
      if (calls_.empty()) return Executor::Step::finished;
      current_ = calls_.front();
    }
    executor_.begin(current_->call);
  }
  const Executor::Step step = executor_.step(has_slept, host);
  if (step == Executor::Step::finished) {
    pop(Trouble::none);
    return Executor::Step::moved;
  }
  if (step == Executor::Step::failed) {
    pop(executor_.trouble());
    return Executor::Step::moved;
  }
  return step;
}

void Queue::pop(Trouble trouble) {
  const std::shared_ptr<CallWork> work = std::exchange(current_, nullptr);
  {
    const std::lock_guard lock(mutex_);
    calls_.pop_front();
  }
  waiting_.fetch_sub(1, std::memory_order_release);
  work->finish(trouble);
}

}  // namespace rallypoint
