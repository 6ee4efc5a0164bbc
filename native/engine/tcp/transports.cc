#include "engine/tcp/transports.h"

#include <utility>

#include "engine/tcp/control.h"
#include "engine/tcp/courier.h"
#include "engine/tcp/wire.h"

namespace rallypoint::tcp {

std::vector<FarRank> ranks_of(const std::vector<PeerAddress>& peers) {
  std::vector<FarRank> ranks;
  for (const PeerAddress& peer : peers) ranks.push_back({peer.rank, peer.pid});
  return ranks;
}

MakeTransports transports_to(std::vector<PeerAddress> peers) {
  return [peers = std::move(peers)](Region& region) {
    return Transports{std::make_unique<Control>(region, peers),
                      std::make_unique<Wire>(region, peers),
                      std::make_unique<Courier>(region, peers)};
  };
}

}  // namespace rallypoint::tcp
