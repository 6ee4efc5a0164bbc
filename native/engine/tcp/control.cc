#include "engine/tcp/control.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <utility>

namespace rallypoint::tcp {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers on the wire are little-endian");

constexpr std::uint32_t kControlMagic = 0x43504C52;  // "RLPC"
constexpr std::size_t kMostProbes = 64;              // that nobody has examined
// The last two carry another rank's number: it has left, or is lost.
enum Kind : std::uint16_t { kLeft = 1, kPoison, kQuestion, kRecord, kProbe, kHasLeft, kIsLost };

struct RecordFrame {
  std::uint64_t number;
  std::uint64_t signature;
  std::uint64_t count;
  std::int32_t collective;
  std::int32_t reduce_op;
  std::int32_t dtype;
  std::int32_t root;
};

struct PoisonFrame {
  std::uint32_t trouble;
  std::int32_t culprit;
  std::int32_t reporter;
  std::uint32_t circle_size;
  std::uint64_t sent;
  std::uint64_t expected;
  double timeout_s;
  RecordFrame theirs;
  RecordFrame ours;
  CircleMember circle[kMostInCircle];
};

RecordFrame packed(const CallRecord& record) {
  return {record.number.load(std::memory_order_acquire),
          record.signature.load(std::memory_order_relaxed),
          record.count,
          record.collective,
          record.reduce_op,
          record.dtype,
          record.root};
}

void unpack(CallRecord& record, const RecordFrame& frame) {
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.signature.store(frame.signature, std::memory_order_relaxed);
  record.count = frame.count;
  record.collective = frame.collective;
  record.reduce_op = frame.reduce_op;
  record.dtype = frame.dtype;
  record.root = frame.root;
  record.number.store(frame.number, std::memory_order_release);
}

// Whether the record can be described in words.
bool makes_sense(const RecordFrame& frame, std::uint32_t ranks) {
  if (frame.number == 0) return true;
  const auto most = static_cast<std::int32_t>(ranks);
  return frame.collective >= -1 && frame.collective < 256 && frame.dtype >= 0 &&
         frame.dtype < static_cast<std::int32_t>(kDTypes) && frame.reduce_op >= -1 &&
         frame.reduce_op < std::max(most, static_cast<std::int32_t>(kReduceOps));
}

}  // namespace

struct Control::ProbeFrame {
  std::uint64_t sequence;
  std::int32_t slot;
  std::uint32_t to;
  std::uint64_t count;
  CircleMember members[kMostProbed];

  static std::size_t bytes(std::size_t count) {
    return offsetof(ProbeFrame, members) + count * sizeof(CircleMember);
  }
};

class Control::Reader {
 public:
  Reader(Control& control, Peer& peer) : control_(control), peer_(peer) {}
  std::byte* begin(const ControlHeader& header) {
    const bool is_good = header.magic == kControlMagic && header.bytes <= kMostBytes;
    return is_good ? peer_.payload : nullptr;
  }
  void end(const ControlHeader& header) { is_good_ = is_good_ && control_.take(peer_, header); }
  bool is_good() const { return is_good_; }

 private:
  Control& control_;
  Peer& peer_;
  bool is_good_ = true;
};

Control::Control(Region& region, const std::vector<PeerAddress>& peers, bool sparse)
    : region_(region), is_sparse_(sparse), is_gone_(region.ranks()) {
  for (const auto& peer : peers) {
    if (peer.control >= 0) peers_.push_back(std::make_unique<Peer>(peer.rank, peer.control));
  }
  try {
    for (auto& peer : peers_) peer->key = Watcher::instance().add(peer->stream.fd(), *this, false);
  } catch (const std::system_error&) {
    unwatch();
    throw;
  }
}

Control::~Control() { unwatch(); }

void Control::unwatch() {
  for (auto& peer : peers_) Watcher::instance().remove(peer->stream.fd(), peer->key);
}

int Control::add(std::uint32_t rank, int fd) {
  const std::lock_guard lock(mutex_);
  auto& peer = *peers_.emplace_back(std::make_unique<Peer>(rank, fd));
  peer.is_neighbour = false;
  peer.key = Watcher::instance().add_within(fd, *this);
  const int error = peer.key == 0 ? errno : 0;
  if (has_left_) peer.stream.finish_writing();
  return error;
}

void Control::on_ready(int fd, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  for (auto& peer : peers_) {
    if (peer->stream.fd() != fd || !peer->is_watched) continue;
    flush(*peer);
    Reader reader(*this, *peer);
    using Result = Inlet<ControlHeader>::Result;
    Result result = Result::moved;
    while (result == Result::moved) result = peer->inlet.read(peer->stream, reader);
    if (result == Result::corrupt || !reader.is_good() || peer->stream.has_ended()) {
      lose(*peer, key);
    }
  }
}

// The peer's connection has ended, or what arrives over it is invalid.
void Control::lose(Peer& peer, std::uint64_t key) {
  peer.is_watched = false;
  Watcher::instance().forget(peer.stream.fd(), key);
  if (is_gone_[peer.rank]) return;
  is_gone_[peer.rank] = true;
  if (has_left_ || region_.presence(peer.rank) != Presence::here) return;
  region_.lose(peer.rank);
  pass_on(peer, kIsLost, peer.rank, nullptr, 0);
}

// News for ranks that are not all connected goes from neighbour to neighbour, once from each.
void Control::pass_on(const Peer& from, std::uint16_t kind, std::uint64_t number, const void* data,
                      std::size_t bytes) {
  if (!is_sparse_ || has_left_) return;
  for (auto& peer : peers_) {
    if (peer.get() == &from || !peer->is_neighbour || is_gone_[peer->rank]) continue;
    tell(*peer, kind, number, data, bytes);
  }
}

bool Control::take_news(const Peer& peer, const ControlHeader& header) {
  const std::uint64_t rank = header.number;
  if (header.bytes != 0 || rank >= region_.ranks()) return false;
  if (rank == region_.rank() || is_gone_[rank]) return true;
  is_gone_[rank] = true;
  const bool is_here = region_.presence(static_cast<std::uint32_t>(rank)) == Presence::here;
  if (header.kind == kIsLost) {
    if (is_here && !has_left_) region_.lose(static_cast<std::uint32_t>(rank));
  } else if (region_.is_far(static_cast<std::uint32_t>(rank))) {  // others report it themselves
    region_.state(static_cast<std::uint32_t>(rank))
        .presence.store(static_cast<std::uint32_t>(Presence::left), std::memory_order_release);
    region_.wake_self();
  }
  pass_on(peer, header.kind, rank, nullptr, 0);
  return true;
}

bool Control::take(Peer& peer, const ControlHeader& header) {
  switch (header.kind) {
    case kLeft:
      return take_news(peer, {header.magic, kHasLeft, 0, peer.rank});
    case kHasLeft:
    case kIsLost:
      return is_sparse_ && take_news(peer, header);
    case kPoison:
      return header.bytes == sizeof(PoisonFrame) && take_poison(peer);
    case kQuestion:
      peer.asked = header.number + 1;
      is_asked_.store(true);
      tell_record(peer, header.number);
      return true;
    case kRecord:
      return header.bytes == sizeof(RecordFrame) && take_record(peer, header);
    case kProbe:
      return take_probe(peer, header);
    default:
      return false;
  }
}

bool Control::take_probe(const Peer& peer, const ControlHeader& header) {
  static_assert(sizeof(ProbeFrame) <= kMostBytes);
  ProbeFrame frame{};
  if (header.bytes > sizeof frame) return false;
  std::memcpy(&frame, peer.payload, header.bytes);
  if (frame.count == 0 || frame.count > kMostProbed ||
      header.bytes != ProbeFrame::bytes(frame.count)) {
    return false;
  }
  const std::vector<CircleMember> members(frame.members, frame.members + frame.count);
  for (const CircleMember& member : members) {
    if (member.rank >= region_.ranks() || member.peer >= region_.ranks()) return false;
  }
  if (members.back().peer != frame.to) return false;
  if (frame.to != region_.rank()) {  // from one rank of its host to another
    tell_probe(frame.to, frame, header.number);
    return true;
  }
  if (probes_.size() == kMostProbes) probes_.erase(probes_.begin());
  probes_.push_back({header.number, frame.sequence, frame.slot, members});
  region_.wake_self();
  return true;
}

void Control::send_probe(std::uint32_t via, std::uint32_t rank, const Probe& probe) {
  ProbeFrame frame{probe.sequence, probe.slot, rank, probe.members.size(), {}};
  std::copy(probe.members.begin(), probe.members.end(), frame.members);
  const std::lock_guard lock(mutex_);
  tell_probe(via, frame, probe.epoch);
}

void Control::tell_probe(std::uint32_t via, const ProbeFrame& frame, std::uint64_t epoch) {
  for (auto& peer : peers_) {
    if (peer->rank == via) tell(*peer, kProbe, epoch, &frame, ProbeFrame::bytes(frame.count));
  }
}

std::vector<Probe> Control::take_probes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(probes_, {});
}

bool Control::take_poison(const Peer& peer) {
  PoisonFrame frame;
  std::memcpy(&frame, peer.payload, sizeof frame);
  const auto ranks = static_cast<std::int32_t>(region_.ranks());
  const auto is_rank = [&](std::int32_t rank) { return rank >= 0 && rank < ranks; };
  bool is_good = frame.trouble > 0 && frame.trouble < kTroubles && is_rank(frame.culprit) &&
                 is_rank(frame.reporter) && frame.circle_size <= region_.ranks() &&
                 makes_sense(frame.theirs, region_.ranks()) &&
                 makes_sense(frame.ours, region_.ranks());
  const std::uint32_t members = std::min(frame.circle_size, kMostInCircle);
  for (std::uint32_t i = 0; i < members; ++i) {
    is_good =
        is_good && frame.circle[i].rank < region_.ranks() && frame.circle[i].peer < region_.ranks();
  }
  if (!is_good) return false;
  Poison poison{};
  const Blame blame{static_cast<Trouble>(frame.trouble), static_cast<std::uint32_t>(frame.culprit),
                    static_cast<std::uint32_t>(frame.reporter)};
  poison.blame.store(blame.packed(), std::memory_order_relaxed);
  poison.sent = frame.sent;
  poison.expected = frame.expected;
  poison.timeout_s = frame.timeout_s;
  unpack(poison.theirs, frame.theirs);
  unpack(poison.ours, frame.ours);
  poison.circle_size = frame.circle_size;
  std::copy_n(frame.circle, kMostInCircle, poison.circle);
  region_.adopt(poison);
  if (!std::exchange(has_passed_poison_on_, true)) pass_on(peer, kPoison, 0, &frame, sizeof frame);
  return true;
}

// It is stored where a rank of this host would have written it.
bool Control::take_record(const Peer& peer, const ControlHeader& header) {
  RecordFrame frame;
  std::memcpy(&frame, peer.payload, sizeof frame);
  if (frame.number != header.number + 1 || !makes_sense(frame, region_.ranks())) return false;
  unpack(region_.calls(peer.rank)[header.number % kCalls], frame);
  region_.wake_self();
  return true;
}

void Control::spread(const Poison& poison) {
  PoisonFrame frame{};
  const Blame blame = Blame::unpacked(poison.blame.load(std::memory_order_relaxed));
  frame.trouble = static_cast<std::uint32_t>(blame.trouble);
  frame.culprit = static_cast<std::int32_t>(blame.culprit);
  frame.reporter = static_cast<std::int32_t>(blame.reporter);
  frame.sent = poison.sent;
  frame.expected = poison.expected;
  frame.timeout_s = poison.timeout_s;
  frame.theirs = packed(poison.theirs);
  frame.ours = packed(poison.ours);
  frame.circle_size = poison.circle_size;
  std::copy_n(poison.circle, kMostInCircle, frame.circle);
  const std::lock_guard lock(mutex_);
  has_passed_poison_on_ = true;
  for (auto& peer : peers_) tell(*peer, kPoison, 0, &frame, sizeof frame);
}

void Control::ask(std::uint32_t rank, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (auto& peer : peers_) {
    if (peer->rank != rank || peer->asks_for == number + 1) continue;
    peer->asks_for = number + 1;
    tell(*peer, kQuestion, number, nullptr, 0);
  }
}

// We have just called the operation of this number.
void Control::answer(std::uint64_t number) {
  if (!is_asked_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  is_asked_.store(false);
  for (auto& peer : peers_) {
    if (peer->asked != 0) tell_record(*peer, peer->asked - 1);
    if (peer->asked > number + 1) is_asked_.store(true);
  }
}

void Control::tell_record(Peer& peer, std::uint64_t number) {
  const CallRecord& record = region_.calls(region_.rank())[number % kCalls];
  const RecordFrame frame = packed(record);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (frame.number != number + 1 || record.number.load(std::memory_order_relaxed) != number + 1) {
    return;  // not called yet; or so long ago that nobody waits for it any more
  }
  peer.asked = 0;
  tell(peer, kRecord, number, &frame, sizeof frame);
}

void Control::leave() {
  const std::lock_guard lock(mutex_);
  if (has_left_) return;
  has_left_ = true;
  for (auto& peer : peers_) {
    tell(*peer, kLeft, 0, nullptr, 0);
    if (peer->unsent.empty()) peer->stream.finish_writing();
  }
}

void Control::tell(Peer& peer, std::uint16_t kind, std::uint64_t number, const void* data,
                   std::size_t bytes) {
  const ControlHeader header{kControlMagic, kind, static_cast<std::uint16_t>(bytes), number};
  peer.unsent.append(reinterpret_cast<const char*>(&header), sizeof header);
  if (bytes > 0) peer.unsent.append(static_cast<const char*>(data), bytes);
  flush(peer);
}

void Control::flush(Peer& peer) {
  while (!peer.unsent.empty()) {
    const iovec span{peer.unsent.data(), peer.unsent.size()};
    const std::size_t count = peer.stream.write(&span, 1);
    if (!peer.stream.is_open_for_writing()) peer.unsent.clear();
    if (count == 0) return;
    peer.unsent.erase(0, count);
  }
}

}  // namespace rallypoint::tcp
