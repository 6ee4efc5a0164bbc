#include "engine/tcp/wire.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rallypoint::tcp {
namespace {

constexpr std::uint32_t kWireMagic = 0x57504C52;  // "RLPW"
constexpr std::size_t kMostBlocks = 8;            // from one connection, unless more are awaited,
constexpr std::size_t kMostLines = 1024;          // and small messages
constexpr std::size_t kMostFree = 64;
// Smaller payloads are copied, which is cheaper than waiting.
constexpr std::size_t kStraightBytes = 4096;
constexpr std::size_t kMostSpans = 64;  // of one system call

constexpr std::size_t kTogetherBytes = 512;  // smaller ones are quicker to copy than to list

// Copies all spans into one buffer, and so into one span.
std::size_t join(iovec* spans, std::size_t count, std::byte* buffer) {
  std::byte* end = buffer;
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(end, spans[i].iov_base, spans[i].iov_len);
    end += spans[i].iov_len;
  }
  spans[0] = {buffer, static_cast<std::size_t>(end - buffer)};
  return 1;
}

}  // namespace

class Wire::Reader {
 public:
  Reader(Wire& wire, Connection& connection) : wire_(wire), connection_(connection) {}

  std::byte* begin(const WireHeader& header) {
    if (header.magic != kWireMagic || header.lane >= kLanes || header.bytes > kBlockBytes ||
        header.sequence == 0) {
      return nullptr;
    }
    const std::size_t port = wire_.port(connection_.rank, header.lane);
    std::byte* target = place_of(header, port);
    Arrival& arrival = wire_.arrivals_[port].emplace_back();
    arrival.connection = &connection_;
    connection_.arriving = &arrival;
    Line& line = arrival.line;
    line.sequence.store(header.sequence, std::memory_order_relaxed);
    line.signature = header.signature;
    line.bytes = header.bytes;
    line.offset = kInline;
    if (header.bytes <= kInlineBytes) {
      ++connection_.lines;
      return line.payload;
    }
    if (target == nullptr) {
      arrival.block = wire_.take_block();
      ++connection_.blocks;
      target = arrival.block.get();
    }
    line.offset = reinterpret_cast<std::uint64_t>(target);
    return target;
  }

  void end(const WireHeader& header) {
    connection_.arriving->is_complete = true;
    Expected& expected = wire_.expected_[wire_.port(connection_.rank, header.lane)];
    if (expected.sequence == header.sequence) expected.sequence = 0;
  }

 private:
  // Where the operation that waits for this message wants it, if it does. Of two that claim to be
  // this message, only the first: the other could still be written when the operation has ended.
  std::byte* place_of(const WireHeader& header, std::size_t port) const {
    const Expected& expected = wire_.expected_[port];
    if (expected.sequence != header.sequence || expected.signature != header.signature ||
        expected.bytes != header.bytes || header.bytes < kStraightBytes) {
      return nullptr;
    }
    const bool is_known = std::ranges::any_of(wire_.arrivals_[port], [&](const Arrival& each) {
      return each.line.sequence.load(std::memory_order_relaxed) == header.sequence;
    });
    return is_known ? nullptr : expected.target;
  }

  Wire& wire_;
  Connection& connection_;
};

Wire::Wire(Region& region, const std::vector<PeerAddress>& peers,
           std::shared_ptr<LateConnections> late)
    : region_(region),
      poller_(region),
      first_(region.ranks()),
      streams_(region.ranks()),
      arrivals_(region.ranks() * kLanes),
      expected_(region.ranks() * kLanes),
      late_(std::move(late)) {
  for (const PeerAddress& peer : peers) add(peer.rank, peer.data);
}

void Wire::add(std::uint32_t rank, const std::vector<int>& fds) {
  first_[rank] = connections_.size();
  streams_[rank] = static_cast<std::uint32_t>(fds.size());
  for (const int fd : fds) {
    connections_.push_back(std::make_unique<Connection>(rank, connections_.size(), fd));
    if (const int error = poller_.add(fd); error != 0 && !failure_) {
      failure_ = exhausted(region_, error);
    }
  }
}

bool Wire::add_late() {
  if (late_ == nullptr) return false;
  const std::vector<LateConnections::Made> made = late_->take_data();
  for (const auto& [rank, fds] : made) add(rank, fds);
  return !made.empty();
}

bool Wire::send(std::uint32_t rank, const Message& message, std::span<const iovec> payload) {
  if (streams_[rank] == 0) [[unlikely]] {
    late_->want(rank);
    return false;
  }
  Connection& to = connection(rank, message.lane, message.sequence);
  if (!to.is_sending) {
    to.is_sending = true;
    to.sending = {kWireMagic, message.lane, message.sequence, message.signature, message.bytes};
    to.sent = 0;
  } else if (to.sending.lane != message.lane || to.sending.sequence != message.sequence) {
    return false;  // another message's turn
  }
  const std::size_t whole = sizeof(WireHeader) + message.bytes;
  while (to.sent < whole) {
    iovec spans[kMostSpans];
    std::size_t count = 0;
    std::size_t skip = to.sent;
    std::size_t wanted = 0;
    const auto add = [&](std::byte* base, std::size_t bytes) {
      const std::size_t skipped = std::min(skip, bytes);
      skip -= skipped;
      if (bytes == skipped || count == kMostSpans) return;
      spans[count++] = {base + skipped, bytes - skipped};
      wanted += bytes - skipped;
    };
    add(reinterpret_cast<std::byte*>(&to.sending), sizeof(WireHeader));
    for (const iovec& span : payload) add(static_cast<std::byte*>(span.iov_base), span.iov_len);
    std::byte together[kTogetherBytes];
    if (count > 1 && wanted <= sizeof together) count = join(spans, count, together);
    const std::size_t went = to.stream.write(spans, count);
    to.sent += went;
    if (went < wanted) break;
  }
  if (to.sent < whole) return false;
  to.is_sending = false;
  return true;
}

const Line* Wire::peek(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) const {
  for (const Arrival& arrival : arrivals_[port(rank, lane)]) {
    if (arrival.line.sequence.load(std::memory_order_relaxed) == sequence) {
      return arrival.is_complete ? &arrival.line : nullptr;
    }
  }
  return nullptr;
}

void Wire::expect(std::uint32_t rank, std::uint32_t lane, const Expected& message) {
  expected_[port(rank, lane)] = message;
  if (streams_[rank] == 0) [[unlikely]]
    return late_->want(rank);
  look_again(connection(rank, lane, message.sequence));
}

// If reading from a peer was stopped before a sleep, nothing reported its data any more.
void Wire::look_again(const Connection& from) {
  if (from.blocks + 1 < kMostBlocks && from.lines + 1 < kMostLines) return;
  poller_.set_interest(from.place, wants(from), false);
}

void Wire::release(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) {
  std::deque<Arrival>& arrivals = arrivals_[port(rank, lane)];
  for (Arrival& arrival : arrivals) {
    if (arrival.line.sequence.load(std::memory_order_relaxed) != sequence) continue;
    arrival.is_released = true;
    Connection& from = *arrival.connection;
    if (arrival.block != nullptr) {
      --from.blocks;
      if (free_.size() < kMostFree) free_.push_back(std::move(arrival.block));
      arrival.block.reset();
      look_again(from);
    } else if (arrival.line.offset == kInline) {
      --from.lines;
      look_again(from);
    }
    break;
  }
  while (!arrivals.empty() && arrivals.front().is_released) arrivals.pop_front();
}

std::unique_ptr<std::byte[]> Wire::take_block() {
  if (free_.empty()) return std::unique_ptr<std::byte[]>(new std::byte[kBlockBytes]);
  auto block = std::move(free_.back());
  free_.pop_back();
  return block;
}

bool Wire::is_awaited(const Connection& connection) const {
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
    if (expected_[port(connection.rank, lane)].sequence != 0) return true;
  }
  return false;
}

bool Wire::wants(const Connection& connection) const {
  return !connection.stream.has_ended() &&
         ((connection.blocks < kMostBlocks && connection.lines < kMostLines) ||
          is_awaited(connection));
}

bool Wire::poll() {
  bool moved = add_late();
  for (const std::size_t place : poller_.ready()) {
    Connection& from = *connections_[place];
    if (!wants(from) || (failure_ && failure_->rank == from.rank)) continue;
    const auto result = from.inlet.read(from.stream, Reader(*this, from));
    if (result == Inlet<WireHeader>::Result::corrupt && !failure_) {
      failure_ = Failure{from.rank, Trouble::corrupt};
    }
    moved |= result != Inlet<WireHeader>::Result::nothing;
  }
  return moved;
}

void Wire::arm() {
  for (std::size_t place = 0; place < connections_.size(); ++place) {
    const Connection& each = *connections_[place];
    const bool writes = each.is_sending && each.stream.is_open_for_writing();
    poller_.set_interest(place, wants(each), writes);
  }
  poller_.arm();
}

ConnectionState Wire::state(std::uint32_t rank) const {
  if (streams_[rank] == 0) return ConnectionState::none;
  for (std::uint32_t i = 0; i < streams_[rank]; ++i) {
    if (!connections_[first_[rank] + i]->stream.has_ended()) return ConnectionState::open;
  }
  return ConnectionState::ended;
}

void Wire::finish_writing() {
  add_late();
  for (auto& each : connections_) each->stream.finish_writing();
}

std::size_t Wire::unconfirmed() const {
  std::size_t bytes = 0;
  for (const auto& each : connections_) bytes += each->stream.unconfirmed();
  return bytes;
}

}  // namespace rallypoint::tcp
