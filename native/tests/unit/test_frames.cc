// Messages between hosts, over a socket that splits bytes anywhere.

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "engine/tcp/control.h"
#include "engine/tcp/wire.h"
#include "tests/unit/cases.h"
#include "tests/unit/regions.h"

namespace {

using namespace rallypoint;

// A rank's end of some connections with one peer, whose ends are plain sockets.
class Connected {
 public:
  explicit Connected(unsigned streams = 1) : memory_(2), region_(memory_.fd(), 0, 2, {1}) {
    tcp::PeerAddress address{1, getpid(), -1, -1, {}};
    for (unsigned i = 0; i < streams; ++i) {
      int fds[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
        std::abort();
      }
      address.data.push_back(fds[0]);
      peers_.push_back(fds[1]);
    }
    wire_.emplace(region_, std::vector{address});
  }
  ~Connected() {
    for (const int fd : peers_) close(fd);
  }
  Connected(const Connected&) = delete;
  Connected& operator=(const Connected&) = delete;

  tcp::Wire& wire() { return *wire_; }
  // How many of the bytes the socket took.
  std::size_t write(const std::string& bytes, unsigned stream = 0) {
    const ssize_t count = ::write(peers_[stream], bytes.data(), bytes.size());
    return count < 0 ? 0 : static_cast<std::size_t>(count);
  }
  std::string read(unsigned stream = 0) {
    std::string bytes(1 << 20, '\0');
    const ssize_t count = ::read(peers_[stream], bytes.data(), bytes.size());
    bytes.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
    return bytes;
  }
  void poll() {
    while (wire_->poll()) {
    }
  }

 private:
  tests::Memory memory_;
  Region region_;
  std::vector<int> peers_;  // by stream
  std::optional<tcp::Wire> wire_;
};

std::string payload(std::size_t bytes, unsigned char first) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(first + i * 7);
  return text;
}

// What a peer writes to send it.
std::string frame(std::uint32_t lane, std::uint64_t sequence, const std::string& content) {
  Connected sender;
  const Message message{lane, sequence, 42, content.size()};
  iovec span{const_cast<char*>(content.data()), content.size()};
  std::string bytes;
  bool is_sent = false;
  while (!is_sent) {
    is_sent = sender.wire().send(1, message, {&span, 1});
    bytes += sender.read();
  }
  return bytes;
}

std::string content_of(const Line& line) {
  const auto* at = line.offset == kInline ? reinterpret_cast<const char*>(line.payload)
                                          : reinterpret_cast<const char*>(line.offset);
  return {at, line.bytes};
}

CASE(frames_arrive_however_they_are_cut) {
  const std::array<std::string, 3> contents{payload(kInlineBytes, 1), payload(300, 2),
                                            payload(0, 3)};
  std::string all;
  for (std::uint64_t i = 0; i < contents.size(); ++i) all += frame(1, i + 1, contents[i]);
  for (std::size_t cut = 0; cut <= all.size(); ++cut) {
    Connected receiver;
    receiver.write(all.substr(0, cut));
    receiver.poll();
    receiver.write(all.substr(cut));
    receiver.poll();
    for (std::uint64_t i = 0; i < contents.size(); ++i) {
      const Line* line = receiver.wire().peek(1, 1, i + 1);
      CHECK(line != nullptr);
      if (line == nullptr) return;
      CHECK(content_of(*line) == contents[i]);
      CHECK_EQUAL(line->signature, 42U);
      receiver.wire().release(1, 1, i + 1);
      CHECK(receiver.wire().peek(1, 1, i + 1) == nullptr);
    }
  }
}

CASE(a_message_is_not_there_before_its_last_byte) {
  const std::string bytes = frame(0, 1, payload(200, 9));
  Connected receiver;
  receiver.write(bytes.substr(0, bytes.size() - 1));
  receiver.poll();
  CHECK(receiver.wire().peek(1, 0, 1) == nullptr);
  receiver.write(bytes.substr(bytes.size() - 1));
  receiver.poll();
  CHECK(receiver.wire().peek(1, 0, 1) != nullptr);
}

CASE(a_large_message_that_is_awaited_goes_straight_to_its_place) {
  const std::string content = payload(100'000, 5);
  for (const std::uint64_t signature : {42, 43}) {
    Connected receiver;
    std::vector<std::byte> target(content.size());
    receiver.wire().expect(1, 2, {1, signature, target.data(), target.size()});
    const std::string bytes = frame(2, 1, content);
    for (std::size_t at = 0; at < bytes.size();) {
      at += receiver.write(bytes.substr(at, 30'000));
      receiver.poll();
    }
    const Line* line = receiver.wire().peek(1, 2, 1);
    CHECK(line != nullptr);
    if (line == nullptr) return;
    CHECK(content_of(*line) == content);
    // Not there if it belongs to another call than the one that waits.
    const bool is_there = line->offset == reinterpret_cast<std::uint64_t>(target.data());
    CHECK_EQUAL(is_there, signature == 42);
  }
}

CASE(who_has_taken_in_enough_stops_reading_until_it_is_needed) {
  Connected receiver;
  const std::string content = payload(10'000, 1);
  // More than it takes in unasked; the socket holds the rest.
  std::uint64_t sent = 0;
  for (; sent < 12; ++sent) receiver.write(frame(0, sent + 1, content));
  receiver.poll();
  std::uint64_t taken = 0;
  while (receiver.wire().peek(1, 0, taken + 1) != nullptr) ++taken;
  CHECK(taken >= 8);
  // A poll may read several frames at once; but once it is full, a poll reads nothing.
  receiver.write(frame(0, ++sent, content));
  CHECK(!receiver.wire().poll() || taken == sent);
  std::vector<std::byte> target(content.size());
  receiver.wire().expect(1, 0, {sent, 42, target.data(), target.size()});
  receiver.poll();
  const Line* line = receiver.wire().peek(1, 0, sent);
  CHECK(line != nullptr && content_of(*line) == content);
}

CASE(one_lane_uses_all_streams) {
  for (const unsigned streams : {1, 2, 3, 16}) {
    Connected sender(streams);
    std::string content = payload(1000, 1);
    iovec span{content.data(), content.size()};
    for (std::uint64_t piece = 1; piece <= streams; ++piece) {
      CHECK(sender.wire().send(1, {2, piece << kOperationBits | 5, 42, 1000}, {&span, 1}));
    }
    for (unsigned stream = 0; stream < streams; ++stream) {
      CHECK_EQUAL(sender.read(stream).size(), sizeof(tcp::WireHeader) + 1000);
    }
  }
}

CASE(messages_of_a_lane_may_overtake_each_other) {
  Connected receiver(2);
  std::vector<std::byte> target(10'000);
  receiver.wire().expect(1, 0, {1, 42, target.data(), target.size()});
  const std::string first = frame(0, 1, payload(10'000, 1));
  receiver.write(first.substr(0, 5'000), 0);
  for (std::uint64_t sequence = 2; sequence < 6; ++sequence) {
    receiver.write(frame(0, sequence, payload(10'000, static_cast<unsigned char>(sequence))), 1);
  }
  receiver.poll();
  CHECK(receiver.wire().peek(1, 0, 1) == nullptr);
  for (std::uint64_t sequence = 2; sequence < 6; ++sequence) {
    const Line* line = receiver.wire().peek(1, 0, sequence);
    CHECK(line != nullptr &&
          content_of(*line) == payload(10'000, static_cast<unsigned char>(sequence)));
    receiver.wire().release(1, 0, sequence);
  }
  receiver.write(first.substr(5'000), 0);
  receiver.poll();
  const Line* line = receiver.wire().peek(1, 0, 1);
  CHECK(line != nullptr && content_of(*line) == payload(10'000, 1));
  CHECK(line != nullptr && line->offset == reinterpret_cast<std::uint64_t>(target.data()));
}

CASE(what_came_by_a_stream_is_released_there) {
  Connected receiver(2);
  const std::string content = payload(5'000, 1);
  // Twice as many as it takes in unasked, all by the same stream.
  for (std::uint64_t sequence = 1; sequence <= 16; ++sequence) {
    receiver.write(frame(0, sequence, content), 1);
    receiver.poll();
    const Line* line = receiver.wire().peek(1, 0, sequence);
    CHECK(line != nullptr);
    if (line == nullptr) return;
    receiver.wire().release(1, 0, sequence);
  }
}

CASE(of_two_that_claim_to_be_awaited_one_goes_to_its_place) {
  Connected receiver(2);
  std::vector<std::byte> target(10'000);
  receiver.wire().expect(1, 0, {1, 42, target.data(), target.size()});
  const std::string first = frame(0, 1, payload(10'000, 1));
  const std::string second = frame(0, 1, payload(10'000, 2));
  receiver.write(first.substr(0, 100), 0);
  receiver.poll();
  receiver.write(second, 1);
  receiver.poll();
  receiver.write(first.substr(100), 0);
  receiver.poll();
  const std::string found(reinterpret_cast<const char*>(target.data()), target.size());
  CHECK(found == payload(10'000, 1));
}

CASE(nonsense_is_told_as_such) {
  const std::string good = frame(0, 1, payload(8, 1));
  // The magic, a lane that there is not, and a length beyond the largest.
  const std::pair<std::size_t, char> changes[] = {{0, 'x'}, {4, 9}, {30, 1}};
  for (const auto& [place, value] : changes) {
    std::string bytes = good;
    bytes[place] = value;
    Connected receiver;
    receiver.write(bytes);
    receiver.poll();
    CHECK(receiver.wire().failure().has_value());
    if (!receiver.wire().failure()) return;
    CHECK_EQUAL(receiver.wire().failure()->trouble, Trouble::corrupt);
    CHECK_EQUAL(receiver.wire().failure()->rank, 1U);
  }
  Connected receiver;
  receiver.write(good);
  receiver.poll();
  CHECK(!receiver.wire().failure().has_value());
}

CASE(what_the_system_refuses_is_this_ranks_trouble) {
  // Files cannot be watched.
  const tests::Memory memory(2);
  Region region(memory.fd(), 0, 2, {1});
  const auto file = [&] { return fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0); };
  const tcp::Wire wire(region, {{1, getpid(), -1, -1, {file()}}});
  CHECK(wire.failure().has_value());
  if (!wire.failure()) return;
  CHECK_EQUAL(wire.failure()->trouble, Trouble::exhausted);
  CHECK_EQUAL(wire.failure()->rank, 0U);
  CHECK_EQUAL(wire.failure()->error, static_cast<std::uint32_t>(EPERM));
  tcp::Control control(region, {}, true);
  CHECK_EQUAL(control.add(1, file()), EPERM);
}

}  // namespace
