#include "engine/tcp/late_connections.h"

#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "engine/process.h"
#include "engine/tcp/control.h"
#include "engine/tcp/peer_address.h"
#include "engine/waiting.h"

namespace rallypoint::tcp {
namespace {

constexpr int kElsewhere = -2;
constexpr std::uint64_t kListener = 0;
constexpr std::uint64_t kClock = 1;
constexpr std::uint64_t kFirstTalk = 2;
constexpr long kTickNs = 20'000'000;
constexpr std::size_t kMostStrangers = 256;
constexpr double kStrangerS = 5;  // how long a caller may take to prove its identity
constexpr int kMostProbes = 100;  // the kernel's limit is 127
constexpr double kAgainS = 0.05;  // between attempts to connect
constexpr double kDoubtS = 0.5;   // for others to report that the rank has gone
constexpr double kLackS = 5;      // for the program to close descriptors that we need
constexpr std::uint32_t kLongRoundTripUs = 1000;  // process_group/formation/host_network.py

}  // namespace

struct LateConnections::Talk {
  Talk(int fd_, Handshake handshake_, bool calls_)
      : fd(fd_), handshake(std::move(handshake_)), calls(calls_), began_s(now_s()) {}
  int fd;
  Handshake handshake;
  bool calls;
  double began_s;
  bool is_connected = false;  // of a call
  bool is_over = false;       // except for unsent bytes
  std::string unread = {};
};

LateConnections::LateConnections(Region& region, Control& control, LateMesh mesh,
                                 const std::vector<std::uint32_t>& controlled)
    : region_(region),
      control_(control),
      mesh_(std::move(mesh)),
      epoll_(own(epoll_create1(EPOLL_CLOEXEC))),
      clock_(own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK))),
      wanted_(new std::atomic<bool>[region.ranks()]()),
      links_(region.ranks()) {
  if (epoll_ < 0 || clock_ < 0) {
    throw std::system_error(errno, std::generic_category(),
                            epoll_ < 0 ? "epoll_create1" : "timerfd_create");
  }
  own(mesh_.listener);
  for (const Endpoint& each : mesh_.endpoints) {
    if (!region_.is_far(each.rank)) continue;
    links_[each.rank].endpoint = &each;
    links_[each.rank].fds.assign(kData + mesh_.streams, -1);
  }
  for (const std::uint32_t rank : controlled) {
    if (links_[rank].endpoint != nullptr) links_[rank].fds[kControl] = kElsewhere;
  }
  for (const auto& [number, fd] : {std::pair{kListener, mesh_.listener}, {kClock, clock_}}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = number;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
  }
  talk_count_ = kFirstTalk;
  key_ = Watcher::instance().add(epoll_, *this, false);
}

LateConnections::~LateConnections() {
  Watcher::instance().remove(epoll_, key_);
  close();
  for (const Ready* ready : {&data_, &mail_}) {
    for (const Made& each : ready->made) {
      for (const int fd : each.fds) close_owned(fd);
    }
  }
  close_owned(clock_);
  close_owned(epoll_);
}

void LateConnections::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  while (!talks_.empty()) drop(talks_.begin()->first);
  close_owned(mesh_.listener);
  for (Link& link : links_) {
    for (const int fd : link.fds) {
      if (fd >= 0 && !link.is_complete) close_owned(fd);
    }
  }
}

void LateConnections::want(std::uint32_t rank) {
  if (wanted_[rank].load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  wanted_[rank].store(true, std::memory_order_relaxed);
  Link& link = links_[rank];
  if (is_closed_ || link.is_complete || link.endpoint == nullptr) return;
  link.is_wanted = true;
  for (std::uint32_t purpose = 0; purpose < link.fds.size(); ++purpose) {
    if (link.fds[purpose] == -1) call(rank, purpose);
  }
  set_clock();
}

std::vector<LateConnections::Made> LateConnections::take(Ready& ready) {
  if (!ready.is_any.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(mutex_);
  ready.is_any.store(false, std::memory_order_relaxed);
  return std::exchange(ready.made, {});
}

std::optional<Failure> LateConnections::failure() const {
  const std::uint64_t packed = failure_.load(std::memory_order_acquire);
  if (packed == 0) return {};
  const auto rank = static_cast<std::uint32_t>(packed >> 32) - 1;
  const Trouble trouble = rank == region_.rank() ? Trouble::exhausted : Trouble::unreachable;
  return Failure{rank, trouble, static_cast<std::uint32_t>(packed)};
}

// On the watcher's thread.
void LateConnections::on_ready(int, std::uint64_t) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  std::array<epoll_event, 64> events{};
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t number = events[i].data.u64;  // copied: the events are packed
    if (number == kListener) {
      accept_all();
    } else if (number == kClock) {
      std::uint64_t ticks = 0;
      if (read(clock_, &ticks, sizeof ticks) > 0) look();
    } else {
      go_on(number);
    }
  }
  set_clock();
}

void LateConnections::call(std::uint32_t rank, std::uint32_t purpose) {
  const Endpoint& to = *links_[rank].endpoint;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;  // with the scope, as in fe80::1%eth0
  if (getaddrinfo(to.address.c_str(), std::to_string(to.port).c_str(), &hints, &found) != 0) {
    return give_up(rank, EINVAL);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> address(found, freeaddrinfo);
  const int fd = own(socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd < 0) return errno == EAFNOSUPPORT ? give_up(rank, errno) : lack(rank, errno);
  prepare(fd);
  const int result = connect(fd, address->ai_addr, address->ai_addrlen);
  const int error = result == 0 ? 0 : errno;
  auto talk =
      std::make_unique<Talk>(fd, Handshake(mesh_.admission, region_.rank(), rank, purpose), true);
  if (error != 0 && error != EINPROGRESS) {
    lacked_s_ = 0;
    fail(*talk, error);
    close_owned(fd);
    return;
  }
  begin(std::move(talk), EPOLLOUT);
}

void LateConnections::accept_all() {
  for (;;) {
    const int fd = accept4(mesh_.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) pause(true);
      return;
    }
    const auto strangers =
        std::ranges::count_if(talks_, [](const auto& each) { return !each.second->calls; });
    if (static_cast<std::size_t>(strangers) >= kMostStrangers + links_.size()) {
      ::close(fd);
      continue;
    }
    begin(std::make_unique<Talk>(own(fd), Handshake(mesh_.admission, region_.rank()), false),
          EPOLLIN);
  }
}

// Callers wait meanwhile, rather than keeping the watcher's thread busy.
void LateConnections::pause(bool is_paused) {
  if (std::exchange(is_paused_, is_paused) == is_paused) return;
  epoll_event event{};
  if (!is_paused) event.events = EPOLLIN;
  event.data.u64 = kListener;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, mesh_.listener, &event);
}

void LateConnections::begin(std::unique_ptr<Talk> talk, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = talk_count_;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, talk->fd, &event) != 0) {
    if (talk->calls) lack(talk->handshake.peer(), errno);
    close_owned(talk->fd);
    return;
  }
  if (talk->calls) lacked_s_ = 0;
  talks_[talk_count_++] = std::move(talk);
}

void LateConnections::drop(std::uint64_t number) {
  close_owned(talks_.at(number)->fd);  // which also removes it from the epoll instance
  talks_.erase(number);
}

void LateConnections::go_on(std::uint64_t number) {
  const auto found = talks_.find(number);
  if (found == talks_.end()) return;
  Talk& talk = *found->second;
  int error = 0;
  if (!exchange(talk, error)) {
    if (talk.calls) fail(talk, error);
    return drop(number);
  }
  if (talk.is_over && talk.handshake.unsent.empty()) return finish(number);
  epoll_event event{};
  event.events = talk.handshake.unsent.empty() ? EPOLLIN : EPOLLOUT;
  event.data.u64 = number;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, talk.fd, &event);
}

// Makes all possible progress. False: give up, because of a system error or because the other side
// is not who it should be.
bool LateConnections::exchange(Talk& talk, int& error) {
  if (talk.calls && !talk.is_connected) {
    socklen_t length = sizeof error;
    getsockopt(talk.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return false;
    talk.is_connected = true;
  }
  for (;;) {
    std::string& unsent = talk.handshake.unsent;
    if (!unsent.empty()) {
      const ssize_t went = send(talk.fd, unsent.data(), unsent.size(), MSG_NOSIGNAL);
      if (went < 0 && errno != EAGAIN) return error = errno, false;
      if (went > 0) unsent.erase(0, static_cast<std::size_t>(went));
      if (!unsent.empty()) return true;
    }
    if (talk.is_over) return true;
    std::array<char, 256> bytes;
    const ssize_t came =
        recv(talk.fd, bytes.data(), talk.handshake.wanted() - talk.unread.size(), 0);
    if (came < 0 && errno == EAGAIN) return true;
    if (came <= 0) return error = came < 0 ? errno : ECONNRESET, false;
    talk.unread.append(bytes.data(), static_cast<std::size_t>(came));
    if (talk.unread.size() < talk.handshake.wanted()) continue;
    const Handshake::Step step = talk.handshake.feed(std::exchange(talk.unread, {}));
    if (step == Handshake::Step::proven && admit(talk)) {
      talk.is_over = true;
    } else if (step == Handshake::Step::done) {
      talk.is_over = true;
    } else if (step != Handshake::Step::going_on) {
      return error = ECONNRESET, false;
    }
  }
}

// The caller has proved its identity. Returns whether its connection stands against one of ours.
bool LateConnections::admit(Talk& talk) {
  const std::uint32_t rank = talk.handshake.peer();
  const std::uint32_t purpose = talk.handshake.purpose();
  if (rank >= links_.size() || purpose >= links_[rank].fds.size() ||
      links_[rank].fds[purpose] != -1) {
    return false;
  }
  if (Talk* const ours = call_under_way(rank, purpose)) {
    if (ours->handshake.has_proved_itself() && region_.rank() > rank) return false;
    const auto is_ours = [&](const auto& each) { return each.second.get() == ours; };
    drop(std::ranges::find_if(talks_, is_ours)->first);
  }
  talk.handshake.accept();
  return true;
}

LateConnections::Talk* LateConnections::call_under_way(std::uint32_t rank, std::uint32_t purpose) {
  for (const auto& [number, talk] : talks_) {
    const Handshake& handshake = talk->handshake;
    if (talk->calls && handshake.peer() == rank && handshake.purpose() == purpose) {
      return talk.get();
    }
  }
  return nullptr;
}

// Both sides are proven.
void LateConnections::finish(std::uint64_t number) {
  const auto& talk = *talks_.at(number);
  const std::uint32_t rank = talk.handshake.peer();
  const std::uint32_t purpose = talk.handshake.purpose();
  Link& link = links_[rank];
  if (link.fds[purpose] != -1) return drop(number);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, talk.fd, nullptr);
  settle(talk.fd, purpose);
  link.fds[purpose] = talk.fd;
  talks_.erase(number);
  if (std::ranges::find(link.fds, -1) == link.fds.end()) complete(rank);
}

void LateConnections::complete(std::uint32_t rank) {
  Link& link = links_[rank];
  link.is_complete = true;
  wanted_[rank].store(true, std::memory_order_relaxed);
  if (link.fds[kControl] >= 0) {
    const int error = control_.add(rank, link.fds[kControl]);
    if (error != 0) set_failure(region_.rank(), error);
  }
  mail_.made.push_back({rank, {link.fds[kMail]}});
  data_.made.push_back({rank, {link.fds.begin() + kData, link.fds.end()}});
  for (Ready* ready : {&mail_, &data_}) ready->is_any.store(true, std::memory_order_release);
  region_.wake_self();
}

// A call has failed. The rank may have gone, which others will report; or it refuses our call
// because it is calling itself, or is not ready: then only the time-out of the waiting operation
// can tell.
void LateConnections::fail(const Talk& talk, int error) {
  const std::uint32_t rank = talk.handshake.peer();
  Link& link = links_[rank];
  const double now = now_s();
  link.call_again_s = now + kAgainS;
  if (talk.is_connected) {
    link.doubted_s = 0;
    return;
  }
  if (link.doubted_s == 0) link.doubted_s = now;
  if (now - link.doubted_s > kDoubtS) give_up(rank, error);
}

void LateConnections::give_up(std::uint32_t rank, int error) {
  if (region_.presence(rank) != Presence::here || region_.first_lost() >= 0) return;
  set_failure(rank, error);
}

// The system has no descriptor, or no memory, for a call: that may pass, and is not the fault of
// the rank that is called.
void LateConnections::lack(std::uint32_t rank, int error) {
  const double now = now_s();
  links_[rank].call_again_s = now + kAgainS;
  if (lacked_s_ == 0) lacked_s_ = now;
  if (now - lacked_s_ > kLackS) set_failure(region_.rank(), error);
}

void LateConnections::set_failure(std::uint32_t rank, int error) {
  std::uint64_t none = 0;
  const std::uint64_t packed = std::uint64_t{rank + 1} << 32 | static_cast<std::uint32_t>(error);
  failure_.compare_exchange_strong(none, packed);
  region_.wake_self();
}

// Handles what only time reveals: silent hosts, strangers, calls to be tried again.
void LateConnections::look() {
  pause(false);
  const double now = now_s();
  std::vector<std::uint64_t> late;
  for (const auto& [number, talk] : talks_) {
    const bool is_silent =
        talk->calls && !talk->is_connected && now - talk->began_s > mesh_.silence_s;
    if (is_silent) {
      links_[talk->handshake.peer()].call_again_s = now + 1;
      give_up(talk->handshake.peer(), ETIMEDOUT);
    }
    if (is_silent || (!talk->calls && now - talk->began_s > kStrangerS)) late.push_back(number);
  }
  for (const std::uint64_t number : late) drop(number);
  for (std::uint32_t rank = 0; rank < links_.size(); ++rank) {
    Link& link = links_[rank];
    if (!link.is_wanted || link.is_complete || now < link.call_again_s) continue;
    if (region_.presence(rank) != Presence::here) link.is_wanted = false;
    for (std::uint32_t purpose = 0; link.is_wanted && purpose < link.fds.size(); ++purpose) {
      if (link.fds[purpose] == -1 && call_under_way(rank, purpose) == nullptr) call(rank, purpose);
    }
  }
}

// The timer ticks only while it is needed.
void LateConnections::set_clock() {
  const bool is_needed =
      is_paused_ || !talks_.empty() || std::ranges::any_of(links_, [](const Link& link) {
        return link.is_wanted && !link.is_complete;
      });
  if (std::exchange(is_ticking_, is_needed) == is_needed) return;
  itimerspec times{};
  if (is_needed) times.it_interval.tv_nsec = times.it_value.tv_nsec = kTickNs;
  timerfd_settime(clock_, 0, &times, nullptr);
}

void LateConnections::prepare(int fd) const {
  if (mesh_.congestion.empty()) return;
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, mesh_.congestion.data(),
             static_cast<socklen_t>(mesh_.congestion.size()));
}

void LateConnections::settle(int fd, std::uint32_t purpose) const {
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  tcp_info info{};
  socklen_t length = sizeof info;
  if (!mesh_.long_congestion.empty() &&
      getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
      info.tcpi_min_rtt >= kLongRoundTripUs) {
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, mesh_.long_congestion.data(),
               static_cast<socklen_t>(mesh_.long_congestion.size()));
  }
  if (purpose != kControl) return;
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  // As process_group/formation/mesh.py.
  const int every_s = (mesh_.silence_s + kMostProbes - 1) / kMostProbes;
  set(IPPROTO_TCP, TCP_KEEPIDLE, every_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, every_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, std::max(1, mesh_.silence_s / every_s - 1));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, mesh_.silence_s * 1000);
}

}  // namespace rallypoint::tcp
