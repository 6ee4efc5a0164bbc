// A transport within a process that behaves as badly as the contract permits (engine/transport.h):
// messages arrive in any order, and parts of a payload at any time; sends are accepted only now and
// then; places and answers come late. For engine_driver, which checks every result.
//
// Payloads of messages are taken in the call of `send` in which it returns true, and not before, so
// a caller that changes them too early is detected.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "engine/far_outbox.h"
#include "engine/transport.h"

namespace rallypoint::tests {

// What all ranks of a group share.
struct AdverseNetwork {
  struct Sent {
    std::uint32_t from;
    Message message;
    std::vector<std::byte> payload;
  };
  enum class Kind { envelope, request, part, taken };
  struct Letter {
    std::uint32_t from;
    Kind kind;
    int slot;
    Mail mail;
    std::vector<std::byte> payload;
  };

  AdverseNetwork(std::uint32_t ranks, unsigned seed)
      : regions(ranks), messages(ranks), letters(ranks), random(seed) {}

  bool toss() { return random() % 3 != 0; }
  void wake(std::uint32_t rank) const {
    if (regions[rank] != nullptr) regions[rank]->wake_self();
  }

  std::mutex mutex;
  std::vector<const Region*> regions;       // by rank; null: it has gone
  std::vector<std::vector<Sent>> messages;  // by receiver
  std::vector<std::deque<Letter>> letters;  // by receiver
  std::mt19937 random;
};

class AdverseMessages final : public MessageTransport {
 public:
  AdverseMessages(Region& region, std::shared_ptr<AdverseNetwork> network)
      : self_(region.rank()), network_(std::move(network)) {}

  bool send(std::uint32_t rank, const Message& message, std::span<const iovec> payload) override {
    const std::lock_guard lock(network_->mutex);
    if (!network_->toss()) {
      network_->wake(self_);
      return false;
    }
    AdverseNetwork::Sent sent{self_, message, {}};
    for (const iovec& span : payload) {
      const auto* const at = static_cast<const std::byte*>(span.iov_base);
      sent.payload.insert(sent.payload.end(), at, at + span.iov_len);
    }
    network_->messages[rank].push_back(std::move(sent));
    network_->wake(rank);
    return true;
  }

  const Line* peek(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) const override {
    for (const Arrival& each : arrivals_) {
      if (each.from == rank && each.lane == lane && each.line->sequence.load() == sequence) {
        return each.line.get();
      }
    }
    return nullptr;
  }
  void expect(std::uint32_t rank, std::uint32_t lane, const Expected& message) override {
    expected_[{rank, lane}] = message;
  }
  void release(std::uint32_t rank, std::uint32_t lane, std::uint64_t sequence) override {
    arrivals_.remove_if([&](const Arrival& each) {
      return each.from == rank && each.lane == lane && each.line->sequence.load() == sequence;
    });
  }

  // Delivers any one message.
  bool poll() override {
    const std::lock_guard lock(network_->mutex);
    auto& waiting = network_->messages[self_];
    if (waiting.empty()) return false;
    if (!network_->toss()) {
      network_->wake(self_);
      return false;
    }
    std::swap(waiting[network_->random() % waiting.size()], waiting.back());
    const AdverseNetwork::Sent sent = std::move(waiting.back());
    waiting.pop_back();
    take(sent);
    return true;
  }
  void arm() override {
    const std::lock_guard lock(network_->mutex);
    if (!network_->messages[self_].empty()) network_->wake(self_);
  }
  std::optional<Failure> failure() const override { return {}; }
  ConnectionState state(std::uint32_t) const override { return ConnectionState::open; }
  void finish_writing() override {}
  std::size_t unconfirmed() const override { return 0; }

 private:
  struct Arrival {
    std::uint32_t from;
    std::uint32_t lane;
    std::unique_ptr<Line> line;
    std::vector<std::byte> payload;
  };

  void take(const AdverseNetwork::Sent& sent) {
    Arrival& arrival = arrivals_.emplace_back(
        Arrival{sent.from, sent.message.lane, std::make_unique<Line>(), sent.payload});
    Line& line = *arrival.line;
    line.signature = sent.message.signature;
    line.bytes = sent.message.bytes;
    const Expected& expected = expected_[{sent.from, sent.message.lane}];
    std::byte* at = arrival.payload.data();
    const bool fits = expected.sequence == sent.message.sequence &&
                      expected.signature == sent.message.signature &&
                      expected.bytes == sent.message.bytes;
    if (fits && expected.target != nullptr && !sent.payload.empty()) {
      at = expected.target;
      std::memcpy(at, sent.payload.data(), sent.payload.size());
    }
    line.offset = reinterpret_cast<std::uint64_t>(at);
    if (sent.payload.size() <= kInlineBytes) {
      line.offset = kInline;
      std::copy(sent.payload.begin(), sent.payload.end(), line.payload);
    }
    line.sequence.store(sent.message.sequence);
  }

  const std::uint32_t self_;
  std::shared_ptr<AdverseNetwork> network_;
  std::list<Arrival> arrivals_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Expected> expected_;
};

class AdverseMail final : public MailTransport {
 public:
  AdverseMail(Region& region, std::shared_ptr<AdverseNetwork> network)
      : region_(region),
        self_(region.rank()),
        network_(std::move(network)),
        peers_(region.ranks()) {}

  int send(std::uint32_t to, const Mail& mail, const std::byte* payload) override {
    const std::lock_guard lock(network_->mutex);
    Peer& peer = peers_[to];
    const int slot = std::countr_one(peer.in_use);
    if (slot >= static_cast<int>(kEnvelopes) || !network_->toss()) {
      network_->wake(self_);
      return -1;
    }
    peer.in_use |= bit(slot);
    peer.requested &= ~bit(slot);
    peer.last_sent = mail.sequence;
    const std::size_t bytes = FarOutbox::is_small(mail.bytes) ? mail.bytes : 0;
    post(to, {self_, AdverseNetwork::Kind::envelope, slot, mail, {payload, payload + bytes}});
    return slot;
  }
  bool is_taken(std::uint32_t to, int slot) const override {
    return (peers_[to].in_use & bit(slot)) == 0;
  }
  bool is_requested(std::uint32_t to, int slot) const override {
    return (peers_[to].requested & bit(slot)) != 0;
  }
  std::uint64_t last_sent(std::uint32_t to) const override { return peers_[to].last_sent; }
  bool is_idle(std::uint32_t) const override { return true; }
  void send_part(std::uint32_t to, int slot, const std::byte* data, std::uint64_t bytes) override {
    const std::lock_guard lock(network_->mutex);
    post(to, {self_, AdverseNetwork::Kind::part, slot, {}, {data, data + bytes}});
  }

  void expect(std::uint32_t) override {}
  void request(std::uint32_t from, int slot, std::byte* target, std::uint64_t) override {
    const std::lock_guard lock(network_->mutex);
    peers_[from].landings[slot] = {target, 0};
    post(from, {self_, AdverseNetwork::Kind::request, slot, {}, {}});
  }
  std::uint64_t landed(std::uint32_t from, int slot) const override {
    return peers_[from].landings[slot].landed;
  }
  void take(std::uint32_t from, int slot) override {
    const std::lock_guard lock(network_->mutex);
    peers_[from].landings[slot] = {};
    post(from, {self_, AdverseNetwork::Kind::taken, slot, {}, {}});
  }

  // Delivers one letter: the oldest of any rank.
  bool poll() override {
    const std::lock_guard lock(network_->mutex);
    auto& waiting = network_->letters[self_];
    if (waiting.empty()) return false;
    if (!network_->toss()) {
      network_->wake(self_);
      return false;
    }
    const std::uint32_t from = waiting[network_->random() % waiting.size()].from;
    const auto oldest = std::ranges::find_if(
        waiting, [&](const AdverseNetwork::Letter& each) { return each.from == from; });
    const AdverseNetwork::Letter letter = std::move(*oldest);
    waiting.erase(oldest);
    open(letter);
    return true;
  }
  void arm() override {
    const std::lock_guard lock(network_->mutex);
    if (!network_->letters[self_].empty()) network_->wake(self_);
  }
  bool has_backlog() const override { return false; }
  std::optional<Failure> failure() const override { return failure_; }
  ConnectionState state(std::uint32_t) const override { return ConnectionState::open; }
  void finish_writing() override {}
  std::size_t unconfirmed() const override { return 0; }

 private:
  struct Landing {
    std::byte* target = nullptr;
    std::uint64_t landed = 0;
  };
  struct Peer {
    std::uint32_t in_use = 0;
    std::uint32_t requested = 0;
    std::uint64_t last_sent = 0;
    Landing landings[kEnvelopes];
  };

  static std::uint32_t bit(int slot) { return std::uint32_t{1} << slot; }

  void post(std::uint32_t to, AdverseNetwork::Letter letter) {
    network_->letters[to].push_back(std::move(letter));
    network_->wake(to);
  }
  void open(const AdverseNetwork::Letter& letter) {
    Peer& peer = peers_[letter.from];
    Landing& landing = peer.landings[letter.slot];
    switch (letter.kind) {
      case AdverseNetwork::Kind::envelope: {
        const FarOutbox outbox(region_, letter.from);
        std::byte* const target = outbox.begin(letter.slot, letter.mail);
        if (target == nullptr) {
          failure_ = Failure{letter.from, Trouble::corrupt};
          return;
        }
        std::ranges::copy(letter.payload, target);
        outbox.publish(letter.slot, letter.mail.sequence);
        break;
      }
      case AdverseNetwork::Kind::request:
        peer.requested |= bit(letter.slot);
        break;
      case AdverseNetwork::Kind::part:
        std::ranges::copy(letter.payload, landing.target + landing.landed);
        landing.landed += letter.payload.size();
        break;
      case AdverseNetwork::Kind::taken:
        peer.in_use &= ~bit(letter.slot);
        peer.requested &= ~bit(letter.slot);
        break;
    }
  }

  Region& region_;
  const std::uint32_t self_;
  std::shared_ptr<AdverseNetwork> network_;
  std::vector<Peer> peers_;  // by rank
  std::optional<Failure> failure_;
};

// Reports nothing: in these runs all goes well.
class AdverseMessenger final : public Messenger {
 public:
  AdverseMessenger(Region& region, std::shared_ptr<AdverseNetwork> network)
      : self_(region.rank()), network_(std::move(network)) {
    const std::lock_guard lock(network_->mutex);
    network_->regions[self_] = &region;
  }
  ~AdverseMessenger() override {
    const std::lock_guard lock(network_->mutex);
    network_->regions[self_] = nullptr;
  }
  void spread(const Poison&) override {}
  void ask(std::uint32_t, std::uint64_t) override {}
  void answer(std::uint64_t) override {}
  void send_probe(std::uint32_t, std::uint32_t, const Probe&) override {}
  std::vector<Probe> take_probes() override { return {}; }
  void leave() override {}

 private:
  const std::uint32_t self_;
  std::shared_ptr<AdverseNetwork> network_;
};

inline MakeTransports adverse_transports(const std::shared_ptr<AdverseNetwork>& network) {
  return [network](Region& region) {
    return Transports{std::make_unique<AdverseMessenger>(region, network),
                      std::make_unique<AdverseMessages>(region, network),
                      std::make_unique<AdverseMail>(region, network)};
  };
}

}  // namespace rallypoint::tests
