#include "store/event_loop.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace rallypoint::store {

namespace {

constexpr uint32_t kListener = UINT32_MAX;
constexpr uint32_t kWake = UINT32_MAX - 1;
constexpr size_t kScratch = 128 << 10;
constexpr int kBatch = 64;
constexpr int kPieces = 64;
constexpr int kProbes = 3;
constexpr double kSweepEveryS = 5.0;
constexpr size_t kMaxLogged = 1000;

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
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

HostAddress host_of(const sockaddr_storage& storage) {
  HostAddress host{};
  if (storage.ss_family == AF_INET6) {
    std::memcpy(host.data(), &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr, 16);
  } else if (storage.ss_family == AF_INET) {
    host[10] = host[11] = 0xff;
    std::memcpy(&host[12], &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, 4);
  }
  return host;
}

HostAddress peer_of(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return host_of(storage);
}

bool is_mapped_v4(const HostAddress& host) {
  return std::all_of(host.begin(), host.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
         host[10] == 0xff && host[11] == 0xff;
}

bool is_loopback(const HostAddress& host) {
  HostAddress v6{};
  v6[15] = 1;
  return host == v6 || (is_mapped_v4(host) && host[12] == 127);
}

std::string text_of(const HostAddress& host) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_mapped_v4(host)) {
    inet_ntop(AF_INET, &host[12], text, sizeof text);
  } else {
    inet_ntop(AF_INET6, host.data(), text, sizeof text);
  }
  return text;
}

}  // namespace

EventLoop::EventLoop(int listener, int log, std::string token, int silence_s)
    : listener_(descriptors_.add(listener)),
      log_(log),
      silence_s_(silence_s),
      machine_(std::move(token)) {
  scratch_.resize(kScratch);
  // Accepted sockets inherit these from the listener, which saves system calls for each.
  set_option(listener_, IPPROTO_TCP, TCP_NODELAY, 1);
  set_keepalive(listener_, 60, 30);
  const auto granted = [this](int result, const char* call) {
    if (result >= 0) return result;
    const int error = errno;
    close_all();
    throw std::system_error(error, std::generic_category(), call);
  };
  epoll_ = descriptors_.add(granted(epoll_create1(EPOLL_CLOEXEC), "epoll_create1"));
  wake_ = descriptors_.add(granted(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd2"));
  spare_ = descriptors_.add(granted(open("/dev/null", O_RDONLY | O_CLOEXEC), "open"));
  epoll_event on_accept{.events = EPOLLIN, .data = {.u32 = kListener}};
  epoll_event on_wake{.events = EPOLLIN, .data = {.u32 = kWake}};
  granted(fcntl(listener_, F_SETFL, O_NONBLOCK), "fcntl");
  granted(fcntl(listener_, F_SETFD, FD_CLOEXEC), "fcntl");
  granted(epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &on_accept), "epoll_ctl");
  granted(epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &on_wake), "epoll_ctl");
}

void EventLoop::stop() {
  stop_ = true;
  const uint64_t one = 1;
  while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void EventLoop::allow(std::vector<HostAddress> hosts) {
  auto set = std::make_unique<std::set<HostAddress>>(hosts.begin(), hosts.end());
  const std::lock_guard lock(allow_mutex_);
  allowed_ = std::move(set);
}

void EventLoop::run() {
  epoll_event events[kBatch];
  while (!stop_) {
    const int count = epoll_wait(epoll_, events, kBatch, static_cast<int>(kSweepEveryS * 1000));
    for (int i = 0; i < count; ++i) {
      const uint32_t id = events[i].data.u32;
      if (id == kListener) {
        accept_all();
      } else if (id != kWake) {
        try {
          on_event(id, events[i].events);
        } catch (const std::bad_alloc&) {
          drop(id, "out of memory");
        }
      }
    }
    publish_counters();  // before the answers: a client with an answer may read the counters
    // Only now, for all requests of the batch: a client answered at once would preempt this thread.
    flush_touched();
    sweep();
    forget_closed();
    publish_counters();
  }
}

void EventLoop::publish_counters() {
  keys_ = machine_.keys();
  requests_ = machine_.requests();
}

// Telling watchers what vanished with a connection may break others in turn.
void EventLoop::forget_closed() {
  while (!closed_.empty()) {
    for (ConnectionId id : std::exchange(closed_, {})) machine_.close(id);
    flush_touched();
  }
}

void EventLoop::accept_all() {
  for (int i = 0; i < kBatch; ++i) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    const int fd = accept4(listener_, reinterpret_cast<sockaddr*>(&peer), &length,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) accept_without_descriptors();
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return;
    }
    descriptors_.add(fd);
    const HostAddress host = host_of(peer);
    if (allowed(host)) {
      add(fd);
    } else {
      log_once(host, "it is no member of this round");
      descriptors_.close(fd);
    }
  }
}

void EventLoop::add(int fd) {
  char nonce[kNonce];
  size_t size = 0;
  if (machine_.needs_nonce()) {
    size = sizeof nonce;
    if (getrandom(nonce, size, 0) != static_cast<ssize_t>(size)) return descriptors_.close(fd);
  }
  const ConnectionId id = machine_.open(now_s(), {nonce, size});
  if (id >= sockets_.size()) sockets_.resize(id + 1);
  sockets_[id] = {.fd = fd, .interest = EPOLLIN, .keepalive = false};
  epoll_event event{.events = EPOLLIN, .data = {.u32 = id}};
  ++connections_;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return drop(id, "epoll took no more");
  read(id);  // clients send first, and often have by now
}

bool EventLoop::allowed(const HostAddress& host) {
  const std::lock_guard lock(allow_mutex_);
  return !allowed_ || is_loopback(host) || allowed_->contains(host);
}

// Out of descriptors: the connection is turned away at once rather than left hanging in the queue,
// where it would also wake this loop for ever.
void EventLoop::accept_without_descriptors() {
  descriptors_.close(spare_);
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd >= 0) {
    log_once(peer_of(fd), "no descriptors left; raise the limit on open files (ulimit -n)");
    ::close(fd);
  }
  spare_ = descriptors_.add(open("/dev/null", O_RDONLY | O_CLOEXEC));
  errno = EAGAIN;
}

void EventLoop::on_event(ConnectionId id, uint32_t events) {
  if (sockets_[id].fd < 0) return;  // closed earlier in this batch
  if (events & EPOLLOUT) on_writable(id);
  if (sockets_[id].fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read(id);
}

void EventLoop::on_writable(ConnectionId id) {
  if (!flush(id)) return drop(id, nullptr);
  if (machine_.paused(id) && machine_.pending_output(id).pending() == 0) {
    if (const char* reason = machine_.resume(id)) return refuse(id, reason);
  }
  settle(id);
}

void EventLoop::read(ConnectionId id) {
  const ssize_t size = recv(sockets_[id].fd, scratch_.data(), scratch_.size(), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) return drop(id, nullptr);
  const char* reason = machine_.receive(id, {scratch_.data(), static_cast<size_t>(size)});
  if (reason) return refuse(id, reason);
  if (machine_.owns_ephemeral(id) && !sockets_[id].keepalive) {
    set_keepalive(sockets_[id].fd, std::max(1, silence_s_ - kProbes), kProbes);
    sockets_[id].keepalive = true;
  }
  settle(id);
}

// Sends what it can without waiting. False: the connection is broken.
bool EventLoop::flush(ConnectionId id) {
  Output& output = machine_.pending_output(id);
  while (output.pending() > 0) {
    iovec pieces[kPieces];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<size_t>(output.pieces(pieces, kPieces));
    const int fd = sockets_[id].fd;
    const ssize_t sent = message.msg_iovlen == 1
                             ? send(fd, pieces[0].iov_base, pieces[0].iov_len, MSG_NOSIGNAL)
                             : sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    output.consume(static_cast<size_t>(sent));
  }
  return true;
}

void EventLoop::flush_touched() {
  for (ConnectionId id : machine_.take_touched()) {
    if (sockets_[id].fd < 0) continue;
    if (machine_.lost_events(id)) {
      drop(id, "a watcher that does not read");
    } else if (!flush(id)) {
      drop(id, nullptr);
    } else {
      settle(id);
    }
  }
}

// Asks epoll for what the connection needs next.
void EventLoop::settle(ConnectionId id) {
  Socket& socket = sockets_[id];
  const bool pending = machine_.pending_output(id).pending() > 0;
  const bool paused = machine_.paused(id);
  const uint32_t wanted = (paused ? 0u : EPOLLIN) | (pending || paused ? EPOLLOUT : 0u);
  if (wanted == socket.interest) return;
  socket.interest = wanted;
  epoll_event event{.events = wanted, .data = {.u32 = id}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, socket.fd, &event);
}

// Like drop, but answers from before the fault, or because of it, are still sent.
void EventLoop::refuse(ConnectionId id, const char* reason) {
  flush(id);
  drop(id, reason);
}

// Closes the socket now; the id stays taken until the batch of events that may name it is done.
void EventLoop::drop(ConnectionId id, const char* reason) {
  Socket& socket = sockets_[id];
  if (socket.fd < 0) return;
  if (reason) log_once(peer_of(socket.fd), reason);
  descriptors_.close(socket.fd);
  socket = Socket();
  --connections_;
  closed_.push_back(id);
}

void EventLoop::sweep() {
  const double now = now_s();
  if (now < next_sweep_) return;
  next_sweep_ = now + kSweepEveryS;
  for (ConnectionId id : machine_.late(now)) drop(id, "no VALIDATE within 30 s");
}

void EventLoop::log_once(const HostAddress& host, const char* reason) {
  if (log_ < 0 || logged_.size() >= kMaxLogged || !logged_.insert(host).second) return;
  const std::string line = "rallypoint store: closed a connection from " + text_of(host) + ": " +
                           reason + " (further ones from there are not logged)\n";
  // If the pipe is full, the line is lost: the server never waits for a reader of its log.
  pollfd room{log_, POLLOUT, 0};
  if (poll(&room, 1, 0) != 1) return;
  if (::write(log_, line.data(), line.size()) < 0) return;
}

}  // namespace rallypoint::store
