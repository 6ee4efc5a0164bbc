// Regions without processes: ranks of one process, which share memory or are connected.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "engine/region.h"

namespace rallypoint::tests {

class Memory {
 public:
  explicit Memory(std::uint32_t ranks) : fd_(memfd_create("unit", MFD_CLOEXEC)) {
    const auto bytes = static_cast<off_t>(Layout(ranks).bytes());
    if (fd_ < 0 || ftruncate(fd_, bytes) != 0) std::abort();
  }
  ~Memory() { close(fd_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace rallypoint::tests
