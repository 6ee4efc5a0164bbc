#include "engine/long_wait.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <mutex>

#include "engine/process.h"
#include "engine/waiting.h"

namespace rallypoint {
namespace {

// Where long waits are reported. A program may close the descriptor, and open another file under
// its number.
struct Launcher {
  std::mutex mutex;
  int fd = -1;
  dev_t device = 0;
  ino_t inode = 0;
  std::atomic<std::uint64_t> after_ns{0};  // 0: never
  std::atomic<double> times_usual{0};
};

Launcher& launcher() {
  static constinit PerProcess<Launcher> state;
  return state.get();
}

void send(std::uint64_t waited_ns, bool is_over) {
  Launcher& to = launcher();
  const std::lock_guard lock(to.mutex);
  struct stat status{};
  if (to.fd < 0 || fstat(to.fd, &status) != 0) return;
  if (status.st_dev != to.device || status.st_ino != to.inode) return;
  // Formatted by hand, because a program's locale may write 30,5.
  const auto ms = static_cast<unsigned long long>(waited_ns / 1'000'000);
  char packet[96];
  const int length = std::snprintf(
      packet, sizeof packet, R"({"v": 1, "kind": "wait", "seconds": %llu.%03llu, "is_over": %s})",
      ms / 1000, ms % 1000, is_over ? "true" : "false");
  ::send(to.fd, packet, static_cast<std::size_t>(length), MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

void tell_long_waits(int fd, double after_s, double times_usual) {
  Launcher& to = launcher();
  const std::lock_guard lock(to.mutex);
  struct stat status{};
  if (fd < 0 || fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return;
  to.fd = fd;
  to.device = status.st_dev;
  to.inode = status.st_ino;
  to.times_usual.store(times_usual);
  to.after_ns.store(static_cast<std::uint64_t>(std::clamp(after_s, 0.0, 1e9) * 1e9));
}

void UsualWait::add(std::uint64_t waited_ns) {
  second_ns_ = std::max(second_ns_, std::min(longest_ns_, waited_ns));
  longest_ns_ = std::max(longest_ns_, waited_ns);
}

bool LongWait::look(std::uint64_t since_ns, const UsualWait& usual) {
  if (since_ns != since_ns_) {
    const std::uint64_t after_ns = launcher().after_ns.load(std::memory_order_relaxed);
    since_ns_ = since_ns;
    due_ns_ = after_ns == 0 || since_ns == 0 ? std::numeric_limits<std::uint64_t>::max()
                                             : since_ns + after_ns;
  }
  const std::uint64_t now_ns = coarse_now_ns();
  if (now_ns < due_ns_) return false;
  const std::uint64_t waited_ns = now_ns - since_ns_;
  const auto least_ns = static_cast<std::uint64_t>(
      launcher().times_usual.load(std::memory_order_relaxed) * static_cast<double>(usual.ns()));
  if (waited_ns < least_ns) {
    due_ns_ = since_ns_ + least_ns;
    return false;
  }
  due_ns_ = since_ns_ + 2 * waited_ns;
  told_since_ns_ = since_ns_;
  send(waited_ns, false);
  return true;
}

void LongWait::over() {
  since_ns_ = 0;
  if (told_since_ns_ == 0) return;
  send(coarse_now_ns() - told_since_ns_, true);
  told_since_ns_ = 0;
}

}  // namespace rallypoint
