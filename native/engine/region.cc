#include "engine/region.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/process.h"
#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr double kDetailsS = 0.2;  // writing them takes microseconds
constexpr unsigned kDetailsLookUs = 100;

// Ranks that are threads of one process share a mapping: the thread sanitizer could not follow
// communication through two.
std::shared_ptr<std::byte> map(int fd, const struct stat& status) {
  struct Mappings {
    std::mutex mutex;
    std::map<std::pair<dev_t, ino_t>, std::weak_ptr<std::byte>> by_file;
  };
  static constinit PerProcess<Mappings> of_process;
  Mappings& mappings = of_process.get();
  const std::lock_guard lock(mappings.mutex);
  std::erase_if(mappings.by_file, [](const auto& entry) { return entry.second.expired(); });
  auto& known = mappings.by_file[{status.st_dev, status.st_ino}];
  if (auto mapping = known.lock()) return mapping;
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  std::shared_ptr<std::byte> mapping(static_cast<std::byte*>(base),
                                     [bytes](std::byte* at) { munmap(at, bytes); });
  known = mapping;
  return mapping;
}

// Memory of this process alone, of which only touched pages count.
std::shared_ptr<std::byte> map_private(std::size_t bytes) {
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  return {static_cast<std::byte*>(base), [bytes](std::byte* at) { munmap(at, bytes); }};
}

}  // namespace

Region::Region(int fd, std::uint32_t rank, std::uint32_t ranks,
               const std::vector<std::uint32_t>& far)
    : rank_(rank), ranks_(ranks), layout_(ranks), far_(ranks), is_lost_(ranks) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (static_cast<std::size_t>(status.st_size) != layout_.bytes()) {
    throw std::runtime_error("the shared region has the wrong size");
  }
  mapping_ = map(fd, status);
  base_ = mapping_.get();
  if (!far.empty()) mirror_ = map_private(layout_.bytes());
  for (const std::uint32_t other : far) far_[other] = true;
  for (std::uint32_t i = 0; i < ranks; ++i) states_.push_back(at<RankState>(i, layout_.state(i)));
  for (const std::uint32_t other : far) {
    state(other).presence.store(static_cast<std::uint32_t>(Presence::here));
  }

  auto& header = *reinterpret_cast<Header*>(base_);
  std::uint32_t first = 0;  // of this host
  while (far_[first]) ++first;
  if (rank == first) {
    header.magic = kMagic;
    header.version = kLayoutVersion;
    header.ranks = ranks;
  } else if (header.magic != kMagic || header.version != kLayoutVersion || header.ranks != ranks) {
    throw std::runtime_error(
        "the shared region was made by another version of Rallypoint or for another group");
  }
  if constexpr (kFirstOrdinal != 0) {
    state(rank).bell.store(static_cast<std::uint32_t>(kFirstOrdinal));
    for (unsigned i = 0; i <= kEnvelopes; ++i) {
      Parts& parts = at<Parts>(rank, layout_.parts(rank))[i];
      parts.written.store(static_cast<std::uint32_t>(kFirstOrdinal));
      parts.taken.store(static_cast<std::uint32_t>(kFirstOrdinal));
    }
  }
  state(rank).pid.store(getpid());
  state(rank).presence.store(static_cast<std::uint32_t>(Presence::here), std::memory_order_release);
}

Region::~Region() { leave(); }

int Region::watch_peers() {
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_ || far_[rank]) continue;
    const std::int32_t pid = state(rank).pid.load();
    if (pid == 0) return static_cast<int>(rank);
    if (pid == getpid()) continue;  // ranks may be threads of one process
    if (!processes_.add(rank, pid) && presence(rank) != Presence::left) {
      return static_cast<int>(rank);
    }
  }
  return -1;
}

void Region::lose(std::uint32_t rank) {
  is_lost_[rank].store(true);
  int none = -1;
  lost_far_.compare_exchange_strong(none, static_cast<int>(rank));
  wake_self();
}

int Region::first_lost() {
  if (const int lost = lost_far_.load(); lost >= 0) return lost;
  for (const std::uint32_t rank : processes_.ended()) {
    if (presence(rank) == Presence::here) return static_cast<int>(rank);
  }
  return -1;
}

std::vector<std::uint32_t> Region::gone() const {
  std::vector<bool> is_gone(ranks_);
  for (const std::uint32_t rank : processes_.ended()) is_gone[rank] = true;
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    if (is_gone[rank] || is_lost_[rank].load() || presence(rank) == Presence::left) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void Region::say_core() const {
  const auto core = static_cast<std::uint32_t>(sched_getcpu() + 1);
  auto& said = state(rank_).core;
  if (said.load(std::memory_order_relaxed) != core) said.store(core, std::memory_order_relaxed);
}

bool Region::is_elsewhere(std::uint32_t rank) const {
  if (rank >= ranks_ || far_[rank]) return false;
  const std::uint32_t core = state(rank).core.load(std::memory_order_relaxed);
  return core != 0 && core != state(rank_).core.load(std::memory_order_relaxed);
}

bool Region::is_here(std::uint32_t rank) const {
  if (rank >= ranks_ || far_[rank]) return false;
  const std::uint32_t core = state(rank).core.load(std::memory_order_relaxed);
  return core != 0 && core == state(rank_).core.load(std::memory_order_relaxed);
}

void Region::leave() {
  state(rank_).presence.store(static_cast<std::uint32_t>(Presence::left),
                              std::memory_order_release);
  fence();
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) wake(rank);
}

void Region::ring(std::uint32_t rank) const {
  auto& bell = state(rank).bell;
  bell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void copy_record(CallRecord& to, const CallRecord& from) {
  to.number.store(from.number.load(std::memory_order_acquire), std::memory_order_relaxed);
  to.signature.store(from.signature.load(std::memory_order_relaxed), std::memory_order_relaxed);
  to.count = from.count;
  to.collective = from.collective;
  to.reduce_op = from.reduce_op;
  to.dtype = from.dtype;
  to.root = from.root;
}

void Region::spread(Trouble trouble, std::int32_t culprit, const CallRecord* theirs,
                    const CallRecord* ours, std::uint64_t sent, std::uint64_t expected,
                    double timeout_s) {
  if (!begin_poison({trouble, static_cast<std::uint32_t>(culprit), rank_})) return;
  Poison& shared = poison();
  shared.sent = sent;
  shared.expected = expected;
  shared.timeout_s = timeout_s;
  if (theirs != nullptr) copy_record(shared.theirs, *theirs);
  if (ours != nullptr) copy_record(shared.ours, *ours);
  end_poison();
}

void Region::spread_circle(const std::vector<CircleMember>& members) {
  if (!begin_poison({Trouble::circle, members[0].peer, rank_})) return;
  Poison& shared = poison();
  shared.circle_size = static_cast<std::uint32_t>(members.size());
  for (std::size_t i = 0; i < members.size() && i < kMostInCircle; ++i) {
    shared.circle[i] = members[i];
  }
  end_poison();
}

void Region::adopt(const Poison& theirs) {
  if (!begin_poison(Blame::unpacked(theirs.blame.load()))) return;
  Poison& shared = poison();
  shared.sent = theirs.sent;
  shared.expected = theirs.expected;
  shared.timeout_s = theirs.timeout_s;
  copy_record(shared.theirs, theirs.theirs);
  copy_record(shared.ours, theirs.ours);
  shared.circle_size = theirs.circle_size;
  std::copy_n(theirs.circle, kMostInCircle, shared.circle);
  end_poison(false);
}

bool Region::begin_poison(const Blame& blame) {
  std::uint64_t none = 0;
  const bool is_first = poison().blame.compare_exchange_strong(none, blame.packed());
  std::atomic_thread_fence(std::memory_order_release);  // as in poisoned()
  return is_first;
}

bool Region::await_details() const {
  for (const double until_s = now_s() + kDetailsS; now_s() < until_s; usleep(kDetailsLookUs)) {
    if (poison().is_complete.load(std::memory_order_acquire) != 0) return true;
  }
  return poison().is_complete.load(std::memory_order_acquire) != 0;
}

void Region::end_poison(bool tells_others) {
  poison().is_complete.store(1, std::memory_order_release);
  if (tells_others && messenger_ != nullptr) messenger_->spread(poison());
  fence();
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) wake(rank);
}

}  // namespace rallypoint
