#include "engine/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace rallypoint {
namespace {

const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t kSegmentBytes = 64 << 20;
constexpr std::size_t kMost = std::size_t{1} << 46;

std::size_t up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// -1 if the system refuses it. Sealed where it can be, so that a process that has mapped it never
// finds it shorter than it was.
int make_file(std::size_t bytes) {
  const int fd = memfd_create("rallypoint-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    return -1;
  }
  fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW);
  return fd;
}

}  // namespace

// Never destroyed: arrays may live until the process ends. A child after fork still has its
// parent's arrays, but may not give their memory back.
Arena& Arena::instance() {
  static Arena* const arena = [] {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().segments_.clear();
                     instance().mutex_.unlock();
                   });
    return new Arena;
  }();
  return *arena;
}

std::byte* Arena::allocate(std::size_t bytes) {
  if (bytes > kMost) return nullptr;
  const std::size_t needed = std::max(up(bytes), kPage);
  const std::lock_guard lock(mutex_);
  for (auto& [base, segment] : segments_) {
    if (std::byte* const at = take(base, segment, needed)) return at;
  }
  const auto added = add_segment(std::max(needed, kSegmentBytes));
  return added == segments_.end() ? nullptr : take(added->first, added->second, needed);
}

std::byte* Arena::take(std::byte* base, Segment& segment, std::size_t bytes) {
  for (auto hole = segment.free.begin(); hole != segment.free.end(); ++hole) {
    const auto [offset, length] = *hole;
    if (length < bytes) continue;
    segment.free.erase(hole);
    if (length > bytes) segment.free[offset + bytes] = length - bytes;
    segment.used[offset] = bytes;
    return base + offset;
  }
  return nullptr;
}

Arena::Segments::iterator Arena::add_segment(std::size_t bytes) {
  const int fd = make_file(bytes);
  struct stat status{};
  if (fd >= 0) fstat(fd, &status);
  const int flags = MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) {
    if (fd >= 0) close(fd);
    return segments_.end();
  }
  madvise(base, bytes, MADV_HUGEPAGE);
  Segment segment{fd, status.st_ino, status.st_dev, bytes, {{0, bytes}}, {}};
  return segments_.emplace(static_cast<std::byte*>(base), std::move(segment)).first;
}

// The pages go back to the system, even if others have mapped them. One empty segment is kept.
void Arena::release(std::byte* at) {
  if (at == nullptr) return;
  const std::lock_guard lock(mutex_);
  auto found = segments_.upper_bound(at);
  if (found == segments_.begin()) return;  // memory of the parent
  auto& [base, segment] = *--found;
  const auto block = segment.used.find(static_cast<std::size_t>(at - base));
  if (block == segment.used.end()) return;
  const auto [offset, bytes] = *block;
  segment.used.erase(block);
  give_back(base, segment, offset, bytes);
  if (!segment.used.empty() || segments_.size() == 1) return;
  munmap(base, segment.bytes);
  if (segment.fd >= 0) close(segment.fd);
  segments_.erase(found);
}

void Arena::give_back(std::byte* base, Segment& segment, std::size_t offset, std::size_t bytes) {
  if (madvise(base + offset, bytes, MADV_REMOVE) != 0) std::memset(base + offset, 0, bytes);
  auto next = segment.free.lower_bound(offset);
  if (next != segment.free.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = segment.free.erase(next);
  }
  if (next != segment.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  segment.free[offset] = bytes;
}

bool Arena::adopt(std::byte* base, std::size_t bytes, int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || status.st_nlink != 0 ||
      static_cast<std::size_t>(status.st_size) < bytes) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  if (segments_.contains(base)) return false;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return false;
  segments_.emplace(base, Segment{own, status.st_ino, status.st_dev, bytes, {}, {}, true});
  return true;
}

void Arena::abandon(std::byte* base, bool is_used) {
  const std::lock_guard lock(mutex_);
  const auto found = segments_.find(base);
  if (found == segments_.end() || !found->second.is_adopted) return;  // or memory of the parent
  const auto bytes = static_cast<off_t>(found->second.bytes);
  if (!is_used) fallocate(found->second.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes);
  close(found->second.fd);
  segments_.erase(found);
}

bool Arena::locate(const std::byte* at, std::size_t bytes, ArenaPlace& place) const {
  const std::lock_guard lock(mutex_);
  auto found = segments_.upper_bound(const_cast<std::byte*>(at));
  if (found == segments_.begin()) return false;
  const auto& [base, segment] = *--found;
  const auto offset = static_cast<std::size_t>(at - base);
  if (segment.fd < 0 || offset > segment.bytes || bytes > segment.bytes - offset) return false;
  place = {segment.inode, segment.device, offset, segment.fd};
  return true;
}

}  // namespace rallypoint
