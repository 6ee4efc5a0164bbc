// Which of several streams have something to read, and the bell of a rank that sleeps until then.
#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/region.h"
#include "engine/tcp/watcher.h"
#include "engine/waiting.h"

namespace rallypoint::tcp {

// Streams are known by their place, from 0 on.
class Poller final : public Watched {
 public:
  explicit Poller(Region& region);
  ~Poller() override;
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  void add(int fd);  // at the next place
  // The places worth reading. A single one is simply tried.
  const std::vector<std::size_t>& ready();
  // What the stream's rank waits for when it sleeps; neither once it has ended.
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
