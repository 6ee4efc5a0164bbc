// Hears of workers' ends before the kernel has unmapped their memory (engine/life_word.h).
//
// A thread for each worker waits for its word, as the kernel can wake nobody else: no descriptor
// becomes readable. Where there are accelerators, nothing is heard early: their memory is freed
// later than the process's own, and who takes its place may need it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace guardian {

struct EarlyEnd {
  uint32_t worker;
  int64_t heard_ns;  // CLOCK_MONOTONIC
};

class EarlyEnds {
 public:
  EarlyEnds();

  // Listens to the process whose flight record is at that slot of a file in memory, if it can.
  void listen(uint32_t worker, int record, uint32_t slot);
  void forget(uint32_t worker);
  // What it has heard since the last call, in that order. `fd` is readable if there is anything;
  // -1: there never will be.
  std::vector<EarlyEnd> take();
  int fd() const { return fd_; }

 private:
  struct Ear;
  static void* wait(void* ear);

  int fd_;
  std::vector<std::shared_ptr<Ear>> ears_;
};

// How a process that is about to end will do so, as waitpid would tell; 0: not known yet, or with
// code 0, or it does not end at all.
int coming_status(pid_t pid);

}  // namespace guardian
