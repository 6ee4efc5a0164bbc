// Whether a group of another backend makes progress, as seen by the scribe, which looks ten times a
// second: for how long a call is waited for, and for how long others were before.
#pragma once

#include <cstdint>

#include "engine/foreign_page.h"
#include "engine/long_wait.h"
#include "engine/waiting.h"

namespace rallypoint {

// For calls that complete in the order in which they begin.
class CallWatch {
 public:
  // `begun` calls have been begun, and `done` of these are done.
  void look(std::uint64_t now_ns, std::uint64_t begun, std::uint64_t done);

 private:
  LongWait wait_;
  std::uint64_t begun_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t told_ = 0;  // how many had been begun then
  UsualWait usual_;
  std::uint64_t since_ns_ = coarse_now_ns();  // the first that is not done is waited for
};

class GroupWatch {
 public:
  explicit GroupWatch(const ForeignPage& page) : page_(page) {}
  void look();

 private:
  const ForeignPage& page_;
  CallWatch collectives_;
  CallWatch transfers_;
};

}  // namespace rallypoint
