// The sockets of a Machine: one epoll set, served by one thread. It logs why it closes connections,
// once per address, and never asks a name service.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "descriptors.h"
#include "store/machine.h"

namespace rallypoint::store {

using HostAddress = std::array<uint8_t, 16>;  // IPv6, or IPv4 mapped into it

struct Counters {
  uint64_t connections;
  uint64_t keys;
  uint64_t requests;
};

class EventLoop {
 public:
  EventLoop(int listener, int log, std::string token, int silence_s);
  ~EventLoop() { close_all(); }
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void run();  // until stop()

  // From other threads.
  void stop();
  void allow(std::vector<HostAddress> hosts);
  Counters counters() const { return {connections_, keys_, requests_}; }

  // Call once run() has returned, or never will: in a forked child.
  void close_all() { descriptors_.close_all(); }

 private:
  struct Socket {
    int fd = -1;
    uint32_t interest = 0;  // the requested epoll events
    bool keepalive = false;
  };

  void accept_all();
  void accept_without_descriptors();
  void add(int fd);
  bool allowed(const HostAddress& host);
  void on_event(ConnectionId id, uint32_t events);
  void on_writable(ConnectionId id);
  void read(ConnectionId id);
  bool flush(ConnectionId id);
  void flush_touched();
  void settle(ConnectionId id);
  void refuse(ConnectionId id, const char* reason);
  void drop(ConnectionId id, const char* reason);
  void forget_closed();
  void sweep();
  void publish_counters();
  void log_once(const HostAddress& host, const char* reason);

  Descriptors descriptors_;
  const int listener_;
  const int log_;
  const int silence_s_;
  int epoll_ = -1;
  int wake_ = -1;
  int spare_ = -1;  // released for a moment to turn a connection away when descriptors run out
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> connections_{0};
  std::atomic<uint64_t> keys_{0};
  std::atomic<uint64_t> requests_{0};

  std::mutex allow_mutex_;
  std::unique_ptr<std::set<HostAddress>> allowed_;  // null: everyone

  // Only for the loop's thread.
  Machine machine_;
  std::vector<Socket> sockets_;       // by connection id
  std::vector<ConnectionId> closed_;  // in this batch of events; their ids are free after it
  std::vector<char> scratch_;
  std::set<HostAddress> logged_;
  double next_sweep_ = 0;
};

}  // namespace rallypoint::store
