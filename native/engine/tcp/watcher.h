// The thread that waits for connections while all others do something else: one per process.
//
// It carries no data. It tells the owner of a descriptor that there is something to see.
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

  // Tells the owner whenever there is something to read; or, `once`, only after each `arm`.
  std::uint64_t add(int fd, Watched& owner, bool once);
  // The same from within on_ready, not `once`.
  std::uint64_t add_within(int fd, Watched& owner);
  void arm(int fd, std::uint64_t key) const;
  // Afterwards the owner is not told any more. Not from within on_ready.
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
  std::mutex mutex_;  // of all below; held while an owner is told
  bool is_running_ = false;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::uint64_t keys_ = 0;
};

}  // namespace rallypoint::tcp
