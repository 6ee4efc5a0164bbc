// The store's server: a thread that runs an EventLoop. It takes a listening socket and knows
// nothing of names. The handle may be used from any thread; the loop's data only by its own thread.
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
  // it is negative. Keys that go with their connection do so if its host is silent for `silence_s`.
  // Throws std::system_error.
  Server(int listener, int log, std::string token, int silence_s);
  ~Server() { close(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes all connections and joins the thread. A second call does nothing.
  void close();
  // For a forked child, which has the descriptors but not the thread: closes them, so that peers
  // see the parent's end, and leaves everything else alone, because it may have been in the middle
  // of a change.
  void abandon();
  // From now on only these hosts, and loopback, are admitted. Existing connections stay.
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
