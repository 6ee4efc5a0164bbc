#include "engine/tcp/watcher.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/process.h"

namespace rallypoint::tcp {

Watcher& Watcher::instance() {
  static constinit PerProcess<Watcher> watcher;
  return watcher.get();
}

Watcher::Watcher() : epoll_(own(epoll_create1(EPOLL_CLOEXEC))) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
}

Watcher::~Watcher() { close_owned(epoll_); }

std::uint64_t Watcher::add(int fd, Watched& owner, bool once) {
  const std::lock_guard lock(mutex_);
  if (!is_running_) start_thread([this] { run(); });  // it may be refused
  is_running_ = true;
  const std::uint64_t key = enter(fd, owner, once);
  if (key == 0) throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  return key;
}

std::uint64_t Watcher::enter(int fd, Watched& owner, bool once) {
  const std::uint64_t key = ++keys_;
  epoll_event event{};
  event.events = EPOLLIN;
  if (once) event.events = EPOLLONESHOT;  // for no event yet
  event.data.u64 = key;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return 0;
  entries_[key] = {fd, &owner};  // before an event is delivered: the mutex is held
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
      const std::uint64_t key = events[i].data.u64;  // copied: the events are packed
      const auto found = entries_.find(key);
      if (found == entries_.end()) continue;
      found->second.owner->on_ready(found->second.fd, found->first);
    }
  }
}

}  // namespace rallypoint::tcp
