#include "engine/tcp/courier.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace rallypoint::tcp {
namespace {

constexpr std::uint32_t kMailMagic = 0x4D504C52;  // "RLPM"
constexpr int kMostUntold = 8;                    // places that are free again but not yet reported

std::uint32_t bit(int slot) { return std::uint32_t{1} << slot; }

}  // namespace

class Courier::Reader {
 public:
  Reader(Courier& courier, Peer& peer) : courier_(courier), peer_(peer) {}

  std::byte* begin(const MailHeader& header) {
    if (header.magic != kMailMagic || header.slot >= kEnvelopes) return nullptr;
    if ((header.taken & ~peer_.in_use) != 0) return nullptr;
    peer_.in_use &= ~header.taken;
    peer_.requested &= ~header.taken;
    switch (header.kind) {
      case MailKind::envelope:
        return outbox().begin(header.slot, {header.sequence, header.number, header.bytes,
                                            header.tag, header.dtype, header.is_synchronous != 0});
      case MailKind::request:
        if ((peer_.in_use & bit(header.slot)) == 0) return nullptr;
        peer_.requested |= bit(header.slot);
        return nothing();
      case MailKind::part: {
        const Landing& landing = peer_.landings[header.slot];
        const bool fits = landing.target != nullptr && header.bytes > 0 &&
                          header.bytes <= landing.bytes - landing.landed;
        return fits ? landing.target + landing.landed : nullptr;
      }
      case MailKind::taken:
        return nothing();
    }
    return nullptr;
  }

  void end(const MailHeader& header) {
    if (header.kind == MailKind::part) {
      peer_.landings[header.slot].landed += header.bytes;
    } else if (header.kind == MailKind::envelope) {
      outbox().publish(header.slot, header.sequence);
    }
  }

 private:
  static std::byte* nothing() {
    static std::byte none;
    return &none;
  }
  FarOutbox outbox() const { return {courier_.region_, peer_.rank}; }

  Courier& courier_;
  Peer& peer_;
};

Courier::Courier(Region& region, const std::vector<PeerAddress>& peers,
                 std::shared_ptr<LateConnections> late)
    : region_(region), poller_(region), places_(region.ranks(), kNone), late_(std::move(late)) {
  for (const PeerAddress& address : peers) {
    if (address.mail >= 0) add(address.rank, address.mail);
  }
}

void Courier::add(std::uint32_t rank, int fd) {
  places_[rank] = peers_.size();
  peers_.push_back(std::make_unique<Peer>(rank, fd));
  if (const int error = poller_.add(fd); error != 0 && !failure_) {
    failure_ = exhausted(region_, error);
  }
}

bool Courier::add_late() {
  if (late_ == nullptr) return false;
  const std::vector<LateConnections::Made> made = late_->take_mail();
  for (const auto& [rank, fds] : made) add(rank, fds[0]);
  return !made.empty();
}

int Courier::send(std::uint32_t to, const Mail& mail, const std::byte* payload) {
  if (!is_connected(to)) [[unlikely]] {
    late_->want(to);
    return -1;
  }
  Peer& receiver = peer(to);
  const int slot = std::countr_one(receiver.in_use);
  if (slot >= static_cast<int>(kEnvelopes)) return -1;
  receiver.in_use |= bit(slot);
  receiver.requested &= ~bit(slot);
  receiver.last_sent = mail.sequence;
  MailHeader envelope{};
  envelope.kind = MailKind::envelope;
  envelope.slot = static_cast<std::uint8_t>(slot);
  envelope.is_synchronous = mail.is_synchronous;
  envelope.dtype = mail.dtype;
  envelope.sequence = mail.sequence;
  envelope.number = mail.number;
  envelope.bytes = mail.bytes;
  envelope.tag = mail.tag;
  put(receiver, envelope, payload, true);
  return slot;
}

bool Courier::is_taken(std::uint32_t to, int slot) const {
  return (peer(to).in_use & bit(slot)) == 0;
}

bool Courier::is_requested(std::uint32_t to, int slot) const {
  return (peer(to).requested & bit(slot)) != 0;
}

bool Courier::is_idle(std::uint32_t to) const { return peer(to).unsent.empty(); }

void Courier::send_part(std::uint32_t to, int slot, const std::byte* data, std::uint64_t bytes) {
  MailHeader header{};
  header.kind = MailKind::part;
  header.slot = static_cast<std::uint8_t>(slot);
  header.bytes = bytes;
  put(peer(to), header, data, false);
}

void Courier::request(std::uint32_t from, int slot, std::byte* target, std::uint64_t bytes) {
  peer(from).landings[slot] = {target, bytes, 0};
  MailHeader header{};
  header.kind = MailKind::request;
  header.slot = static_cast<std::uint8_t>(slot);
  put(peer(from), header, nullptr, false);
}

std::uint64_t Courier::landed(std::uint32_t from, int slot) const {
  return peer(from).landings[slot].landed;
}

void Courier::take(std::uint32_t from, int slot) {
  Peer& sender = peer(from);
  sender.landings[slot] = {};
  sender.taken |= bit(slot);
  const Layout& layout = region_.layout();
  const Envelope& envelope = region_.at<Envelope>(from, layout.envelopes(from))[slot];
  if (!envelope.is_synchronous && std::popcount(sender.taken) < kMostUntold) return;
  MailHeader header{};
  header.kind = MailKind::taken;
  put(sender, header, nullptr, false);
}

// Data that the stream does not accept at once waits; the caller's memory waits with it only if it
// stays valid.
void Courier::put(Peer& to, MailHeader header, const std::byte* data, bool copies) {
  header.magic = kMailMagic;
  header.taken = std::exchange(to.taken, 0);
  to.unsent.push_back({header, data, {}, 0});
  backlog_.fetch_add(1, std::memory_order_release);
  flush(to);
  if (to.unsent.empty() || !copies || header.payload() == 0) return;
  Frame& last = to.unsent.back();
  last.own.assign(data, data + header.payload());
  last.data = last.own.data();
}

bool Courier::flush(Peer& to) {
  bool moved = false;
  while (!to.unsent.empty()) {
    Frame& frame = to.unsent.front();
    const std::size_t bytes = frame.header.payload();
    const std::size_t header_sent = std::min(frame.sent, sizeof(MailHeader));
    const std::size_t data_sent = frame.sent - header_sent;
    const iovec spans[2] = {
        {reinterpret_cast<std::byte*>(&frame.header) + header_sent,
         sizeof(MailHeader) - header_sent},
        {const_cast<std::byte*>(frame.data) + data_sent, bytes - data_sent},
    };
    const std::size_t count = to.stream.write(spans, bytes > data_sent ? 2 : 1);
    frame.sent += count;
    moved |= count > 0;
    if (to.stream.is_open_for_writing() && frame.sent < sizeof(MailHeader) + bytes) break;
    to.unsent.pop_front();  // also those that can never be sent any more
    backlog_.fetch_sub(1, std::memory_order_release);
  }
  return moved;
}

bool Courier::poll() {
  bool moved = add_late();
  if (has_backlog()) {
    for (auto& to : peers_) moved |= flush(*to);
  }
  for (const std::size_t place : poller_.ready()) {
    Peer& from = *peers_[place];
    if (from.stream.has_ended() || (failure_ && failure_->rank == from.rank)) continue;
    const auto result = from.inlet.read(from.stream, Reader(*this, from));
    if (result == Inlet<MailHeader>::Result::corrupt && !failure_) {
      failure_ = Failure{from.rank, Trouble::corrupt};
    }
    moved |= result != Inlet<MailHeader>::Result::nothing;
  }
  return moved;
}

void Courier::arm() {
  for (std::size_t place = 0; place < peers_.size(); ++place) {
    const Peer& each = *peers_[place];
    poller_.set_interest(place, !each.stream.has_ended(), !each.unsent.empty());
  }
  poller_.arm();
}

ConnectionState Courier::state(std::uint32_t rank) const {
  if (!is_connected(rank)) return ConnectionState::none;
  return peer(rank).stream.has_ended() ? ConnectionState::ended : ConnectionState::open;
}

void Courier::finish_writing() {
  if (late_ != nullptr) late_->close();
  add_late();  // those that have been made, but not taken: their peers wait for their end, too
  for (auto& each : peers_) each->stream.finish_writing();
}

std::size_t Courier::unconfirmed() const {
  std::size_t bytes = 0;
  for (const auto& each : peers_) bytes += each->stream.unconfirmed();
  return bytes;
}

}  // namespace rallypoint::tcp
