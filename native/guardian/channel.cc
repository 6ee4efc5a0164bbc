#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>

namespace guardian {
namespace {
constexpr size_t kChunk = 64 << 10;
constexpr size_t kMaxQueuedFds = 64;  // a sound agent has at most one Spawn's in flight per chunk
}  // namespace

Channel::Channel(int fd) : fd_(fd) {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
  fcntl(fd_, F_SETFD, FD_CLOEXEC);
}

bool Channel::receive() {
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<std::ptrdiff_t>(consumed_));
  consumed_ = 0;
  const size_t had = incoming_.size();
  incoming_.resize(had + kChunk);
  iovec part{incoming_.data() + had, kChunk};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kWorkerFds)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
  incoming_.resize(had + (got > 0 ? static_cast<size_t>(got) : 0));
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      fds_.push_back(fd);
    }
  }
  return got > 0 && (message.msg_flags & MSG_CTRUNC) == 0 && fds_.size() <= kMaxQueuedFds;
}

bool Channel::has_more() const {
  pollfd entry{fd_, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

bool Channel::next(Header& header, char*& payload, bool& broken) {
  const size_t available = incoming_.size() - consumed_;
  if (available < sizeof header) return false;
  memcpy(&header, incoming_.data() + consumed_, sizeof header);
  broken = header.size > kMaxPayload;
  if (broken || available - sizeof header < header.size) return false;
  payload = incoming_.data() + consumed_ + sizeof header;
  consumed_ += sizeof header + header.size;
  return true;
}

bool Channel::take_fds(int (&fds)[kWorkerFds]) {
  if (fds_.size() < static_cast<size_t>(kWorkerFds)) return false;
  for (int& fd : fds) {
    fd = fds_.front();
    fds_.pop_front();
  }
  return true;
}

void Channel::report(const Report& report) {
  outgoing_.append(reinterpret_cast<const char*>(&report), sizeof report);
  flush();
}

void Channel::flush() {
  while (!outgoing_.empty()) {
    const ssize_t sent = send(fd_, outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      outgoing_.erase(0, static_cast<size_t>(sent));
    } else if (errno != EINTR) {
      // EAGAIN: try later. Anything else: the agent is gone, and receive() will report it.
      if (errno != EAGAIN) outgoing_.clear();
      return;
    }
  }
}

}  // namespace guardian
