// Messages that a rank takes in before it wants them, so that their sender has room for the one
// that the rank waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "engine/outboxes.h"
#include "engine/region.h"
#include "engine/transfer.h"

namespace rallypoint {

struct StashedMessage {
  std::unique_ptr<std::byte[]> data;
  std::uint64_t sequence = 0;
  Transfer transfer;
  PendingTransfer item;
  bool is_whole = false;
  bool is_wanted = false;  // by a receive
};

class Stash {
 public:
  Stash(const Region& region, const Outboxes& boxes) : region_(region), boxes_(boxes) {}

  bool is_empty() const { return messages_.empty(); }
  // Begins to take in the messages that leave a sender no room for another message to this rank;
  // returns how many. They are then received like others.
  std::size_t take_in();
  std::list<StashedMessage>& messages() { return messages_; }
  // The oldest message from a source that no receive wants, or null.
  StashedMessage* find(std::uint32_t source, std::int32_t tag);
  // The tag of one that no receive wants.
  std::optional<std::int32_t> unwanted_tag(std::uint32_t source) const;
  void drop(const StashedMessage& message);
  // Drops all; returns how many were not whole.
  std::size_t clear();

 private:
  std::size_t take_in_from(std::uint32_t source, bool costly);

  const Region& region_;
  const Outboxes& boxes_;
  std::list<StashedMessage> messages_;
};

}  // namespace rallypoint
