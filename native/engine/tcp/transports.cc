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
    return Transports{std::make_unique<Control>(region, peers, false),
                      std::make_unique<Wire>(region, peers),
                      std::make_unique<Courier>(region, peers)};
  };
}

MakeTransports late_transports_to(std::vector<PeerAddress> neighbours, LateMesh mesh) {
  return [neighbours = std::move(neighbours), mesh = std::move(mesh)](Region& region) {
    auto control = std::make_unique<Control>(region, neighbours, true);
    std::vector<std::uint32_t> controlled;
    for (const PeerAddress& each : neighbours) controlled.push_back(each.rank);
    const auto late = std::make_shared<LateConnections>(region, *control, mesh, controlled);
    return Transports{std::move(control),
                      std::make_unique<Wire>(region, std::vector<PeerAddress>{}, late),
                      std::make_unique<Courier>(region, std::vector<PeerAddress>{}, late)};
  };
}

}  // namespace rallypoint::tcp
