// Carries out the calls of a communicator, one at a time: prepares them, runs their lanes, waits
// for peers and looks for trouble.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/call.h"
#include "engine/channel.h"
#include "engine/lane_runner.h"
#include "engine/peer_memory.h"
#include "engine/trouble_observer.h"
#include "engine/waiting.h"

namespace rallypoint {

class Executor {
 public:
  Executor(Region& region, PeerMemory& memory, Channel channel, WaitPolicy policy)
      : region_(region),
        policy_(policy),
        wire_(channel.wire()),
        runner_(region, memory, std::move(channel), policy),
        observer_(region, runner_.channel(), runner_.prepared()) {}
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs a call until it is finished, has failed, or is `blocked` and there is nothing left to do
  // but to sleep for longer: the caller goes on with `step`, and with `waiter`, which is made when
  // needed. After a failure the region is poisoned, and records the culprit. One call at a time:
  // threads take `mutex` first.
  Step run(const Call& call, Host& host, std::optional<Waiter>& waiter);
  std::mutex mutex;

  // The same without waiting: after `begin`, call `step` until it is finished or failed. With
  // `has_slept`, it then looks for trouble.
  void begin(const Call& call);
  Step step(bool has_slept, Host& host);
  // This rank gives up; if it has the mutex, peers are told in which call it is.
  void interrupt(bool has_mutex) { observer_.interrupt(has_mutex); }
  // The rank that the call waits for, once it is blocked.
  std::uint32_t blocker() const { return runner_.blocker(); }
  Trouble trouble() const { return trouble_; }

 private:
  Step wait(Host& host, std::optional<Waiter>& waiter);
  void resume();
  Step go_on(bool has_slept, Host& host);

  Region& region_;
  WaitPolicy policy_;
  MessageTransport* wire_;  // null: all ranks are on this host
  LaneRunner runner_;
  TroubleObserver observer_;
  Trouble trouble_ = Trouble::none;  // how the call ended
  const Call* agreed_ = nullptr;     // the call that waits for an agreement
  Call agreement_{};
  Call uneven_{};  // the call with the largest block that was agreed on
  std::int64_t largest_ = 0;
};

}  // namespace rallypoint
