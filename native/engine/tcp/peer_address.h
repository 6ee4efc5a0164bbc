// A rank, and its connections with this one when a group begins.
#pragma once

#include <cstdint>
#include <vector>

namespace rallypoint::tcp {

// What a connection is for.
inline constexpr std::uint32_t kControl = 0;
inline constexpr std::uint32_t kMail = 1;
inline constexpr std::uint32_t kData = 2;  // and above: one for each stream

struct PeerAddress {
  std::uint32_t rank;
  std::int32_t pid;       // on its host
  int control;            // descriptors of connections, taken over; -1: there is none yet
  int mail;               // for sends and receives
  std::vector<int> data;  // for collectives
};

}  // namespace rallypoint::tcp
