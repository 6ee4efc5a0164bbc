#include "engine/tcp/stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/process.h"

namespace rallypoint::tcp {
namespace {

// The system may be short of memory for a while, which does not end a connection.
bool is_temporary(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == ENOBUFS ||
         error == ENOMEM;
}

}  // namespace

Stream::Stream(int fd) : fd_(own(fd)) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::system_error(errno, std::generic_category(), "fcntl");
  }
}

Stream::~Stream() {
  if (fd_ >= 0) close_owned(fd_);
}

Stream::Stream(Stream&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), writes_(other.writes_), reads_(other.reads_) {}

std::size_t Stream::write(const iovec* spans, std::size_t count) {
  if (!writes_) return 0;
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(spans);
  message.msg_iovlen = count;
  const ssize_t bytes = count == 1 ? send(fd_, spans->iov_base, spans->iov_len, kFlags)
                                   : sendmsg(fd_, &message, kFlags);
  if (bytes >= 0) return static_cast<std::size_t>(bytes);
  if (!is_temporary(errno)) writes_ = false;
  return 0;
}

std::size_t Stream::read(const iovec* spans, std::size_t count) {
  if (!reads_) return 0;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(spans);
  message.msg_iovlen = count;
  const ssize_t bytes = count == 1 ? recv(fd_, spans->iov_base, spans->iov_len, MSG_DONTWAIT)
                                   : recvmsg(fd_, &message, MSG_DONTWAIT);
  if (bytes > 0) return static_cast<std::size_t>(bytes);
  if (bytes == 0 || !is_temporary(errno)) reads_ = false;
  return 0;
}

std::size_t Stream::unconfirmed() const {
  int bytes = 0;
  return ioctl(fd_, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

void Stream::finish_writing() {
  writes_ = false;
  shutdown(fd_, SHUT_WR);
}

}  // namespace rallypoint::tcp
