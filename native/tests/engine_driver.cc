// Ranks as threads of one process run random operations, for the sanitizers: collectives of several
// groups, in the calling thread and in the background, and messages of all sizes.
//
//   engine_driver SEED OPERATIONS RANKS RANKS_PER_HOST REACH FOLDER COLLECTIVE.ALGORITHM ...
//
// Ranks of one pretended host share memory; others are connected by sockets, or (REACH adverse) by
// a transport that does whatever its contract permits. Messages are copied (REACH copy), or read in
// place, as threads do (share) or as processes do (read). Every result is checked. FOLDER has the
// encoded programs, COLLECTIVE.ALGORITHM.RANKS.RANK (scripts/sanitize writes them).

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
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "engine/tcp/transports.h"
#include "tests/adverse_transport.h"

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

// What a rank contributes to a step, for the given rank if each gets different data.
std::int64_t value_of(std::uint32_t rank, int step, std::uint32_t to = 0) {
  return 1000 * std::int64_t{rank} + 7 * std::int64_t{step} + to;
}

// Items of an operation: from the heap, or in an arena.
class Items {
 public:
  Items() = default;
  Items(std::uint64_t count, bool in_arena) {
    if (in_arena) {
      block_ = {Arena::instance().allocate(count * sizeof(std::int64_t)),
                [](std::byte* at) { Arena::instance().release(at); }};
      values_ = {reinterpret_cast<std::int64_t*>(block_.get()), count};
    } else {
      own_.resize(count);
      values_ = own_;
    }
  }
  std::span<std::int64_t> block(std::uint32_t number, std::uint64_t count) const {
    return values_.subspan(number * count, count);
  }
  std::span<std::int64_t> values() const { return values_; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(values_.data()); }

 private:
  std::vector<std::int64_t> own_;
  std::shared_ptr<std::byte> block_;
  std::span<std::int64_t> values_;
};

// One operation, with the memory that it uses and what is to be there at the end.
struct Task : Work {
  Call call{};
  Transfer transfer;
  Items input;
  Items output;
  std::uint64_t count = 0;             // items of a block
  std::vector<std::int64_t> expected;  // in each block of the output
};

enum class Kind : std::uint16_t { all_reduce, broadcast, all_gather, reduce_scatter, all_to_all };

std::optional<Kind> kind_of(const std::string& name) {
  constexpr const char* kNames[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                    "all_to_all"};
  for (std::uint16_t i = 0; i < std::size(kNames); ++i) {
    if (name.starts_with(std::string(kNames[i]) + ".")) return static_cast<Kind>(i);
  }
  return std::nullopt;
}

// A rank's part in a group.
class Group {
 public:
  Group(int fd, std::uint32_t rank, std::uint32_t ranks, const std::vector<FarRank>& far,
        const MakeTransports& connect)
      : rank_(rank), ranks_(ranks) {
    communicator_ =
        std::make_unique<Communicator>(fd, rank, ranks, WaitPolicy{0, 50}, far, connect);
  }

  void set_reach(const std::string& reach) {
    communicator_->memory().reach = reach == "copy" ? 0 : kArenas | kPrivate | kAlways;
    communicator_->memory().knows_itself = reach != "read";
    if (communicator_->memory().probe() != (kArenas | kPrivate | kAlways))
      give_up("no reach", rank_, 0);
  }

  void teach(const std::string& folder, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const std::string path =
          folder + "/" + name + "." + std::to_string(ranks_) + "." + std::to_string(rank_);
      const std::string error =
          communicator_->teach(kinds_.size(), read_words(path.c_str()), rank_, ranks_, false);
      if (!error.empty()) give_up((path + ": " + error).c_str(), rank_, 0);
      kinds_.push_back(*kind_of(name));
    }
  }

  void leave() { communicator_->leave(); }
  std::size_t size() const { return tasks_.size(); }

  // `common` is the same on all ranks of the group, `own` is not.
  void begin(int step, std::mt19937& common, std::mt19937& own) {
    constexpr std::uint64_t kMost[] = {2, 13, 600, 5000, 40000};
    const std::uint64_t count = common() % kMost[common() % std::size(kMost)];
    if (common() % 4 == 0) {
      message(step, count, common, own);
    } else {
      collective(step, count, common, own);
    }
  }

  // Wait for all operations in progress, in any order.
  void settle(int step, std::mt19937& own) {
    NoHost host;
    while (!tasks_.empty()) {
      const std::size_t at = own() % tasks_.size();
      const auto task = tasks_[at];
      tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(at));
      const bool done = task->call.program != nullptr
                            ? communicator_->wait(*task, 1e9, host)
                            : communicator_->wait(task->transfer, *task, 1e9, host);
      if (!done || task->trouble() != Trouble::none) give_up("failed in wait", rank_, step);
      check(*task, step);
    }
  }

 private:
  void collective(int step, std::uint64_t count, std::mt19937& common, std::mt19937& own) {
    const std::size_t program = common() % kinds_.size();
    const bool in_background = common() % 3 != 0;
    const Kind kind = kinds_[program];
    const bool takes_all = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
    const bool gives_all = kind == Kind::all_gather || kind == Kind::all_to_all;
    const bool in_place = kind == Kind::all_reduce && common() % 2 == 0;
    auto task = std::make_shared<Task>();
    task->count = count;
    task->input = Items(count * (takes_all ? ranks_ : 1), own() % 2 == 0);
    if (!in_place) task->output = Items(count * (gives_all ? ranks_ : 1), own() % 2 == 0);
    for (std::uint32_t to = 0; to < (takes_all ? ranks_ : 1); ++to) {
      std::ranges::fill(task->input.block(to, count), value_of(rank_, step, to));
    }
    task->expected = expected(kind, step);
    task->call = {communicator_->find(program),
                  {static_cast<std::uint16_t>(kind), DType::int64, ReduceOp::sum, 0},
                  count,
                  task->input.data(),
                  (in_place ? task->input : task->output).data(),
                  60};
    NoHost host;
    if (in_background) {
      communicator_->submit(task->call, task, count > 4000, host);
      tasks_.push_back(std::move(task));
    } else {
      if (communicator_->run(task->call, host) != Trouble::none) give_up("failed", rank_, step);
      check(*task, step);
    }
  }

  std::vector<std::int64_t> expected(Kind kind, int step) const {
    std::int64_t sum = 0;
    const std::uint32_t to = kind == Kind::reduce_scatter || kind == Kind::all_to_all ? rank_ : 0;
    std::vector<std::int64_t> all;
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      all.push_back(value_of(rank, step, to));
      sum += all.back();
    }
    if (kind == Kind::all_gather || kind == Kind::all_to_all) return all;
    return {kind == Kind::broadcast ? all[0] : sum};
  }

  void message(int step, std::uint64_t count, std::mt19937& common, std::mt19937& own) {
    const std::uint32_t from = common() % ranks_;
    const std::uint32_t to = (from + 1 + common() % (ranks_ - 1)) % ranks_;
    const auto tag = static_cast<std::int32_t>(common() % 3);
    if (rank_ != from && rank_ != to) return;
    auto task = std::make_shared<Task>();
    task->count = count;
    task->input = Items(count, own() % 2 == 0);
    std::ranges::fill(task->input.values(), rank_ == from ? value_of(from, step) : -1);
    task->expected = {value_of(from, step)};
    task->transfer = {.sends = rank_ == from,
                      .peer = rank_ == from ? to : from,
                      .tag = tag,
                      .dtype = DType::int64,
                      .data = task->input.data(),
                      .bytes = count * sizeof(std::int64_t),
                      .timeout_s = 60};
    if (own() % 3 == 0) {  // nothing else of the group is in progress then
      settle(step, own);
      NoHost host;
      if (communicator_->transfer(task->transfer, host) != Trouble::none) {
        give_up("failed in transfer", rank_, step);
      }
      check(*task, step);
      return;
    }
    communicator_->post(task->transfer, task);
    tasks_.push_back(std::move(task));
  }

  void check(const Task& task, int step) {
    const bool is_apart = task.output.data() != nullptr && task.call.program != nullptr;
    const Items& result = is_apart ? task.output : task.input;
    for (std::uint32_t block = 0; block < task.expected.size(); ++block) {
      for (const std::int64_t value : result.block(block, task.count)) {
        if (value != task.expected[block]) give_up("wrong result", rank_, step);
      }
    }
  }

  std::uint32_t rank_;
  std::uint32_t ranks_;
  std::unique_ptr<Communicator> communicator_;
  std::vector<Kind> kinds_;  // by program
  std::vector<std::shared_ptr<Task>> tasks_;
};

// The groups that a rank is in, and its number among all.
struct Rank {
  std::uint32_t number;
  std::vector<std::unique_ptr<Group>> groups;  // null: it is not in that one

  void run(int operations, unsigned seed) {
    std::mt19937 common(seed);
    std::mt19937 own(seed + number + 1);
    for (int step = 0; step < operations; ++step) {
      Group* const group = groups[common() % groups.size()].get();
      std::mt19937 choices(common());  // ranks outside the group must stay in step, too
      if (group == nullptr) continue;
      group->begin(step, choices, own);
      if (own() % 8 == 0) std::this_thread::yield();
      if (group->size() > 20 || own() % 10 == 0) group->settle(step, own);
    }
    for (auto& group : groups) {
      if (group == nullptr) continue;
      group->settle(operations, own);
      group->leave();
    }
  }
};

// For each member of a group, those on other hosts, two streams for data to each.
std::vector<std::vector<tcp::PeerAddress>> connect_hosts(const std::vector<std::uint32_t>& members,
                                                         std::uint32_t per_host) {
  std::vector<std::vector<tcp::PeerAddress>> peers(members.size());
  const auto pair = [] {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    return std::array{fds[0], fds[1]};
  };
  for (std::uint32_t one = 0; one < members.size(); ++one) {
    for (std::uint32_t other = 0; other < one; ++other) {
      if (members[one] / per_host == members[other] / per_host) continue;
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

void form(const std::vector<std::uint32_t>& members, std::uint32_t per_host, bool adverse,
          unsigned seed, const std::string& reach, const std::string& folder,
          const std::vector<std::string>& programs, std::vector<Rank>& ranks) {
  const auto size = static_cast<std::uint32_t>(members.size());
  const auto peers = connect_hosts(members, per_host);
  const auto network = std::make_shared<tests::AdverseNetwork>(size, seed);
  std::map<std::uint32_t, int> regions;  // by host
  for (Rank& rank : ranks) rank.groups.emplace_back();
  for (std::uint32_t i = 0; i < size; ++i) {
    const std::uint32_t host = members[i] / per_host;
    if (!regions.contains(host)) regions[host] = make_region(size);
    ranks[members[i]].groups.back() = std::make_unique<Group>(
        regions[host], i, size, tcp::ranks_of(peers[i]),
        adverse ? tests::adverse_transports(network) : tcp::transports_to(peers[i]));
  }
  for (const std::uint32_t member : members) {
    ranks[member].groups.back()->set_reach(reach);
    ranks[member].groups.back()->teach(folder, programs);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return 2;
  const auto seed = static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10));
  const int operations = std::atoi(argv[2]);
  const auto size = static_cast<std::uint32_t>(std::atoi(argv[3]));
  const auto per_host = static_cast<std::uint32_t>(std::atoi(argv[4]));
  const bool adverse = std::string(argv[5]) == "adverse";
  const std::string reach = adverse ? "copy" : argv[5];
  const std::vector<std::string> programs(argv + 7, argv + argc);
  for (const std::string& name : programs) {
    if (!kind_of(name)) return 2;
  }
  // All ranks write a flight record, whose checking costs nothing more.
  const int record = memfd_create("test", 0);
  if (ftruncate(record, kRecordPages * kRecordPage) != 0 || !open_flight_record(record, 0, "{}")) {
    return 3;
  }
  std::vector<Rank> ranks(size);
  std::vector<std::uint32_t> everyone;
  std::vector<std::uint32_t> odd;
  for (std::uint32_t i = 0; i < size; ++i) {
    ranks[i].number = i;
    everyone.push_back(i);
    if (i % 2 == 1) odd.push_back(i);
  }
  for (const auto& members : {everyone, odd, everyone}) {
    form(members, per_host, adverse, seed, reach, argv[6], programs, ranks);
  }
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    threads.emplace_back([&rank, operations, seed] { rank.run(operations, seed); });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d operations of %u ranks, %u on a host, %s, seed %u\n", operations, size, per_host,
              argv[5], seed);
}
