// Detects that ranks wait for each other's sends and receives in a cycle: on one host from what
// each says it waits for, between hosts by asking.
//
// A rank announces a wait only if it will do nothing else meanwhile. A transfer that has been
// matched, or has ended, is not waited for, even before the waiting thread knows it.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "engine/outboxes.h"
#include "engine/region.h"
#include "engine/transfer.h"
#include "engine/transport.h"

namespace rallypoint {

class WaitCircles {
 public:
  using Sends = std::list<PendingTransfer>;

  // `courier` is null if all ranks are on this host.
  WaitCircles(Region& region, const Outboxes& boxes, const MailTransport* courier)
      : region_(region), boxes_(boxes), courier_(courier) {}

  // From now on this rank waits for the transfer.
  void begin(const PendingTransfer& item);
  bool is_waiting(const Transfer& transfer) const { return waiting_ == &transfer; }
  // This rank no longer waits: for this transfer, if it did; or for any.
  void end(const Transfer& transfer);
  void end();
  // The send that is waited for has found room.
  void say_slot(const PendingTransfer& item);
  // Publishes the number of sends that have not begun.
  void say_unsent(std::uint32_t count);
  // Returns `circle`, and has told all ranks, if the transfer is waited for in a cycle. `sends` are
  // all of this rank's.
  Trouble look(const PendingTransfer& item, const Sends& sends);

 private:
  Trouble look_here();
  Trouble look_afar(const PendingTransfer& item, const Sends& sends);
  bool is_stuck(std::uint32_t rank, std::uint64_t epoch) const;
  bool is_stuck(const PendingTransfer& item) const;
  bool keeps_waiting(const Probe& probe, const Sends& sends) const;
  void probe(const PendingTransfer& item, Probe probe);
  bool waits_afar(std::uint32_t rank) const;
  bool add_member(Probe& probe, std::uint32_t rank) const;

  Region& region_;
  const Outboxes& boxes_;
  const MailTransport* courier_;
  const Transfer* waiting_ = nullptr;
  std::vector<std::uint64_t> circle_;  // the one seen at the last look
  double probed_s_ = 0;                // when other hosts were last asked
};

}  // namespace rallypoint
