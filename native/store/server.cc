#include "store/server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace rallypoint::store {

namespace {

constexpr uint32_t kListener = UINT32_MAX;
constexpr uint32_t kWake = UINT32_MAX - 1;
constexpr size_t kScratch = 128 << 10;
constexpr int kBatch = 256;
constexpr int kPieces = 64;
constexpr double kSweepEveryS = 5.0;
constexpr size_t kMaxLogged = 1000;

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::system_category(), what);
}

void set_option(int fd, int level, int name, int value) {
  // Best effort: none of these options changes what the server does, only how well.
  setsockopt(fd, level, name, &value, sizeof value);
}

// A vanished host is noticed `idle_s` + `probes` seconds after its last packet.
void set_keepalive(int fd, int idle_s, int probes) {
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
}

// The peer's address without its port; the kernel knows it, no name service is asked.
std::string peer_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  char text[INET6_ADDRSTRLEN] = "unknown";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return text;
  if (storage.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) {
      inet_ntop(AF_INET, &address.s6_addr[12], text, sizeof text);
    } else {
      inet_ntop(AF_INET6, &address, text, sizeof text);
    }
  } else if (storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, text, sizeof text);
  }
  return text;
}

}  // namespace

Server::Server(int listener, int log) : listener_(listener), log_(log), owner_(getpid()) {
  scratch_.resize(kScratch);
  // Accepted sockets inherit these from the listener, which saves system calls for each.
  set_option(listener_, IPPROTO_TCP, TCP_NODELAY, 1);
  set_keepalive(listener_, 60, 30);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  spare_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  epoll_event on_accept{.events = EPOLLIN, .data = {.u32 = kListener}};
  epoll_event on_wake{.events = EPOLLIN, .data = {.u32 = kWake}};
  if (epoll_ < 0 || wake_ < 0 || fcntl(listener_, F_SETFL, O_NONBLOCK) != 0 ||
      epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &on_accept) != 0 ||
      epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &on_wake) != 0) {
    const int error = errno;
    close();
    errno = error;
    fail("preparing to serve");
  }
  // Signals belong to the threads that Python knows.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 256 << 10);
  const int error = pthread_create(&thread_, &attributes, &Server::run, this);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    close();
    errno = error;
    fail("starting the server's thread");
  }
  running_ = true;
}

void Server::close() {
  if (running_ && owner_ == getpid()) {
    stop_ = true;
    const uint64_t one = 1;
    while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
    }
    pthread_join(thread_, nullptr);
  }
  running_ = false;
  for (int* fd : {&listener_, &epoll_, &wake_, &spare_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void* Server::run(void* self) {
  pthread_setname_np(pthread_self(), "store");
  static_cast<Server*>(self)->loop();
  return nullptr;
}

void Server::loop() {
  epoll_event events[kBatch];
  while (!stop_) {
    const int count = epoll_wait(epoll_, events, kBatch, static_cast<int>(kSweepEveryS * 1000));
    for (int i = 0; i < count; ++i) {
      const uint32_t id = events[i].data.u32;
      if (id == kListener) {
        accept_all();
      } else if (id != kWake) {
        on_event(id, events[i].events);
      }
    }
    sweep();
    forget_closed();
    keys_ = machine_.keys();
    requests_ = machine_.requests();
  }
  for (const Socket& socket : sockets_) {
    if (socket.fd >= 0) ::close(socket.fd);
  }
}

// Telling watchers what vanished with a connection may break others in turn.
void Server::forget_closed() {
  while (!closed_.empty()) {
    for (ConnectionId id : std::exchange(closed_, {})) machine_.close(id);
    flush_touched();
  }
}

void Server::accept_all() {
  for (int i = 0; i < kBatch; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) accept_without_descriptors();
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return;
    }
    const ConnectionId id = machine_.open(now_s());
    if (id >= sockets_.size()) sockets_.resize(id + 1);
    sockets_[id] = {.fd = fd, .interest = EPOLLIN, .keepalive = false};
    epoll_event event{.events = EPOLLIN, .data = {.u32 = id}};
    ++connections_;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) drop(id, "out of memory for epoll");
  }
}

// Out of descriptors: the connection is turned away at once rather than left hanging in the queue,
// where it would also wake this loop for ever.
void Server::accept_without_descriptors() {
  ::close(spare_);
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd >= 0) {
    log_once(fd, "no descriptors left; raise the limit on open files (ulimit -n)");
    ::close(fd);
  }
  spare_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  errno = EAGAIN;
}

void Server::on_event(ConnectionId id, uint32_t events) {
  if (sockets_[id].fd < 0) return;  // closed earlier in this batch
  if (events & EPOLLOUT) {
    if (!flush(id)) return drop(id, nullptr);
    if (machine_.paused(id) && machine_.pending_output(id).pending() == 0) {
      const char* reason = machine_.resume(id);
      flush_touched();
      if (reason) return drop(id, reason);
    }
    settle(id);
  }
  if (sockets_[id].fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read(id);
}

void Server::read(ConnectionId id) {
  const ssize_t size = recv(sockets_[id].fd, scratch_.data(), scratch_.size(), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) return drop(id, nullptr);
  const char* reason = machine_.receive(id, {scratch_.data(), static_cast<size_t>(size)});
  flush_touched();
  if (reason) return drop(id, reason);
  if (sockets_[id].fd < 0) return;
  if (machine_.owns_ephemeral(id) && !sockets_[id].keepalive) {
    set_keepalive(sockets_[id].fd, 2, 3);
    sockets_[id].keepalive = true;
  }
  settle(id);
}

// Sends what it can without waiting. False: the connection is broken.
bool Server::flush(ConnectionId id) {
  Output& output = machine_.pending_output(id);
  while (output.pending() > 0) {
    iovec pieces[kPieces];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<size_t>(output.pieces(pieces, kPieces));
    const ssize_t sent = sendmsg(sockets_[id].fd, &message, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    output.consume(static_cast<size_t>(sent));
  }
  return true;
}

void Server::flush_touched() {
  for (ConnectionId id : machine_.take_touched()) {
    if (sockets_[id].fd < 0) continue;
    if (flush(id)) {
      settle(id);
    } else {
      drop(id, nullptr);
    }
  }
}

// Asks epoll for what the connection needs next.
void Server::settle(ConnectionId id) {
  const bool pending = machine_.pending_output(id).pending() > 0;
  const bool paused = machine_.paused(id);
  const uint32_t wanted = (paused ? 0u : EPOLLIN) | (pending || paused ? EPOLLOUT : 0u);
  if (wanted != sockets_[id].interest) watch(id, wanted);
}

void Server::watch(ConnectionId id, uint32_t events) {
  epoll_event event{.events = events, .data = {.u32 = id}};
  sockets_[id].interest = events;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, sockets_[id].fd, &event);
}

// Closes the socket now; the id stays taken until the batch of events that may name it is done.
void Server::drop(ConnectionId id, const char* reason) {
  Socket& socket = sockets_[id];
  if (socket.fd < 0) return;
  if (reason) log_once(socket.fd, reason);
  ::close(socket.fd);
  socket = Socket();
  --connections_;
  closed_.push_back(id);
}

void Server::sweep() {
  const double now = now_s();
  if (now < next_sweep_) return;
  next_sweep_ = now + kSweepEveryS;
  for (ConnectionId id : machine_.late(now)) drop(id, "no VALIDATE within 30 s");
}

void Server::log_once(int fd, const char* reason) {
  const std::string address = peer_address(fd);
  if (log_ < 0 || logged_.size() >= kMaxLogged || !logged_.insert(address).second) return;
  const std::string line = "rallypoint store: closed a connection from " + address + ": " + reason +
                           " (further ones from there are not logged)\n";
  // A full pipe loses the line: the server never waits for whoever reads its log.
  if (::write(log_, line.data(), line.size()) < 0) return;
}

}  // namespace rallypoint::store
