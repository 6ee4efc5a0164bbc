#include "engine/channel.h"

#include <algorithm>

namespace rallypoint {
std::byte* Ring::take(std::size_t bytes, const Occupant& occupant, std::uint32_t& blocker) {
  const std::uint64_t needed = (bytes + 63) / 64 * 64;
  std::uint64_t start = tail_;
  std::uint64_t lap = lap_bytes(needed);
  if (start % kRingBytes > 0) {
    lap = std::max(lap, lap_);
    if (start % kRingBytes + needed > lap) {
      start += kRingBytes - start % kRingBytes;
      lap = lap_bytes(needed);
    }
  }
  while (start + needed - head_ > kRingBytes) {
    if (pieces_.empty()) {
      head_ = start;
      break;
    }
    const Piece& oldest = pieces_.front();
    if (!oldest.occupant.channel->is_taken(oldest.occupant, blocker)) return nullptr;
    head_ = oldest.end;
    pieces_.pop_front();
  }
  tail_ = start + needed;
  lap_ = lap;
  pieces_.push_back({tail_, occupant});
  return base_ + start % kRingBytes;
}

Channel Channel::collective(Region& region, std::deque<Ring>& rings, MessageTransport* wire) {
  Channel channel;
  channel.region_ = &region;
  channel.wire_ = wire;
  channel.self_ = region.rank();
  channel.lines_ = kLines;
  const Layout& layout = region.layout();
  for (std::uint32_t rank = 0; rank < region.ranks(); ++rank) {
    channel.members_.push_back(rank);
    channel.calls_.push_back(region.calls(rank));
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      Port port{region.at<Line>(rank, layout.lines(rank)) + lane * kLines,
                region.at<std::byte>(rank, layout.rings(rank)) + lane * kRingBytes,
                region.at<Progress>(rank, layout.progress(rank)) + lane};
      if (region.is_far(rank)) port = {};
      channel.ports_.push_back(port);
    }
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) channel.rings_.push_back(&rings[lane]);
  channel.occupants_.resize(kLanes * kLines);
  channel.seen_.resize(region.ranks() * kLanes);
  return channel;
}

bool Channel::is_taken(const Occupant& occupant, std::uint32_t& blocker) const {
  for (const Receiver& receiver : *occupant.receivers) {
    const Port& port = ports_[receiver.rank * kLanes + receiver.lane];
    if (port.progress->value.load(std::memory_order_acquire) < progress_of(occupant, receiver)) {
      blocker = members_[receiver.rank];
      return false;
    }
  }
  return true;
}

}  // namespace rallypoint
