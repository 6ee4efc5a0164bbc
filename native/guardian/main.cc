// The guardian: a small process between the agent and its workers that makes sure that nothing the
// agent started outlives it, however the agent ends.
//
//     agent (Python) --spawns--> guardian --forks--> worker, worker, ...
//                                    ^  orphans of the workers are handed to it (subreaper)
//
// It decides nothing: it starts, signals, reaps, reports and ends what it is asked to, and ends or
// pauses whatever runs beyond the time that the agent last allowed, so that a stopped agent
// violates no lease. It learns that the agent is gone from the end of file on their socket, or from
// the parent-death signal.
//
// Usage (by the agent only): guardian FD AGENT_PID DIRECTORY SESSIONS, where FD is its end of the
// socket, DIRECTORY the job's temporary files, removed at the end, and SESSIONS "each" (a session
// for each worker), or "N:one" or "N:each": one that they share, whose autogroup gets the nice
// value N, and what to do where the kernel does not grant that. launch/agent/guardian.py chooses.

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "channel.h"
#include "family.h"
#include "protocol.h"

namespace {

using namespace guardian;

constexpr uint64_t kChannelEvent = 0;
constexpr uint64_t kSignalEvent = 1;
constexpr uint64_t kFenceEvent = 2;
constexpr uint64_t kEarlyEndEvent = 3;

void watch(int epoll, int operation, int fd, uint64_t data, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  epoll_ctl(epoll, operation, fd, &event);
}

// Detaches from the terminal, its signals and the agent's files; from now on, orphans are adopted.
int prepare(int socket) {
  setsid();
  prctl(PR_SET_NAME, "rally-guardian");
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);  // workers inherit this
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);

  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; fd <= 2; ++fd) {
    if (fd != socket) dup2(nothing, fd);
  }
  if (nothing > 2) close(nothing);
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  sigaddset(&watched, SIGTERM);
  return signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
}

// Whether each worker gets its own session.
bool needs_sessions(const char* wish) {
  if (strcmp(wish, "each") == 0) return true;
  const char* colon = strchr(wish, ':');
  if (colon == nullptr || atoi(wish) == 0) return false;
  const int fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
  const auto size = static_cast<size_t>(colon - wish);
  const bool is_granted = fd >= 0 && write(fd, wish, size) == static_cast<ssize_t>(size);
  if (fd >= 0) close(fd);
  return !is_granted && strcmp(colon, ":each") == 0;
}

// Handles requests. False: the agent sent something invalid.
bool serve(Channel& channel, Family& family) {
  Header header{};
  char* payload = nullptr;
  bool broken = false;
  while (channel.next(header, payload, broken)) {
    switch (static_cast<RequestKind>(header.kind)) {
      case RequestKind::kSpawn: {
        SpawnRequest request;
        int fds[kWorkerFds];
        if (!parse_spawn(payload, header.size, request) || !channel.take_fds(fds)) return false;
        family.spawn(std::move(request), fds);
        for (const int fd : fds) close(fd);
        break;
      }
      case RequestKind::kTemplate: {
        SpawnRequest request;
        int fds[kWorkerFds];
        if (!parse_spawn(payload, header.size, request) || !channel.take_fds(fds)) return false;
        family.start_template(request, fds);
        for (const int fd : fds) close(fd);
        break;
      }
      case RequestKind::kSignal: {
        SignalRequest request{};
        if (!parse_signal(payload, header.size, request)) return false;
        family.signal(request);
        break;
      }
      case RequestKind::kEnd:
        family.end();
        break;
      case RequestKind::kFence: {
        FenceRequest request{};
        if (!parse_fence(payload, header.size, request)) return false;
        family.set_fence(request);
        break;
      }
      case RequestKind::kPause:
        family.pause();
        break;
      case RequestKind::kResume:
        family.resume();
        break;
      default:
        return false;
    }
  }
  return !broken;
}

// Runs until the agent is gone.
void run(Channel& channel, Family& family, int epoll, int signals, pid_t agent) {
  bool agent_lives = getppid() == agent;
  bool writing = false;
  while (agent_lives) {
    if (channel.wants_to_write() != writing) {
      writing = !writing;
      watch(epoll, EPOLL_CTL_MOD, channel.fd(), kChannelEvent, EPOLLIN | (writing ? EPOLLOUT : 0u));
    }
    epoll_event events[64];
    const int count = epoll_wait(epoll, events, 64, family.wait_ms());
    bool children_ended = count == 0;
    bool request_waits = false;
    bool hears_early_ends = false;
    bool template_spoke = false;
    for (int i = 0; i < count; ++i) {
      // epoll lists events in the order in which they became ready: this orders the workers' ends.
      if (events[i].data.u64 & Family::kWorkerEvent) {
        family.worker_ended(static_cast<uint32_t>(events[i].data.u64));
        children_ended = true;  // an orphan may have waited behind this worker
      } else if (events[i].data.u64 == Family::kTemplateEvent) {
        template_spoke = true;
      } else if (events[i].data.u64 == kSignalEvent) {
        signalfd_siginfo ignored{};
        while (read(signals, &ignored, sizeof ignored) > 0) {
        }
        children_ended = true;
        agent_lives = getppid() == agent;
      } else if (events[i].data.u64 == kEarlyEndEvent) {
        hears_early_ends = true;
      } else if (events[i].data.u64 == kChannelEvent) {
        request_waits = (events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0;
        channel.flush();
      }
    }
    if (template_spoke) family.hear_template();
    family.check_template();
    family.note_early_ends(hears_early_ends);  // after those that epoll had before
    if (children_ended) {
      family.reap_orphans();  // a worker found there is in epoll's next list
      family.note_stops();
      family.stay_paused();
    }
    // What the agent has allowed counts, however late we are: a stopped guardian may be woken by
    // the timer alone, or by the signal that continues it (EINTR), while the request waits.
    request_waits = request_waits || family.is_past_fence();
    while (agent_lives && request_waits) {
      agent_lives = channel.receive() && serve(channel, family);
      request_waits = family.is_past_fence() && channel.has_more();
    }
    family.enforce_fence();
  }
}

int remove_entry(const char* path, const struct stat*, int, FTW*) { return remove(path); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int socket = atoi(argv[1]);
  const pid_t agent = atoi(argv[2]);
  const int signals = prepare(socket);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  if (epoll < 0) return 1;  // the agent sees the end of the socket
  Channel channel(socket);
  Family family(channel, epoll, signals, needs_sessions(argv[4]));
  watch(epoll, EPOLL_CTL_ADD, socket, kChannelEvent, EPOLLIN);
  watch(epoll, EPOLL_CTL_ADD, signals, kSignalEvent, EPOLLIN);
  watch(epoll, EPOLL_CTL_ADD, family.fence_timer(), kFenceEvent, EPOLLIN);
  watch(epoll, EPOLL_CTL_ADD, family.early_ends(), kEarlyEndEvent, EPOLLIN);
  run(channel, family, epoll, signals, agent);
  family.end_all();
  if (argv[3][0] == '/') nftw(argv[3], remove_entry, 8, FTW_DEPTH | FTW_PHYS);
  return 0;
}
