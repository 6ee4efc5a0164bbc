// Two processes run all_reduce: by the engine from an encoded program, and by a loop written by
// hand of the same steps, with the same memory layout, waiting and reduction. See executor.py.
//
//   executor BYTES REPEATS PROGRAM_OF_RANK_0 PROGRAM_OF_RANK_1
//
// prints, for each of REPEATS alternating rounds, nanoseconds per call: "program hand".

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "engine/communicator.h"

namespace {

using namespace rallypoint;

constexpr std::uint32_t kRanks = 2;
constexpr WaitPolicy kPolicy{50, 1000};

int make_region() {
  const int fd = memfd_create("executor", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(Layout(kRanks).bytes())) != 0) std::exit(1);
  return fd;
}

double now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

std::vector<std::int32_t> read_words(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::int32_t> words(bytes.size() / sizeof(std::int32_t));
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(std::int32_t));
  return words;
}

std::deque<Ring> make_rings(const Region& region) {
  std::deque<Ring> rings;
  auto* const base = region.at<std::byte>(region.rank(), region.layout().rings(region.rank()));
  for (unsigned i = 0; i < kLanes; ++i) rings.emplace_back(base + i * kRingBytes);
  return rings;
}

// The operands in rank order, as the program has them.
void reduce_pair(Reducer reducer, std::byte* ours, const std::byte* theirs, bool ours_first,
                 std::uint64_t items) {
  const std::byte* const operands[2] = {ours_first ? ours : theirs, ours_first ? theirs : ours};
  reducer(ours, operands, 2, items, 1);
}

class HandWritten {
 public:
  HandWritten(int fd, std::uint32_t rank)
      : region_(fd, rank, kRanks, {}),
        rings_(make_rings(region_)),
        channel_(Channel::collective(region_, rings_, nullptr)) {
    program_.sends = 1;
    send_.receivers = {{1 - rank, 0, 1}};
    from_.peer = 1 - rank;
  }

  void all_reduce(float* values, std::uint64_t count) {
    const std::uint64_t most = kBlockBytes / sizeof(float);
    if (region_.poisoned()) std::exit(1);
    record(count);
    std::uint64_t at = 0;
    do {
      const std::uint64_t items = std::min(most, count - at);
      piece(reinterpret_cast<std::byte*>(values + at), items);
      at += items;
    } while (at < count);
    ++channel_.calls;
  }

 private:
  void record(std::uint64_t count) {
    CallRecord& record = channel_.call(channel_.self(), channel_.calls);
    record.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    record.signature.store(signature_, std::memory_order_relaxed);
    record.count = count;
    record.collective = 0;
    record.reduce_op = 0;
    record.dtype = 0;
    record.root = 0;
    record.number.store(channel_.calls + 1, std::memory_order_release);
  }

  void piece(std::byte* values, std::uint64_t items) {
    const std::uint64_t bytes = items * sizeof(float);
    const std::uint64_t iteration = channel_.iterations;
    Waiter waiter(region_, kPolicy, host_, nullptr);
    std::uint32_t blocker = 0;
    Slot slot;
    std::byte* target = nullptr;
    while ((target = channel_.reserve(program_, 0, send_, iteration, bytes, slot, blocker)) ==
           nullptr) {
      waiter.pause();
    }
    std::memcpy(target, values, bytes);
    channel_.publish(slot, send_, iteration, bytes, signature_);
    const Line* line = nullptr;
    while ((line = channel_.peek(program_, from_, iteration)) == nullptr) waiter.pause();
    const std::byte* const payload = channel_.payload(*line, from_);
    if (line->signature != signature_ || line->bytes != bytes || payload == nullptr) std::exit(1);
    reduce_pair(reducer_, values, payload, from_.peer == 1, items);
    channel_.set_progress(0, iteration + 1, 0);
    if (bytes > kInlineBytes) {
      Region::fence();
      channel_.wake(from_.peer);
    }
    ++channel_.iterations;
  }

  Region region_;
  std::deque<Ring> rings_;
  Channel channel_;
  Program program_{};
  Operation send_{};
  Operand from_{};
  std::uint64_t signature_ = 42;
  NoHost host_;
  Reducer reducer_ = reducer(DType::float32, ReduceOp::sum);
};

class Bare {
 public:
  Bare(int fd, std::uint32_t rank)
      : region_(fd, rank, kRanks, {}),
        peer_(1 - rank),
        ours_(region_.at<Line>(rank, region_.layout().lines(rank))),
        theirs_(region_.at<Line>(peer_, region_.layout().lines(peer_))),
        our_ring_(region_.at<std::byte>(rank, region_.layout().rings(rank))),
        their_ring_(region_.at<std::byte>(peer_, region_.layout().rings(peer_))) {}

  void all_reduce(float* values, std::uint64_t count) {
    const std::uint64_t most = kBlockBytes / sizeof(float);
    Waiter waiter(region_, kPolicy, host_, nullptr);
    std::uint64_t at = 0;
    do {
      const std::uint64_t items = std::min(most, count - at);
      piece(reinterpret_cast<std::byte*>(values + at), items, waiter);
      at += items;
    } while (at < count);
  }

 private:
  void piece(std::byte* values, std::uint64_t items, Waiter& waiter) {
    const std::uint64_t bytes = items * sizeof(float);
    const std::uint64_t place = piece_++;
    const std::uint64_t slot = place % 4 * kBlockBytes;
    const bool is_inline = bytes <= kInlineBytes;
    Line& ours = ours_[place % kLines];
    const Line& theirs = theirs_[place % kLines];
    std::memcpy(is_inline ? ours.payload : our_ring_ + slot, values, bytes);
    ours.sequence.store(place + 1, std::memory_order_release);
    Region::fence();
    region_.wake(peer_);
    while (theirs.sequence.load(std::memory_order_acquire) != place + 1) waiter.pause();
    waiter.reset();
    reduce_pair(reducer_, values, is_inline ? theirs.payload : their_ring_ + slot, peer_ == 1,
                items);
  }

  Region region_;
  std::uint32_t peer_;
  Line* ours_;
  const Line* theirs_;
  std::byte* our_ring_;
  const std::byte* their_ring_;
  std::uint64_t piece_ = 0;
  NoHost host_;
  Reducer reducer_ = reducer(DType::float32, ReduceOp::sum);
};

// One core each, where there are enough: what is compared must not depend on where ranks run.
void pin(std::uint32_t rank) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  std::uint32_t nth = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || nth++ != rank) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
  }
}

// The descriptors of three regions, one for each way.
using Regions = std::array<int, 3>;

void run_rank(std::uint32_t rank, const Regions& regions, std::uint64_t bytes, int repeats,
              const char* program_path) {
  pin(rank);
  Communicator communicator(regions[0], rank, kRanks, kPolicy, {}, {});
  HandWritten hand(regions[1], rank);
  Bare bare(regions[2], rank);
  NoHost host;
  const std::string error = communicator.teach(0, read_words(program_path), rank, kRanks, true);
  if (!error.empty()) {
    std::fprintf(stderr, "%s\n", error.c_str());
    std::exit(1);
  }
  std::vector<float> values(bytes / sizeof(float));
  auto* const data = reinterpret_cast<std::byte*>(values.data());
  const Call call{
      communicator.find(0), {0, DType::float32, ReduceOp::sum, 0}, values.size(), data, data, 60};
  const std::uint64_t calls = std::clamp<std::uint64_t>((64u << 20) / (bytes + 256), 5, 100000);
  const std::array<std::function<void(std::uint64_t)>, 3> ways = {
      [&](std::uint64_t times) {
        for (; times > 0; --times) {
          if (communicator.run(call, host) != Trouble::none) std::exit(1);
        }
      },
      [&](std::uint64_t times) {
        for (; times > 0; --times) hand.all_reduce(values.data(), values.size());
      },
      [&](std::uint64_t times) {
        for (; times > 0; --times) bare.all_reduce(values.data(), values.size());
      }};

  // All must give the same: rank 0 puts in 1, rank 1 puts in 2, the sum is 3 everywhere.
  for (const auto& way : ways) {
    std::fill(values.begin(), values.end(), static_cast<float>(rank + 1));
    way(1);
    if (std::any_of(values.begin(), values.end(), [](float value) { return value != 3; })) {
      std::fprintf(stderr, "rank %u: wrong sum\n", rank);
      std::exit(1);
    }
  }
  std::fill(values.begin(), values.end(), 0.0F);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::array<double, 3> ns{};
    for (std::size_t i = 0; i < ways.size(); ++i) {
      const std::size_t way = (i + static_cast<std::size_t>(repeat)) % ways.size();
      ways[way](1);  // both ranks are here, and the buffers in the cache
      const double start = now_ns();
      ways[way](calls);
      ns[way] = (now_ns() - start) / static_cast<double>(calls);
    }
    if (rank == 0) std::printf("%.1f %.1f %.1f\n", ns[0], ns[1], ns[2]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::uint64_t bytes = std::strtoull(argv[1], nullptr, 10);
  const int repeats = std::atoi(argv[2]);
  const Regions regions = {make_region(), make_region(), make_region()};
  // Rank 0 writes the header of a region, so it must be first to map it.
  int ready[2];
  if (pipe(ready) != 0) return 1;
  const pid_t child = fork();
  if (child < 0) return 1;
  char byte = 0;
  if (child == 0) {
    if (read(ready[0], &byte, 1) != 1) return 1;
    run_rank(1, regions, bytes, repeats, argv[4]);
    return 0;
  }
  {
    for (const int fd : regions) const Region header(fd, 0, kRanks, {});
    if (write(ready[1], &byte, 1) != 1) return 1;
  }
  run_rank(0, regions, bytes, repeats, argv[3]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
