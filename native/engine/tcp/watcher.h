// The thread that waits for activity on connections: one per process.
//
// It carries no data. It tells the owner of a descriptor that there is something to read.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace rallypoint::tcp {

class Watched {
 public:
  virtual ~Watched() = default;
  // Runs on the watcher's thread.
  virtual void on_ready(int fd, std::uint64_t key) = 0;
};

class Watcher {
 public:
  static Watcher& instance();
  Watcher();
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Notifies the owner whenever there is something to read; or, if `once`, only after each `arm`.
  std::uint64_t add(int fd, Watched& owner, bool once);
  // The same from within on_ready, without `once`; 0 if the system refuses, with `errno`.
  std::uint64_t add_within(int fd, Watched& owner) { return enter(fd, owner, false); }
  void arm(int fd, std::uint64_t key) const;
  // After this call the owner is not notified any more. Not allowed from within on_ready.
  void remove(int fd, std::uint64_t key);
  // The same from within on_ready.
  void forget(int fd, std::uint64_t key);

 private:
  struct Entry {
    int fd;
    Watched* owner;
  };

  std::uint64_t enter(int fd, Watched& owner, bool once);
  void run();

  int epoll_;
  std::mutex mutex_;  // protects all below; held while an owner is notified
  bool is_running_ = false;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::uint64_t keys_ = 0;
};

}  // namespace rallypoint::tcp
