// Ranks as threads of one process run random operations, for the sanitizers: all_reduce from an
// encoded program, in the calling thread and in the background, and messages of all sizes.
//
//   engine_driver SEED OPERATIONS RANKS_PER_HOST REACH PROGRAM_OF_RANK_0 PROGRAM_OF_RANK_1 ...
//
// Ranks of one make-believe host share memory; others are connected by sockets. Messages are copied
// (REACH copy), or read where they lie, as threads do (share) or as processes do (read).
// Every result is checked. The programs are those of one algorithm (scripts/sanitize writes them).

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"

namespace {

using namespace rallypoint;

std::vector<std::int32_t> read_words(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::int32_t> words(bytes.size() / sizeof(std::int32_t));
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(std::int32_t));
  return words;
}

[[noreturn]] void give_up(const char* what, std::uint32_t rank, int step) {
  std::fprintf(stderr, "rank %u, step %d: %s\n", rank, step, what);
  std::abort();
}

// One operation in the background, with the memory that it uses.
struct Task : Work {
  Call call{};
  Transfer transfer;
  std::vector<std::int64_t> own;
  std::shared_ptr<std::byte> block;  // or in an arena
  std::span<std::int64_t> values;
  std::int64_t expected = 0;

  Task(std::uint64_t count, std::int64_t value, bool in_arena) {
    if (in_arena) {
      block = {Arena::instance().allocate(count * sizeof value),
               [](std::byte* at) { Arena::instance().release(at); }};
      values = {reinterpret_cast<std::int64_t*>(block.get()), count};
    } else {
      own.resize(count);
      values = own;
    }
    std::fill(values.begin(), values.end(), value);
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(values.data()); }
};

class Rank {
 public:
  Rank(int fd, std::uint32_t rank, std::uint32_t ranks, unsigned seed,
       const std::vector<tcp::PeerAddress>& peers)
      : rank_(rank), ranks_(ranks), common_(seed), own_(seed + rank + 1) {
    communicator_ = std::make_unique<Communicator>(fd, rank, ranks, WaitPolicy{0, 50}, peers);
  }

  void leave() { communicator_->leave(); }

  void set_reach(const std::string& reach) {
    communicator_->memory().reach = reach == "copy" ? 0 : kArenas | kPrivate;
    communicator_->memory().knows_itself = reach != "read";
    if (communicator_->memory().probe() != (kArenas | kPrivate)) give_up("no reach", rank_, 0);
  }

  void teach(const char* path) {
    const std::string error = communicator_->teach(0, read_words(path), rank_, ranks_, false);
    if (!error.empty()) give_up(error.c_str(), rank_, 0);
  }

  void run(int operations) {
    for (step_ = 0; step_ < operations; ++step_) {
      const unsigned kind = common_() % 4;
      const std::uint64_t count = size();
      if (kind == 3) {
        message(count);
      } else {
        all_reduce(count, kind != 0);
      }
      if (own_() % 8 == 0) std::this_thread::yield();
      if (tasks_.size() > 20 || own_() % 10 == 0) settle();
    }
    settle();
  }

 private:
  std::uint64_t size() {
    constexpr std::uint64_t kMost[] = {2, 13, 600, 5000, 40000};
    const std::uint64_t most = kMost[common_() % 5];
    return common_() % most;
  }

  bool in_arena() { return own_() % 2 == 0; }

  void all_reduce(std::uint64_t count, bool in_background) {
    auto task = std::make_shared<Task>(count, static_cast<std::int64_t>(rank_) + step_, in_arena());
    task->expected = static_cast<std::int64_t>(ranks_) * (ranks_ - 1) / 2 +
                     static_cast<std::int64_t>(ranks_) * step_;
    task->call = {communicator_->find(0),
                  {0, DType::int64, ReduceOp::sum, 0},
                  count,
                  task->data(),
                  task->data(),
                  60};
    NoHost host;
    if (!in_background) {
      if (communicator_->run(task->call, host) != Trouble::none) give_up("failed", rank_, step_);
      check(*task);
      return;
    }
    communicator_->submit(task->call, task, count > 4000, host);
    tasks_.push_back(std::move(task));
  }

  void message(std::uint64_t count) {
    const std::uint32_t from = common_() % ranks_;
    const std::uint32_t to = (from + 1 + common_() % (ranks_ - 1)) % ranks_;
    const auto tag = static_cast<std::int32_t>(common_() % 3);
    if (rank_ != from && rank_ != to) return;
    auto task = std::make_shared<Task>(count, rank_ == from ? step_ : -1, in_arena());
    task->expected = step_;
    const std::uint32_t peer = rank_ == from ? to : from;
    task->transfer = {.sends = rank_ == from,
                      .peer = peer,
                      .tag = tag,
                      .dtype = DType::int64,
                      .data = task->data(),
                      .bytes = count * sizeof(std::int64_t),
                      .timeout_s = 60};
    NoHost host;
    if (own_() % 3 == 0) {  // nothing else goes on then
      settle();
      if (communicator_->transfer(task->transfer, host) != Trouble::none) {
        give_up("failed in transfer", rank_, step_);
      }
      check(*task);
      return;
    }
    communicator_->post(task->transfer, task, host);
    tasks_.push_back(std::move(task));
  }

  void settle() {
    NoHost host;
    while (!tasks_.empty()) {
      const std::size_t at = own_() % tasks_.size();
      const auto task = tasks_[at];
      tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(at));
      const bool done = task->call.program != nullptr
                            ? communicator_->wait(*task, 1e9, host)
                            : communicator_->wait(task->transfer, *task, 1e9, host);
      if (!done || task->trouble() != Trouble::none) give_up("failed in wait", rank_, step_);
      check(*task);
    }
  }

  void check(const Task& task) {
    for (const std::int64_t value : task.values) {
      if (value != task.expected) give_up("wrong result", rank_, step_);
    }
  }

  std::uint32_t rank_;
  std::uint32_t ranks_;
  std::mt19937 common_;  // the same on all ranks
  std::mt19937 own_;
  int step_ = 0;
  std::unique_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<Task>> tasks_;
};

// For each rank, those on other hosts, two streams for data to each.
std::vector<std::vector<tcp::PeerAddress>> connect_hosts(std::uint32_t ranks,
                                                         std::uint32_t per_host) {
  std::vector<std::vector<tcp::PeerAddress>> peers(ranks);
  const auto pair = [] {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    return std::array{fds[0], fds[1]};
  };
  for (std::uint32_t one = 0; one < ranks; ++one) {
    for (std::uint32_t other = 0; other < one; ++other) {
      if (one / per_host == other / per_host) continue;
      const std::array ends{pair(), pair(), pair(), pair()};
      const auto address = [&](std::uint32_t rank, std::size_t end) {
        return tcp::PeerAddress{
            rank, getpid(), ends[0][end], ends[1][end], {ends[2][end], ends[3][end]}};
      };
      peers[one].push_back(address(other, 0));
      peers[other].push_back(address(one, 1));
    }
  }
  return peers;
}

int make_region(std::uint32_t ranks) {
  const int fd = memfd_create("engine_driver", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(Layout(ranks).bytes())) != 0) std::abort();
  return fd;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  const auto seed = static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10));
  const int operations = std::atoi(argv[2]);
  const auto per_host = static_cast<std::uint32_t>(std::atoi(argv[3]));
  const auto ranks = static_cast<std::uint32_t>(argc - 5);
  const auto peers = connect_hosts(ranks, per_host);
  // All of them write a flight record, which costs nothing more to check.
  const int record = memfd_create("test", 0);
  if (ftruncate(record, kRecordPages * kRecordPage) != 0 || !open_flight_record(record, 0, "{}")) {
    return 3;
  }
  std::vector<std::unique_ptr<Rank>> all;
  int fd = -1;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    if (rank % per_host == 0) fd = make_region(ranks);
    all.push_back(std::make_unique<Rank>(fd, rank, ranks, seed, peers[rank]));
    all.back()->teach(argv[5 + rank]);
  }
  for (auto& rank : all) rank->set_reach(argv[4]);
  std::vector<std::thread> threads;
  for (auto& rank : all) {
    threads.emplace_back([&rank, operations] {
      rank->run(operations);
      rank->leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d operations of %u ranks, %u on a host, %s, seed %u\n", operations, ranks, per_host,
              argv[4], seed);
}
