// What belongs to this process and not to the children that it forks: descriptors, threads, locks.
//
// A forked child inherits the connections of its parent's groups, and none of its threads. It
// closes the descriptors at once, only its own copies: as long as it held them, nobody would see
// that the parent has died. Locks and threads it has anew, when it first needs them; what its
// parent's were in the midst of is never touched.
#pragma once

#include <atomic>
#include <functional>

namespace rallypoint {

// How many forks lie between the process that loaded the engine and this one: what was made under
// another number is a parent's.
extern std::atomic<unsigned> forks;
inline unsigned generation() { return forks.load(std::memory_order_relaxed); }

// Has forked children close the descriptor; returns it.
int own(int fd);
// Closes what is owned.
void close_owned(int fd);

// Starts a thread that ends with the process, and that the program's signals do not interrupt. What
// it does wrong itself (SIGSEGV and the like) is reported as in any other thread.
void start_thread(std::function<void()> body);

// The only T of a process, made when it is first needed and never destroyed: threads may outlive
// whatever else ends with the process.
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
