// A rank on another host, as this one is connected with it.
#pragma once

#include <cstdint>
#include <vector>

namespace rallypoint::tcp {

struct PeerAddress {
  std::uint32_t rank;
  std::int32_t pid;       // on its host
  int control;            // descriptors of connections, taken over
  int mail;               // for sends and receives
  std::vector<int> data;  // for collectives
};

}  // namespace rallypoint::tcp
