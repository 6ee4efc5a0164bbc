#include "family.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "process_line.h"

// Of all architectures; headers before 5.3 lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace guardian {
namespace {

constexpr int kPatienceMs =
    5000;  // a killed process that stays longer sits in the kernel (state D)
constexpr int kRetryMs = 20;
constexpr int kSoonMs = 50;  // all threads of a process that is killed end together
// Once this has happened, the agent knows, and is not kept waiting again.
constexpr int kNoHopeMs = 100;
constexpr int kMostPasses = 100;
constexpr size_t kSlotsPerPage = 4096 / sizeof(ExecFailure);

int64_t now_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

int open_pidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool has_ended(const Worker& worker) {
  pollfd entry{worker.pidfd, POLLIN, 0};
  return worker.pidfd >= 0 && poll(&entry, 1, 0) > 0;
}

struct Process {
  pid_t pid;
  pid_t parent;
};

std::vector<Process> processes() {
  std::vector<Process> found;
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return found;
  while (const dirent* entry = readdir(proc)) {
    if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    const ProcessLine line(entry->d_name);
    found.push_back({atoi(entry->d_name), static_cast<pid_t>(line.number(ProcessLine::kParent))});
  }
  closedir(proc);
  return found;
}

}  // namespace

Family::Family(Channel& channel, int epoll, int child_signal, bool sessions)
    : channel_(channel),
      epoll_(epoll),
      child_signal_(child_signal),
      sessions_(sessions),
      fence_timer_(timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK)),
      patience_ms_(kPatienceMs) {}

// Our direct children. Only these can be killed without a race: until we reap one, its number
// cannot belong to another process. Killing a child hands us its children, so repetition reaches
// all. Without /proc, only workers are known, and their groups.
std::vector<pid_t> Family::children() const {
  std::vector<pid_t> found;
  const std::vector<Process> all = processes();
  for (const Process& each : all)
    if (each.parent == getpid()) found.push_back(each.pid);
  if (all.empty())
    for (const Worker& worker : workers_) found.push_back(-worker.pid);
  return found;
}

// Signals every process below us, parents before their children, and looks again until there are no
// new ones. With SIGSTOP there is no race: a stopped parent neither forks nor reaps.
void Family::signal_all(int number) {
  if (processes().empty())
    for (const Worker& worker : workers_) kill(-worker.pid, number);
  std::set<pid_t> reached{getpid()};
  for (int pass = 0, before = 0; pass < kMostPasses && before < static_cast<int>(reached.size());
       ++pass) {
    before = static_cast<int>(reached.size());
    std::vector<pid_t> found;
    for (const Process& each : processes())
      if (reached.contains(each.parent) && !reached.contains(each.pid)) found.push_back(each.pid);
    for (const pid_t pid : found) {
      kill(pid, number);
      reached.insert(pid);
    }
  }
}

void Family::spawn(SpawnRequest request, const int (&fds)[kWorkerFds]) {
  if (is_past_fence()) {  // the agent was stopped on its way here
    tell_failure(request.worker, 0, SpawnStage::kFork, ETIME);
    return;
  }
  const bool is_for_template = template_.is_usable() && !is_paused_ && request.directory[0] == '\0';
  if (is_for_template && template_.add(std::move(request), fds)) {
    start(template_.take_unsent());
  } else {
    start(request, fds);
  }
}

void Family::start(std::vector<Template::Waiting> requests) {
  for (Template::Waiting& each : requests) {
    start(each.request, each.fds);
    release(each);
  }
}

void Family::start_template(const SpawnRequest& request, const int (&fds)[kWorkerFds]) {
  int pair[2];
  if (template_.exists() || is_past_fence() ||
      socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    tell_failure(request.worker, 0, SpawnStage::kFork, EAGAIN);
    return;
  }
  int own[kWorkerFds];
  std::copy(std::begin(fds), std::end(fds), own);
  own[kRecordFd] = pair[1];
  template_.begin(request.worker, pair[0], sessions_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kTemplateEvent;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, pair[0], &event);
  start(request, own);
  close(pair[1]);
}

void Family::hear_template() {
  Template::Answer answer{};
  std::optional<Template::Waiting> forked;
  while (template_.receive(answer, forked)) {
    if (forked) {
      adopt(*forked, answer);
      release(*forked);
    }
    start(template_.take_unsent());
  }
  if (template_.has_ended()) start(template_.end());
  reap_orphans();  // ends that were kept while a fork was under way
}

// A worker that the template has forked becomes one of ours.
void Family::adopt(const Template::Waiting& fork, const Template::Answer& answer) {
  const uint32_t id = fork.request.worker;
  if (answer.stage != 0) {
    tell_failure(id, 0, static_cast<SpawnStage>(answer.stage), answer.error);
    return;
  }
  if (is_past_fence()) {
    tell_failure(id, 0, SpawnStage::kFork, ETIME);
    return;
  }
  siginfo_t info{};
  const bool is_child = answer.pid > 0 && waitid(P_PID, static_cast<id_t>(answer.pid), &info,
                                                 WEXITED | WNOHANG | WNOWAIT) == 0;
  ExecFailure* const slot = is_child ? take_slot() : nullptr;
  if (slot == nullptr) {
    start(fork.request, fork.fds);
    return;
  }
  add(id, answer.pid, slot);
  early_ends_.listen(id, fork.fds[kRecordFd], fork.request.record_slot);
  channel_.report({ReportKind::kStarted, id, answer.pid, 0, 0, now_ns(CLOCK_REALTIME)});
  template_.let_go();
}

void Family::check_template() {
  const int64_t deadline_ns = template_.deadline_ns();
  if (deadline_ns == 0 || is_paused_ || now_ns(CLOCK_MONOTONIC) < deadline_ns) return;
  channel_.report({ReportKind::kLate, template_.id()});
  start(template_.give_up());
}

ExecFailure* Family::take_slot() {
  if (free_slots_.empty()) {
    void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED) {
      for (size_t i = 0; i < kSlotsPerPage; ++i)
        free_slots_.push_back(static_cast<ExecFailure*>(page) + i);
    }
  }
  if (free_slots_.empty()) return nullptr;
  ExecFailure* const slot = free_slots_.back();
  free_slots_.pop_back();
  *slot = {SpawnStage::kNone, 0};
  return slot;
}

void Family::start(const SpawnRequest& request, const int (&fds)[kWorkerFds]) {
  ExecFailure* const slot = take_slot();
  const pid_t pid = slot == nullptr ? -1 : guardian::spawn(request, fds, slot, sessions_);
  if (pid < 0) {
    const int error = errno;
    if (slot != nullptr) free_slots_.push_back(slot);
    tell_failure(request.worker, 0, SpawnStage::kFork, error);
    return;
  }
  add(request.worker, pid, slot);
  const bool is_for_template = template_.exists() && request.worker == template_.id();
  if (!is_for_template) early_ends_.listen(request.worker, fds[kRecordFd], request.record_slot);
  channel_.report({ReportKind::kStarted, request.worker, pid, 0, 0, now_ns(CLOCK_REALTIME)});
}

void Family::add(uint32_t id, pid_t pid, ExecFailure* slot) {
  const int pidfd = open_pidfd(pid);
  if (pidfd >= 0) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kWorkerEvent | id;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, pidfd, &event);
  }
  workers_.push_back({id, pid, pidfd, slot});
}

void Family::tell_failure(uint32_t id, pid_t pid, SpawnStage stage, int error) {
  channel_.report({ReportKind::kSpawnFailed, id, pid, static_cast<int64_t>(stage), error,
                   now_ns(CLOCK_REALTIME)});
}

bool Family::is_template(const Worker& worker) const {
  return template_.exists() && worker.id == template_.id();
}

void Family::signal(const SignalRequest& request) {
  if (std::optional<Template::Waiting> waiting = template_.withdraw(request.worker)) {
    start(waiting->request, waiting->fds);  // what it does on that signal is its own affair
    release(*waiting);
  }
  const Worker* worker = find(request.worker);
  if (worker == nullptr) return;
  const int number = static_cast<int>(request.signal);
  // Just after the fork the child may not have its own group yet: then it is alone.
  if (kill(-worker->pid, number) != 0 && errno == ESRCH) kill(worker->pid, number);
}

void Family::worker_ended(uint32_t id) {
  if (const Worker* worker = find(id)) reap(*worker);
}

bool Family::reap_orphans() {
  for (;;) {
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return true;
    const Worker* worker = find_pid(info.si_pid);
    if (worker == nullptr) {
      if (template_.is_forking())
        return true;  // it may be that worker: its number is still to come
      waitid(P_PID, static_cast<id_t>(info.si_pid), &info, WEXITED | WNOHANG);
    } else if (worker->pidfd < 0) {
      reap(*worker);
    } else {
      return false;
    }
  }
}

void Family::note_stops() {
  for (;;) {
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WSTOPPED | WCONTINUED | WNOHANG) != 0 || info.si_pid == 0) return;
    const Worker* worker = find_pid(info.si_pid);
    if (worker == nullptr || is_paused_) continue;
    const bool goes_on = info.si_code == CLD_CONTINUED;
    if (is_template(*worker)) {
      template_.set_stopped(!goes_on);
      if (goes_on) {
        template_.use_again();
      } else {
        start(template_.give_up());
      }
      continue;
    }
    const ReportKind kind = goes_on ? ReportKind::kContinued : ReportKind::kStopped;
    channel_.report({kind, worker->id, worker->pid});
  }
}

// During END the order no longer matters: all that end now were killed by us.
void Family::reap_all() {
  while (!reap_orphans()) {
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
      if (const Worker* worker = find_pid(info.si_pid)) reap(*worker);
    }
  }
}

void Family::reap(const Worker& worker) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(worker.pid), &info, WEXITED | WNOHANG) != 0 ||
      info.si_pid == 0)
    return;
  if (worker.failure->stage != SpawnStage::kNone) {
    tell_failure(worker.id, worker.pid, worker.failure->stage, worker.failure->error);
  } else if (!worker.is_told) {
    tell_end(worker, info.si_code, info.si_status, now_ns(CLOCK_REALTIME));
  }
  if (worker.pidfd >= 0) close(worker.pidfd);
  early_ends_.forget(worker.id);
  free_slots_.push_back(worker.failure);
  const bool was_template = is_template(worker);
  workers_.erase(workers_.begin() + (&worker - workers_.data()));
  if (was_template) start(template_.end());
}

void Family::tell_end(const Worker& worker, int code, int status, int64_t time_ns) {
  channel_.report({ReportKind::kExited, worker.id, worker.pid, code, status, time_ns});
}

// One after the other: who ended first is told first. What was heard may be no end, but an exec.
void Family::note_early_ends(bool hears_more) {
  if (hears_more) {
    for (const EarlyEnd& end : early_ends_.take()) ending_.push_back(end);
  }
  for (; !ending_.empty(); ending_.pop_front()) {
    const EarlyEnd& end = ending_.front();
    Worker* const worker = find(end.worker);
    if (worker == nullptr || has_ended(*worker)) continue;  // the reap tells
    const int64_t ago_ns = now_ns(CLOCK_MONOTONIC) - end.heard_ns;
    const int status = coming_status(worker->pid);
    if (status == 0 && ago_ns < kSoonMs * 1'000'000ll) return;
    if (status == 0) continue;
    const int64_t time_ns = now_ns(CLOCK_REALTIME) - ago_ns;
    worker->is_told = true;
    if (WIFEXITED(status)) {
      tell_end(*worker, CLD_EXITED, WEXITSTATUS(status), time_ns);
    } else {
      const int code = WCOREDUMP(status) ? CLD_DUMPED : CLD_KILLED;
      tell_end(*worker, code, WTERMSIG(status), time_ns);
    }
  }
}

void Family::pause() {
  is_paused_ = true;
  signal_all(SIGSTOP);
}

void Family::stay_paused() {
  if (is_paused_) signal_all(SIGSTOP);
}

void Family::resume() {
  if (!is_paused_) return;  // what somebody else has stopped stays so
  is_paused_ = false;
  template_.renew_deadline();
  signal_all(SIGCONT);
}

int Family::wait_ms() const {
  if (!ending_.empty()) return 1;
  if (child_signal_ < 0) return kRetryMs;
  int64_t left_ns = INT64_MAX;
  if (template_.deadline_ns() != 0 && !is_paused_)
    left_ns = template_.deadline_ns() - now_ns(CLOCK_MONOTONIC);
  if (fence_timer_ < 0 && fence_.until_ns != 0 && !has_fenced_)
    left_ns = std::min(left_ns, fence_.until_ns - now_ns(CLOCK_BOOTTIME));
  if (left_ns == INT64_MAX) return -1;
  return static_cast<int>(std::clamp<int64_t>(left_ns / 1'000'000 + 1, 0, INT_MAX));
}

bool Family::is_past_fence() const {
  return fence_.until_ns != 0 && now_ns(CLOCK_BOOTTIME) >= fence_.until_ns;
}

void Family::set_fence(const FenceRequest& fence) {
  fence_ = fence;
  has_fenced_ = false;
  itimerspec at{};
  at.it_value.tv_sec = fence.until_ns / 1'000'000'000;
  at.it_value.tv_nsec = fence.until_ns % 1'000'000'000;
  timerfd_settime(fence_timer_, TFD_TIMER_ABSTIME, &at, nullptr);
}

void Family::enforce_fence() {
  if (has_fenced_ || !is_past_fence()) return;
  has_fenced_ = true;
  uint64_t expired;
  [[maybe_unused]] const ssize_t got = read(fence_timer_, &expired, sizeof expired);
  channel_.report({ReportKind::kFenced, 0, 0, 0, 0, now_ns(CLOCK_REALTIME)});
  if (fence_.pauses != 0) {
    pause();
  } else {
    kill_all();
  }
}

void Family::end_all() {
  drop_waiting();
  template_.end();
  end();
}

void Family::end() {
  const std::vector<pid_t> left = kill_all();
  for (const pid_t pid : left) channel_.report({ReportKind::kUnkillable, 0, std::abs(pid)});
  channel_.report(
      {ReportKind::kEnded, 0, 0, 0, static_cast<int64_t>(left.size()), now_ns(CLOCK_REALTIME)});
}

// What waits for the template is told to have been killed, as if it ran. Of what it forks just now,
// nothing will run.
void Family::drop_waiting() {
  for (Template::Waiting& each : template_.give_up()) {
    channel_.report(
        {ReportKind::kExited, each.request.worker, 0, CLD_KILLED, SIGKILL, now_ns(CLOCK_REALTIME)});
    release(each);
  }
  template_.use_again();
}

// The template is spared, where /proc shows that nothing else is left: while it runs, waitid
// cannot.
std::vector<pid_t> Family::kill_all() {
  drop_waiting();
  if (template_.exists() && processes().empty()) template_.end();
  const bool was_paused = std::exchange(is_paused_, false);
  const int64_t deadline = now_ns(CLOCK_MONOTONIC) + patience_ms_ * 1'000'000ll;
  std::vector<pid_t> left;
  for (;;) {
    reap_all();
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) {
      left.clear();
      break;
    }
    left = children();
    if (template_.exists()) {
      const Worker* const spared = find(template_.id());
      if (spared != nullptr && std::erase(left, spared->pid) != 0 && left.empty()) break;
    }
    const bool is_blind = left.empty() && processes().empty();  // others may run on, unseen
    if (is_blind || now_ns(CLOCK_MONOTONIC) > deadline) break;
    for (const pid_t pid : left) kill(pid, SIGKILL);
    pollfd wake{child_signal_, POLLIN, 0};
    poll(&wake, 1, kRetryMs);
    signalfd_siginfo ignored{};
    while (read(child_signal_, &ignored, sizeof ignored) > 0) {
    }
  }
  if (was_paused && template_.exists()) signal_all(SIGCONT);  // only it is left
  patience_ms_ = left.empty() ? kPatienceMs : kNoHopeMs;
  return left;
}

Worker* Family::find(uint32_t id) {
  for (Worker& worker : workers_)
    if (worker.id == id) return &worker;
  return nullptr;
}

Worker* Family::find_pid(pid_t pid) {
  for (Worker& worker : workers_)
    if (worker.pid == pid) return &worker;
  return nullptr;
}

}  // namespace guardian
