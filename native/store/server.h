// The store's server: one thread, one epoll set, the sockets of a Machine. It takes a listening
// socket and knows nothing of addresses or names; it logs why it closes whom, once per address.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "store/machine.h"

namespace rallypoint::store {

struct Counters {
  uint64_t connections;
  uint64_t keys;
  uint64_t requests;
};

class Server {
 public:
  // Serves from construction; owns `listener`. Throws std::system_error.
  Server(int listener, int log);
  ~Server() { close(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes all connections and joins the thread. In a forked child there is no thread to join.
  void close();
  Counters counters() const { return {connections_, keys_, requests_}; }

 private:
  struct Socket {
    int fd = -1;
    uint32_t interest = 0;  // the epoll events that are asked for
    bool keepalive = false;
  };

  static void* run(void* self);
  void loop();
  void forget_closed();
  void accept_all();
  void accept_without_descriptors();
  void on_event(ConnectionId id, uint32_t events);
  void read(ConnectionId id);
  bool flush(ConnectionId id);
  void flush_touched();
  void settle(ConnectionId id);
  void watch(ConnectionId id, uint32_t events);
  void drop(ConnectionId id, const char* reason);
  void sweep();
  void log_once(int fd, const char* reason);

  int listener_;
  const int log_;
  int epoll_ = -1;
  int wake_ = -1;
  int spare_ = -1;  // given up for a moment to turn a connection away when descriptors run out
  pid_t owner_;
  pthread_t thread_{};
  bool running_ = false;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> connections_{0};
  std::atomic<uint64_t> keys_{0};
  std::atomic<uint64_t> requests_{0};

  // The thread's own.
  Machine machine_;
  std::vector<Socket> sockets_;       // by connection id
  std::vector<ConnectionId> closed_;  // in this batch of events; their ids are free after it
  std::vector<char> scratch_;
  std::set<std::string> logged_;
  double next_sweep_ = 0;
};

}  // namespace rallypoint::store
