// An operation that goes on while its caller does something else.
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
  // Once it is done: `none` or what went wrong. Another thread may have seen that; here the memory
  // goes back to the program, as in Region::poisoned().
  Trouble trouble() const {
    if (trouble_ != Trouble::none) std::atomic_thread_fence(std::memory_order_release);
    return trouble_;
  }
  // Sleeps until it is done, at most for so long.
  void sleep(long most_us) const;
  // Of a send or receive: where its end is to be noted, if anywhere. Set before it begins.
  void set_record(RecordedCall* record) { record_ = record; }
  const RecordedCall* record() const { return record_; }
  // For whoever carried it out: once, and holding no lock that on_done may need.
  void finish(Trouble trouble);

 protected:
  // The memory of the operation is not touched any more. Runs on any thread.
  virtual void on_done() {}

 private:
  Trouble trouble_ = Trouble::none;
  RecordedCall* record_ = nullptr;
  enum State : std::uint32_t { running, done, awaited };
  mutable std::atomic<std::uint32_t> state_{running};
};

}  // namespace rallypoint
