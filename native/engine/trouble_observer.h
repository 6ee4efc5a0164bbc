// After a rank has waited without success: finds out why (a peer was lost, or made another call),
// and tells all ranks.
#pragma once

#include <cstdint>

#include "engine/channel.h"
#include "engine/lane_runner.h"
#include "engine/prepared_call.h"
#include "engine/region.h"
#include "engine/waiting.h"

namespace rallypoint {

class TroubleObserver {
 public:
  // `call` is the running call, or the last one.
  TroubleObserver(Region& region, Channel& channel, const PreparedCall& call)
      : region_(region), channel_(channel), prepared_(call), wire_(channel.wire()) {}

  // Tells the peers what this rank calls.
  void record();
  // The same; from now on this rank waits for them.
  void begin(double timeout_s);
  // The call proceeds: what was observed, and for how long, no longer counts.
  void has_moved() {
    blocker_is_gone_ = false;
    began_s_ = 0;
  }
  // Whether something on which the call depends prevents the rank from proceeding.
  Trouble look(std::uint32_t blocker, Host& host);
  // Each tells all ranks, and returns the trouble: an error that a message has shown,
  Trouble tell(const Finding& finding, Host& host);
  // or what is wrong with a rank.
  Trouble fail(Trouble trouble, std::uint32_t rank, std::uint64_t sent = 0);
  // This rank gives up; with the executor's mutex, peers are told in which call it is.
  void interrupt(bool has_mutex);

 private:
  Trouble fail_against(Trouble trouble, std::uint32_t member, Host& host,
                       const Finding& finding = {});
  bool is_blocked_by_mismatch(std::uint32_t member, std::uint32_t blocker) const;
  bool has_left(std::uint32_t rank) const;
  bool is_cut_off(std::uint32_t rank);

  Region& region_;
  Channel& channel_;
  const PreparedCall& prepared_;
  MessageTransport* wire_;  // null: all ranks are on this host
  double timeout_s_ = 0;
  double began_s_ = 0;    // the time when the call was first seen without progress
  double cut_off_s_ = 0;  // the time when its blocker was first seen without a connection
  bool blocker_is_gone_ = false;
};

}  // namespace rallypoint
