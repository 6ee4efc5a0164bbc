// An operation that continues while its caller does something else.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/flight_record.h"
#include "engine/layout.h"

namespace rallypoint {

class Work {
 public:
  virtual ~Work() = default;

  bool is_done() const { return state_.load(std::memory_order_acquire) == done; }
  // For a completed operation: `none` or the trouble. Another thread may have seen that; here the
  // memory goes back to the program, as in Region::poisoned().
  Trouble trouble() const {
    if (trouble_ != Trouble::none) std::atomic_thread_fence(std::memory_order_release);
    return trouble_;
  }
  // Sleeps until it is done, at most for that long.
  void sleep(long most_us) const;
  // For a send or receive: where to record its end, if anywhere. Set before it begins.
  void set_record(const RecordedTransfer& record) { record_ = record; }
  const RecordedTransfer& record() const { return record_; }
  // Called by the thread that carried it out: once, and holding no lock that on_done may need.
  void finish(Trouble trouble);

 protected:
  // The operation's memory is no longer accessed. Runs on any thread.
  virtual void on_done() {}

 private:
  Trouble trouble_ = Trouble::none;
  RecordedTransfer record_;
  enum State : std::uint32_t { running, done, awaited };
  mutable std::atomic<std::uint32_t> state_{running};
};

}  // namespace rallypoint
