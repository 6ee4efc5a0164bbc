// The guardian: a small process between the agent and its workers that makes sure that nothing the
// agent started outlives it, however the agent ends.
//
//     agent (Python) --spawns--> guardian --forks--> worker, worker, ...
//                                    ^  orphans of the workers are handed to it (subreaper)
//
// It decides nothing: it starts, signals, reaps, reports and ends what it is asked to. It knows
// that the agent is gone by the end of file on their socket, or by the parent-death signal.
//
// Usage (by the agent only): guardian FD AGENT_PID DIRECTORY, where FD is its end of the socket,
// and DIRECTORY the job's temporary files, removed at the end.

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "channel.h"
#include "family.h"
#include "protocol.h"

namespace {

using namespace guardian;

constexpr uint64_t kChannelEvent = 0;
constexpr uint64_t kSignalEvent = 1;

void watch(int epoll, int operation, int fd, uint64_t data, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  epoll_ctl(epoll, operation, fd, &event);
}

// Away from the terminal, its signals and the agent's files; children are adopted from now on.
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

// False: the agent sent something that no agent sends.
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
        family.spawn(request, fds);
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
    const int count = epoll_wait(epoll, events, 64, -1);
    bool children_ended = false;
    bool request_waits = false;
    for (int i = 0; i < count; ++i) {
      // epoll lists what became ready first, first: this is what orders the workers' ends.
      if (events[i].data.u64 & Family::kWorkerEvent) {
        family.worker_ended(static_cast<uint32_t>(events[i].data.u64));
        children_ended = true;  // an orphan may have waited behind this worker
      } else if (events[i].data.u64 == kSignalEvent) {
        signalfd_siginfo ignored{};
        while (read(signals, &ignored, sizeof ignored) > 0) {
        }
        children_ended = true;
        agent_lives = getppid() == agent;
      } else {
        request_waits = (events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0;
        channel.flush();
      }
    }
    if (children_ended) family.reap_orphans();  // a worker it meets is in epoll's next list
    if (request_waits && (!channel.receive() || !serve(channel, family))) agent_lives = false;
  }
}

int remove_entry(const char* path, const struct stat*, int, FTW*) { return remove(path); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int socket = atoi(argv[1]);
  const pid_t agent = atoi(argv[2]);
  const int signals = prepare(socket);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  Channel channel(socket);
  Family family(channel, epoll, signals);
  watch(epoll, EPOLL_CTL_ADD, socket, kChannelEvent, EPOLLIN);
  watch(epoll, EPOLL_CTL_ADD, signals, kSignalEvent, EPOLLIN);
  run(channel, family, epoll, signals, agent);
  family.end();
  if (argv[3][0] == '/') nftw(argv[3], remove_entry, 8, FTW_DEPTH | FTW_PHYS);
  return 0;
}
