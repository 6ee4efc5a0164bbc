#include "engine/tcp/watcher.h"

#include <signal.h>
#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <thread>

namespace rallypoint::tcp {

// Never destroyed: the thread may outlive whatever else ends with the process.
Watcher& Watcher::instance() {
  static auto* const watcher = new Watcher;
  return *watcher;
}

Watcher::Watcher() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  std::thread([this] { run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::uint64_t Watcher::add(int fd, Watched& owner, bool once) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t key = ++keys_;
  entries_[key] = {fd, &owner};
  epoll_event event{};
  event.events = EPOLLIN;
  if (once) event.events = EPOLLONESHOT;  // for no event yet
  event.data.u64 = key;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    entries_.erase(key);
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  return key;
}

void Watcher::arm(int fd, std::uint64_t key) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = key;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void Watcher::remove(int fd, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  forget(fd, key);
}

void Watcher::forget(int fd, std::uint64_t key) {
  if (entries_.erase(key) != 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

void Watcher::run() {
  std::array<epoll_event, 64> events{};
  for (;;) {
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i) {
      const std::lock_guard lock(mutex_);
      const auto found = entries_.find(events[i].data.u64);
      if (found == entries_.end()) continue;
      found->second.owner->on_ready(found->second.fd, found->first);
    }
  }
}

}  // namespace rallypoint::tcp
