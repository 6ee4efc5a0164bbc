// One send or receive, and its progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/layout.h"
#include "engine/reduce.h"
#include "engine/ways.h"
#include "engine/work.h"

namespace rallypoint {

inline constexpr std::uint32_t kAnyRank = ~std::uint32_t{0};

// Whether its sender must wait until it is received, or nearly.
inline bool is_large(std::uint64_t bytes) { return bytes > kMailBytes; }

struct Transfer {
  bool sends = false;
  bool is_synchronous = false;  // a send that waits until it is received
  std::uint32_t peer = 0;       // kAnyRank: from any rank; afterwards, the actual one
  std::uint32_t asked = 0;      // what `peer` was when it was posted
  std::int32_t tag = 0;
  DType dtype = DType::uint8;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  double timeout_s = 0;
};

struct StashedMessage;

// A transfer on its way.
struct PendingTransfer {
  static constexpr std::uint64_t kUnnumbered = ~std::uint64_t{0};

  Transfer* transfer = nullptr;
  std::shared_ptr<Work> work = nullptr;
  std::uint64_t number = kUnnumbered;  // of this rank's transfers
  int slot = -1;                       // its envelope, once there is one
  std::uint64_t sequence = 0;          // of its message, if it sends
  std::uint64_t moved = 0;             // bytes of a message that goes in parts
  Way way = Way::copy;                 // in which its data gets to a receiver on this host
  WayTrial* trial = nullptr;           // the trial in which this message is timed until received,
  double posted_s = 0;                 // starting at this time
  double copied_s = 0;                 // if it receives: how long it copied, if that is timed
  std::uint32_t before = 0;            // parts of messages before it
  bool takes_parts = false;
  bool has_polled = false;  // for the next part, in vain
  bool is_queued = false;   // not begun when it was posted
  std::uint64_t seen = 0;   // if it receives: messages before this one are not for it
  unsigned looks = 0;       // number of unsuccessful looks, in `Mailbox::step`
  double began_s = 0;       // time of the first unsuccessful look
  double cut_off_s = 0;     // time when its peer was first seen without a connection
  bool was_gone = false;    // whether its peer was gone at the last look
  Trouble trouble = Trouble::none;
  StashedMessage* stashed = nullptr;  // the message that it takes, if that was taken in

  // Whether it has its envelope or message.
  bool has_begun() const { return slot >= 0 || stashed != nullptr; }
};

}  // namespace rallypoint
