#include "engine/executor.h"

#include <algorithm>
#include <utility>

namespace rallypoint {
namespace {

// A message that takes milliseconds is not worth a core's time that others could use; but a thread
// that sleeps between two pieces of it is woken late each time.
constexpr unsigned kFarYields = 300;
constexpr std::uint64_t kFarLongBytes = 128 << 10;
constexpr unsigned kSleeps = 2;  // the first one only rings for a last look

}  // namespace

Step Executor::run(const Call& call, Host& host, std::optional<Waiter>& waiter) {
  trouble_ = Trouble::none;
  if (region_.poisoned()) {
    trouble_ = Trouble::aborted;
    return Step::failed;
  }
  runner_.start(call);
  if (runner_.advance() != Step::finished) return wait(host, waiter);
  if (!call.program->hears_from_all) observer_.record();
  runner_.finish();
  return Step::finished;
}

// Goes on with a call that could not be run in one go, for as long as that is a matter of
// milliseconds.
Step Executor::wait(Host& host, std::optional<Waiter>& waiter) {
  resume();
  WaitPolicy policy = policy_;
  if (wire_ != nullptr && runner_.prepared().block_bytes >= kFarLongBytes) {
    policy.yields = std::min(policy.yields, kFarYields);
  }
  waiter.emplace(region_, policy, host, wire_);
  bool has_slept = false;
  unsigned sleeps = 0;
  for (;;) {
    const Step step = go_on(std::exchange(has_slept, false), host);
    if (step == Step::finished) runner_.finish();
    if (step == Step::finished || step == Step::failed) return step;
    if (step == Step::moved) {
      waiter->reset();
    } else if (waiter->pause(blocker())) {
      if (++sleeps > kSleeps) return step;
      has_slept = true;
    }
  }
}

void Executor::resume() {
  runner_.stop_polling();
  runner_.forget_finding();
  trouble_ = Trouble::none;
  observer_.begin(runner_.call().timeout_s);
}

void Executor::begin(const Call& call) {
  if (call.agreement != nullptr) {
    agreed_ = &call;
    largest_ = static_cast<std::int64_t>(call.count);
    auto* const bytes = reinterpret_cast<std::byte*>(&largest_);
    agreement_ = {call.agreement, call.what, 1, bytes, bytes, call.timeout_s};
    agreement_.what.dtype = DType::int64;
    agreement_.what.op = ReduceOp::max;
    runner_.start(agreement_);
  } else {
    runner_.start(call);
  }
  resume();
}

Step Executor::step(bool has_slept, Host& host) {
  if (region_.poisoned()) {
    trouble_ = Trouble::aborted;
    return Step::failed;
  }
  const Step step = go_on(has_slept, host);
  if (step != Step::finished) return step;
  runner_.finish();
  if (agreed_ == nullptr) return step;
  uneven_ = *std::exchange(agreed_, nullptr);
  uneven_.count = static_cast<std::uint64_t>(largest_);
  uneven_.agreement = nullptr;
  runner_.start(uneven_);
  resume();
  return Step::moved;
}

Step Executor::go_on(bool has_slept, Host& host) {
  const bool something_came = wire_ != nullptr && wire_->poll();
  Step step = runner_.advance();
  if (something_came && step == Step::blocked) step = Step::moved;
  if (step == Step::moved) observer_.has_moved();
  if (const auto failure = wire_ != nullptr ? wire_->failure() : std::nullopt) {
    trouble_ = observer_.fail(failure->trouble, failure->rank, failure->error);
  } else if (runner_.finding().trouble != Trouble::none) {
    trouble_ = observer_.tell(runner_.finding(), host);
  } else if (step == Step::blocked && has_slept) {
    trouble_ = observer_.look(blocker(), host);
  }
  return trouble_ == Trouble::none ? step : Step::failed;
}

}  // namespace rallypoint
