// What does it cost one core to write memory that another one has read, and that one to read it?
//
//   c++ -O2 -std=c++20 -I native benchmarks/line_transfers.cc native/engine/copy.cc -o
//   line_transfers
//   ./line_transfers [BYTES]
//
// Two processes, each tied to a core, take turns with one buffer, as with a ring; both costs are
// medians, in ns per line of 64 bytes. "one way": the same process writes each time, as in our
// rings; "both ways": by turns. Past the caches: copy_past_caches; touched: by the reader, after it
// has read (engine/copy.h).

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine/copy.h"

namespace {

constexpr int kCalls = 400;
constexpr std::size_t kLine = 64;

using Copy = void (*)(std::byte*, const std::byte*, std::size_t);
using Clock = std::chrono::steady_clock;

struct Shared {
  std::atomic<long> turn;
  std::array<double, 4> ns;  // writing and reading, of each process
};

void copy_plainly(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

void copy_and_touch(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  rallypoint::touch(from, bytes);
}

struct Way {
  const char* name;
  Copy write;
  Copy read;
};

double timed(Copy copy, std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto began = Clock::now();
  copy(to, from, bytes);
  return std::chrono::duration<double, std::nano>(Clock::now() - began).count();
}

double median(std::vector<double>& values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void take_turns(int me, bool both_ways, const Way& way, Shared& shared, std::byte* ring,
                std::size_t bytes) {
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(me, &core);
  sched_setaffinity(0, sizeof core, &core);
  std::vector<std::byte> own(bytes);
  std::vector<double> written;
  std::vector<double> read;
  for (long call = 0; call < kCalls; ++call) {
    const bool writes = me == (both_ways ? call % 2 : 0);
    while (shared.turn.load(std::memory_order_acquire) < 2 * call + (writes ? 0 : 1)) {
    }
    if (writes) {
      written.push_back(timed(way.write, ring, own.data(), bytes));
    } else {
      read.push_back(timed(way.read, own.data(), ring, bytes));
    }
    shared.turn.fetch_add(1, std::memory_order_release);
  }
  shared.ns[2 * me] = median(written);
  shared.ns[2 * me + 1] = median(read);
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t bytes = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 64 << 10;
  const auto map = [](std::size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  };
  auto& shared = *static_cast<Shared*>(map(sizeof(Shared)));
  auto* ring = static_cast<std::byte*>(map(bytes));
  const double lines = static_cast<double>(bytes) / kLine;
  std::printf("%-10s %-16s %8s %8s\n", "ring", "write", "write", "read");
  for (const bool both_ways : {false, true}) {
    for (const Way& way : {Way{"plain", copy_plainly, copy_plainly},
                           Way{"past the caches", rallypoint::copy_past_caches, copy_plainly},
                           Way{"touched", copy_plainly, copy_and_touch}}) {
      shared.turn = 0;
      const pid_t other = fork();
      take_turns(other == 0 ? 1 : 0, both_ways, way, shared, ring, bytes);
      if (other == 0) _exit(0);
      waitpid(other, nullptr, 0);
      const auto& ns = shared.ns;
      std::printf("%-10s %-16s %8.1f %8.1f\n", both_ways ? "both ways" : "one way", way.name,
                  std::max(ns[0], ns[2]) / lines, std::max(ns[1], ns[3]) / lines);
    }
  }
}
