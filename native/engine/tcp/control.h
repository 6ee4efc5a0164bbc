// What ranks on different hosts tell each other apart from messages: trouble, leaving, and what
// they have called, if a rank has waited for it without success.
//
// There is one connection to each of them, which never carries data and is therefore never full.
// The watcher's thread reads it, so that a rank hears of trouble, and answers, whatever it is
// doing. A connection that ends without a goodbye means a lost peer; the
// kernel ends that to a silent host (`_watch_for_silence` in process_group/formation/mesh.py).
//
// In a large group, ranks are not all connected with each other: a rank passes on what it hears of
// another's end, or of trouble, once to its neighbours in a graph
// (process_group/formation/mesh.py).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/layout.h"
#include "engine/region.h"
#include "engine/tcp/inlet.h"
#include "engine/tcp/peer_address.h"
#include "engine/tcp/stream.h"
#include "engine/tcp/watcher.h"

namespace rallypoint::tcp {

// On the wire, as all numbers here: little-endian.
struct ControlHeader {
  std::uint32_t magic;
  std::uint16_t kind;
  std::uint16_t bytes;
  std::uint64_t number;  // of a call, or the epoch of a wait

  std::size_t payload() const { return bytes; }
};

class Control final : public Watched, public Messenger {
 public:
  // If the group is `sparse`, these peers are the neighbours, some of which may be on this host.
  Control(Region& region, const std::vector<PeerAddress>& peers, bool sparse);
  ~Control() override;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // Adds a connection to a rank that is not a neighbour. Runs on the watcher's thread. Returns 0,
  // or the system's error.
  int add(std::uint32_t rank, int fd);

  // Messenger:
  void spread(const Poison& poison) override;
  void ask(std::uint32_t rank, std::uint64_t number) override;
  void answer(std::uint64_t number) override;
  void send_probe(std::uint32_t via, std::uint32_t rank, const Probe& probe) override;
  std::vector<Probe> take_probes() override;
  void leave() override;

 private:
  static constexpr std::size_t kMostBytes = 2048;
  struct Peer {
    Peer(std::uint32_t rank_, int fd) : rank(rank_), stream(fd) {}
    std::uint32_t rank;
    Stream stream;
    std::uint64_t key = 0;  // of the constructor and destructor
    bool is_watched = true;
    bool is_neighbour = true;
    Inlet<ControlHeader> inlet;
    std::byte payload[kMostBytes];
    std::string unsent;
    std::uint64_t asked = 0;     // asked by it: the call's number plus one
    std::uint64_t asks_for = 0;  // asked by us
  };
  class Reader;
  struct ProbeFrame;

  void unwatch();
  void on_ready(int fd, std::uint64_t key) override;
  bool take(Peer& peer, const ControlHeader& header);
  bool take_poison(const Peer& peer);
  bool take_news(const Peer& peer, const ControlHeader& header);
  void pass_on(const Peer& from, std::uint16_t kind, std::uint64_t number, const void* data,
               std::size_t bytes);
  bool take_record(const Peer& peer, const ControlHeader& header);
  bool take_probe(const Peer& peer, const ControlHeader& header);
  void tell_probe(std::uint32_t via, const ProbeFrame& frame, std::uint64_t epoch);
  void lose(Peer& peer, std::uint64_t key);
  void tell(Peer& peer, std::uint16_t kind, std::uint64_t number, const void* data,
            std::size_t bytes);
  void tell_record(Peer& peer, std::uint64_t number);
  static void flush(Peer& peer);

  Region& region_;
  std::mutex mutex_;  // of all below
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Probe> probes_;  // received
  std::atomic<bool> is_asked_{false};
  const bool is_sparse_;
  std::vector<bool> is_gone_;  // by rank: it has left, or is lost
  bool has_passed_poison_on_ = false;
  bool has_left_ = false;
};

}  // namespace rallypoint::tcp
