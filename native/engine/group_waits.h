// Measures how long calls of a group have been waited for in this process, so that its launcher is
// told of waits that take too long (long_wait.h). Only threads that have slept come here.
#pragma once

#include <cstdint>
#include <mutex>

#include "engine/flight_record.h"
#include "engine/long_wait.h"
#include "engine/waiting.h"

namespace rallypoint {

class GroupWaits {
 public:
  explicit GroupWaits(GroupRecord& record) : record_(record) {}

  GroupRecord& record() const { return record_; }
  // The program waits for that collective (its number plus one), or transfer: to be called
  // repeatedly, and once more when the wait is over.
  [[gnu::cold]] void wait_for(std::uint64_t number_plus_one);
  [[gnu::cold]] void wait_for(const RecordedTransfer& transfer);

 private:
  void wait_for(const RecordedCall& call, std::uint64_t number_plus_one, LongWait& wait);

  GroupRecord& record_;
  std::mutex mutex_;  // of what follows
  LongWait collective_;
  LongWait transfers_[kRecordedTransfers];
  UsualWait usual_;
};

}  // namespace rallypoint
