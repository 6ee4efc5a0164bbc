// The store's server: a thread that runs an EventLoop. It takes a listening socket and knows
// nothing of names. The handle may be used from any thread; what the loop owns is the thread's.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/event_loop.h"

namespace rallypoint::store {

class Server {
 public:
  // Serves from construction; owns `listener`. Lines for the log go to the descriptor `log`, unless
  // it is negative. Throws std::system_error.
  Server(int listener, int log, std::string token);
  ~Server() { close(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes all connections and joins the thread. A second call does nothing.
  void close();
  // For a forked child, which has the descriptors but not the thread: closes them, so that peers
  // see the end of the parent, and leaves the rest alone, for it may have been changing.
  void abandon();
  // From now on only these hosts are let in, and loopback. Connections that are there stay.
  void allow(std::vector<HostAddress> hosts) {
    if (loop_) loop_->allow(std::move(hosts));
  }
  Counters counters() const { return loop_ ? loop_->counters() : Counters{}; }

 private:
  static void* run(void* loop);

  const pid_t owner_;
  std::unique_ptr<EventLoop> loop_;
  pthread_t thread_{};
  bool running_ = false;
};

}  // namespace rallypoint::store
