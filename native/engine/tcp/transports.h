// The TCP transports of one group.
#pragma once

#include <vector>

#include "engine/tcp/late_connections.h"
#include "engine/tcp/peer_address.h"
#include "engine/transport.h"

namespace rallypoint::tcp {

std::vector<FarRank> ranks_of(const std::vector<PeerAddress>& peers);
// The transports take over the descriptors.
MakeTransports transports_to(std::vector<PeerAddress> peers);
// Connections are made on first need, except for control connections to `neighbours`.
MakeTransports late_transports_to(std::vector<PeerAddress> neighbours, LateMesh mesh);

}  // namespace rallypoint::tcp
