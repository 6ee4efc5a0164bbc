// What belongs to this process and not to the children that it forks: descriptors, threads, locks.
//
// A forked child inherits the connections of its parent's groups, and none of its threads. It
// closes its copies of the descriptors at once: as long as it held them, nobody would see the
// parent's death. It creates its own locks and threads when it first needs them; whatever state its
// parent's were in is never touched.
#pragma once

#include <atomic>
#include <functional>

namespace rallypoint {

// The number of forks between the process that loaded the engine and this one: objects created
// under another number belong to a parent.
extern std::atomic<unsigned> forks;
inline unsigned generation() { return forks.load(std::memory_order_relaxed); }

// Makes forked children close the descriptor; returns it.
int own(int fd);
// Closes an owned descriptor.
void close_owned(int fd);

// Starts a thread that ends with the process, and that the program's signals do not interrupt. Its
// own faults (SIGSEGV and the like) are reported as in any other thread. Throws std::system_error.
void start_thread(std::function<void()> body);

// The only T of a process, created on first use and never destroyed: threads may outlive everything
// else at the end of the process.
template <typename T>
class PerProcess {
 public:
  T& get() {
    Held* known = held_.load(std::memory_order_acquire);
    while (known == nullptr || known->generation != generation()) {
      auto* const made = new Held;
      if (held_.compare_exchange_strong(known, made)) return made->value;
      delete made;  // another thread was faster
    }
    return known->value;
  }

 private:
  struct Held {
    const unsigned generation = rallypoint::generation();
    T value;
  };
  std::atomic<Held*> held_{nullptr};
};

}  // namespace rallypoint
