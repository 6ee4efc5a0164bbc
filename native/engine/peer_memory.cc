#include "engine/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr int kAttempts = 20;  // while the system is short of memory
constexpr unsigned kAttemptUs = 1000;
constexpr std::size_t kMostParts = 64;  // that one call reads
// Of arenas; above this, they are dropped and mapped again on demand.
constexpr std::size_t kMostViews = 256;

// 0, or an error number.
int read_memory(pid_t pid, std::uint64_t address, std::byte* target, std::uint64_t bytes) {
  for (int attempts = 0; bytes > 0;) {
    const iovec local{target, bytes};
    const iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t count = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == ENOMEM && ++attempts < kAttempts) {
      usleep(kAttemptUs);
      continue;
    }
    if (count <= 0) return count < 0 ? errno : EFAULT;
    target += count;
    address += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::uint64_t>(count);
  }
  return 0;
}

// At most kMostParts at once. What that cannot read is read part by part.
int read_parts(pid_t pid, std::span<const RemotePart> parts) {
  iovec local[kMostParts];
  iovec remote[kMostParts];
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    local[i] = {parts[i].target, parts[i].bytes};
    remote[i] = {reinterpret_cast<void*>(parts[i].address), parts[i].bytes};
    bytes += parts[i].bytes;
  }
  const ssize_t count = process_vm_readv(pid, local, parts.size(), remote, parts.size(), 0);
  if (count >= 0 && static_cast<std::uint64_t>(count) == bytes) return 0;
  for (const auto& [address, target, size] : parts) {
    if (const int error = read_memory(pid, address, target, size)) return error;
  }
  return 0;
}

Trouble trouble_of(int error) {
  if (error == 0) return Trouble::none;
  return error == ESRCH ? Trouble::peer_lost : Trouble::unreadable;
}

}  // namespace

PeerMemory::PeerMemory(Region& region)
    : region_(region), pid_(getpid()), word_(static_cast<std::uint64_t>(pid_)) {
  region.state(region.rank()).word_at.store(reinterpret_cast<std::uint64_t>(&word_));
}

// Where Yama restricts reading to ancestors, permit all descendants of this rank's parent to read,
// as its peers do. Elsewhere this has no effect.
void PeerMemory::let_peers_read() {
  if (const pid_t parent = getppid(); parent > 1) prctl(PR_SET_PTRACER, parent, 0, 0, 0);
}

// Opening a file of a process's table needs the same permission as reading its working directory.
PeerMemoryAccess PeerMemory::probe() const {
  PeerMemoryAccess found = kArenas | kPrivate | kAlways;
  for (std::uint32_t rank = 0; rank < region_.ranks(); ++rank) {
    if (rank == region_.rank() || region_.is_far(rank) || is_own(rank)) continue;
    const pid_t pid = pid_of(rank);
    std::uint64_t word = 0;
    const int error = read_memory(pid, region_.state(rank).word_at.load(),
                                  reinterpret_cast<std::byte*>(&word), sizeof word);
    if (error != 0 || word != static_cast<std::uint64_t>(pid)) found &= ~(kPrivate | kAlways);
    char path[64];
    char target;
    std::snprintf(path, sizeof path, "/proc/%d/cwd", static_cast<int>(pid));
    if (readlink(path, &target, 1) < 0) found &= ~kArenas;
  }
  return found;
}

bool PeerMemory::can_expose(const std::byte* at) const {
  std::byte first{};
  return read_memory(pid_, reinterpret_cast<std::uint64_t>(at), &first, 1) == 0;
}

Place PeerMemory::place_of(const std::byte* at, std::uint64_t bytes) const {
  Place place{reinterpret_cast<std::uint64_t>(at), {}};
  if (!Arena::instance().locate(at, bytes, place.arena)) place.arena = {};
  return place;
}

const std::byte* PeerViews::find(std::uint32_t rank, const Place& place, std::uint64_t bytes) {
  if (memory_.is_own(rank)) return reinterpret_cast<const std::byte*>(place.address);
  if (place.arena.segment == 0) return nullptr;
  const View view = view_of(rank, place.arena);
  if (view.base == nullptr || place.arena.offset > view.bytes ||
      bytes > view.bytes - place.arena.offset) {
    return nullptr;
  }
  return view.base.get() + place.arena.offset;
}

PeerViews::View PeerViews::view_of(std::uint32_t rank, const ArenaPlace& place) {
  const std::tuple file{rank, place.device, place.segment};
  const auto known = views_.find(file);
  if (known != views_.end()) return known->second;
  View view;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", static_cast<int>(memory_.pid_of(rank)),
                place.fd);
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return view;
  struct stat status{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool is_sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (fstat(fd, &status) == 0 && status.st_ino == place.segment && status.st_dev == place.device &&
      (is_sealed || status.st_nlink == 0)) {  // adopted memory cannot be sealed
    const auto bytes = static_cast<std::size_t>(status.st_size);
    void* const base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) {
      view.base = {static_cast<const std::byte*>(base),
                   [bytes](const std::byte* at) { munmap(const_cast<std::byte*>(at), bytes); }};
      view.bytes = bytes;
    }
  }
  close(fd);
  // A failure may be temporary: the process may have been out of descriptors.
  if (view.base != nullptr) views_[file] = view;
  return view;
}

void PeerViews::trim() {
  if (views_.size() > kMostViews) views_.clear();
}

Trouble PeerMemory::read(std::uint32_t rank, std::uint64_t address, std::byte* target,
                         std::uint64_t bytes) const {
  return trouble_of(read_memory(pid_of(rank), address, target, bytes));
}

Trouble PeerMemory::read(std::uint32_t rank, std::span<const RemotePart> parts) const {
  int error = 0;
  while (error == 0 && !parts.empty()) {
    const std::size_t count = std::min(parts.size(), kMostParts);
    error = read_parts(pid_of(rank), parts.first(count));
    parts = parts.subspan(count);
  }
  return trouble_of(error);
}

}  // namespace rallypoint
