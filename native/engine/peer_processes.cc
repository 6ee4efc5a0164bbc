#include "engine/peer_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "engine/process.h"

// Of all architectures; headers before 5.3 lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace rallypoint {
namespace {

struct Line {
  char state;  // 0: there is none
  std::uint64_t started;
};

// What /proc says of a process. The name before the state may hold spaces and brackets itself.
Line read_line(pid_t pid) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char text[1024];
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return {};
  text[got] = '\0';
  const char* const name_end = std::strrchr(text, ')');
  Line line{};
  unsigned long long started = 0;
  constexpr const char* kFields =
      " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
  if (name_end != nullptr && std::sscanf(name_end + 1, kFields, &line.state, &started) == 2) {
    line.started = started;
  }
  return line;
}

bool is_over(char state) { return state == 'Z' || state == 'X' || state == 'x'; }

bool has_number(pid_t pid) { return kill(pid, 0) == 0 || errno != ESRCH; }

bool has_ended(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

// Null, with errno, if the system grants none. One whose process has ended is not given out again:
// another process may have its number now.
std::shared_ptr<const int> pidfd_of(pid_t pid) {
  struct Pidfds {
    std::mutex mutex;
    std::map<pid_t, std::weak_ptr<const int>> by_pid;
  };
  static constinit PerProcess<Pidfds> of_process;
  Pidfds& pidfds = of_process.get();
  const std::lock_guard lock(pidfds.mutex);
  std::erase_if(pidfds.by_pid, [](const auto& entry) { return entry.second.expired(); });
  const auto known = pidfds.by_pid.find(pid);
  if (known != pidfds.by_pid.end()) {
    auto pidfd = known->second.lock();
    if (pidfd != nullptr && !has_ended(*pidfd)) return pidfd;
  }
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return nullptr;
  std::shared_ptr<const int> pidfd(new int(own(fd)), [](const int* owned) {
    close_owned(*owned);
    delete owned;
  });
  pidfds.by_pid[pid] = pidfd;
  return pidfd;
}

}  // namespace

bool PeerProcesses::add(std::uint32_t rank, pid_t pid) {
  if (auto pidfd = pidfd_of(pid)) {
    watched_.push_back({rank, std::move(pidfd)});
    return true;
  }
  if (errno == ESRCH) return false;
  const Line line = read_line(pid);
  if (is_over(line.state) || !has_number(pid)) return false;
  unwatched_.push_back({rank, pid, line.started});
  return true;
}

std::vector<std::uint32_t> PeerProcesses::ended() const {
  std::vector<std::uint32_t> found;
  std::vector<pollfd> polled;
  polled.reserve(watched_.size());
  for (const Watched& each : watched_) polled.push_back({*each.pidfd, POLLIN, 0});
  if (poll(polled.data(), polled.size(), 0) > 0) {
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) found.push_back(watched_[i].rank);
    }
  }
  for (const Unwatched& each : unwatched_) {
    const Line line = each.started != 0 ? read_line(each.pid) : Line{};
    const bool is_another = line.started != 0 && line.started != each.started;
    if (is_over(line.state) || is_another || !has_number(each.pid)) found.push_back(each.rank);
  }
  return found;
}

}  // namespace rallypoint
