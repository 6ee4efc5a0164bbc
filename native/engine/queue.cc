#include "engine/queue.h"

#include <utility>

namespace rallypoint {

void Queue::push(const Call& call, std::shared_ptr<Work> work) {
  record_.queue();
  const std::lock_guard lock(mutex_);
  calls_.push_back({&call, std::move(work)});
  waiting_.fetch_add(1, std::memory_order_release);
}

// Other threads may push calls meanwhile: it comes before these.
void Queue::adopt(const Call& call, std::shared_ptr<Work> work) {
  const std::lock_guard lock(mutex_);
  calls_.push_front({&call, std::move(work), false});
  has_begun_ = true;
  waiting_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<Work> Queue::first() {
  const std::lock_guard lock(mutex_);
  return calls_.empty() ? nullptr : calls_.front().work;
}

Step Queue::advance(bool has_slept, Host& host) {
  if (!has_begun_) {
    const Call* call = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (calls_.empty()) return Step::finished;
      call = calls_.front().call;
    }
    record_.begin(call->what.bits(), call->count, call->agreement == nullptr ? 1 : 2);
    executor_.begin(*call);
    has_begun_ = true;
  }
  const Step step = executor_.step(has_slept, host);
  if (step == Step::finished) {
    pop(Trouble::none);
    return Step::moved;
  }
  if (step == Step::failed) {
    pop(executor_.trouble());
    return Step::moved;
  }
  return step;
}

void Queue::pop(Trouble trouble) {
  Item item;
  {
    const std::lock_guard lock(mutex_);
    item = std::move(calls_.front());
    calls_.pop_front();
  }
  has_begun_ = false;
  record_.end(trouble, false);
  if (item.is_recorded) record_.unqueue();
  waiting_.fetch_sub(1, std::memory_order_release);
  item.work->finish(trouble);
}

}  // namespace rallypoint
