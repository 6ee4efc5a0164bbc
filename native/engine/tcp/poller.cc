#include "engine/tcp/poller.h"

#include <cerrno>
#include <system_error>

#include "engine/process.h"

namespace rallypoint::tcp {
namespace {

constexpr std::size_t kFew = 1;  // reading nothing costs more than asking

}  // namespace

Poller::Poller(Region& region) : region_(region), epoll_(own(epoll_create1(EPOLL_CLOEXEC))) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  try {
    key_ = Watcher::instance().add(epoll_, *this, true);
  } catch (const std::system_error&) {
    close_owned(epoll_);
    throw;
  }
}

Poller::~Poller() {
  Watcher::instance().remove(epoll_, key_);
  close_owned(epoll_);
}

int Poller::add(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = fds_.size();
  const int error = epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
  fds_.push_back(fd);
  interests_.push_back(EPOLLIN);
  if (fds_.size() <= kFew) ready_.push_back(fds_.size() - 1);
  events_.resize(fds_.size());
  return error;
}

const std::vector<std::size_t>& Poller::ready() {
  if (fds_.size() <= kFew) return ready_;
  const int count = epoll_wait(epoll_, events_.data(), static_cast<int>(events_.size()), 0);
  ready_.clear();
  for (int i = 0; i < count; ++i) {
    const std::size_t place = events_[i].data.u64;  // copied: the events are packed
    ready_.push_back(place);
  }
  return ready_;
}

void Poller::set_interest(std::size_t place, bool reads, bool writes) {
  std::uint32_t interest = 0;
  if (reads) interest |= EPOLLIN;
  if (writes) interest |= EPOLLOUT;
  if (interests_[place] == interest) return;
  epoll_event event{};
  event.events = interest;
  event.data.u64 = place;
  // Even without any interest, the kernel would still report the stream's end.
  const bool was_in = interests_[place] != 0;
  const int change = interest == 0 ? EPOLL_CTL_DEL : was_in ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  epoll_ctl(epoll_, change, fds_[place], &event);
  interests_[place] = interest;
}

void Poller::on_ready(int, std::uint64_t) { region_.wake_self(); }

}  // namespace rallypoint::tcp
