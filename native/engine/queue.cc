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
void Queue::adopt(const Call& call, std::shared_ptr<Work> work, std::uint64_t waited_ns) {
  const std::lock_guard lock(mutex_);
  calls_.push_front({&call, std::move(work), false});
  has_begun_ = true;
  waited_ns_ = waited_ns;
  idle_since_ns_ = now_ns();
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
    record_.begin(call->what.bits(), call->count, call->count * item_bytes(call->what.dtype),
                  call->agreement == nullptr ? 1 : 2);
    executor_.begin(*call);
    has_begun_ = true;
  }
  const Step step = executor_.step(has_slept, host);
  count_wait(step == Step::blocked);
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
  record_.end(trouble, false, std::exchange(waited_ns_, 0));
  if (item.is_recorded) record_.unqueue();
  waiting_.fetch_sub(1, std::memory_order_release);
  item.work->finish(trouble);
}

void Queue::count_wait(bool is_blocked) {
  if (is_blocked == (idle_since_ns_ != 0)) return;
  const std::uint64_t now = now_ns();
  if (!is_blocked) waited_ns_ += now - idle_since_ns_;
  idle_since_ns_ = is_blocked ? now : 0;
}

}  // namespace rallypoint
