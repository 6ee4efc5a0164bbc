// The transports over TCP of one group.
#pragma once

#include <vector>

#include "engine/tcp/peer_address.h"
#include "engine/transport.h"

namespace rallypoint::tcp {

std::vector<FarRank> ranks_of(const std::vector<PeerAddress>& peers);
// The descriptors are taken over by what is made.
MakeTransports transports_to(std::vector<PeerAddress> peers);

}  // namespace rallypoint::tcp
