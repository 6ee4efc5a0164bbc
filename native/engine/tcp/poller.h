// Tells which of several streams are readable, and rings a sleeping rank's bell.
#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/region.h"
#include "engine/tcp/watcher.h"
#include "engine/waiting.h"

namespace rallypoint::tcp {

// Streams are identified by their place, from 0 on.
class Poller final : public Watched {
 public:
  explicit Poller(Region& region);
  ~Poller() override;
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // At the next place. Returns 0, or the system's error: then nothing is known of this stream.
  int add(int fd);
  // The places that may be readable. A single one is simply tried.
  const std::vector<std::size_t>& ready();
  // What to wait for on this stream during sleep; neither once it has ended.
  void set_interest(std::size_t place, bool reads, bool writes);
  // Ring this rank's bell as soon as there is something of interest.
  void arm() const { Watcher::instance().arm(epoll_, key_); }

 private:
  void on_ready(int fd, std::uint64_t key) override;

  Region& region_;
  int epoll_;
  std::uint64_t key_;
  std::vector<int> fds_;
  std::vector<std::uint32_t> interests_;
  std::vector<std::size_t> ready_;
  std::vector<epoll_event> events_;
};

}  // namespace rallypoint::tcp
