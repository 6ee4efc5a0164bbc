// Every process below the guardian: the workers, and, because the guardian is a subreaper, whatever
// any of them left behind, however it detached itself. Reaps them all and reports workers' ends in
// the order in which they happened.
#pragma once

#include <sys/epoll.h>

#include <vector>

#include "channel.h"
#include "worker.h"

namespace guardian {

class Family {
 public:
  // `epoll` tells of ended workers; `child_signal` is the signalfd that SIGCHLD arrives on.
  Family(Channel& channel, int epoll, int child_signal);

  void spawn(const SpawnRequest& request, const int (&fds)[kWorkerFds]);
  // To the worker's whole process group. Nothing happens if the worker has ended.
  void signal(const SignalRequest& request);
  // A pidfd became readable: its worker has ended.
  void worker_ended(uint32_t id);
  // Reaps orphans that have ended. False: a worker has ended too, and its pidfd must speak first.
  bool reap_orphans();
  // SIGKILL to all, again and again until none is left, or for as long as there is hope.
  void end();

  static constexpr uint64_t kWorkerEvent = 1ull << 32;  // epoll data: this bit | worker id

 private:
  Worker* find(uint32_t id);
  Worker* find_pid(pid_t pid);
  void reap(const Worker& worker);
  void reap_all();

  Channel& channel_;
  int epoll_;
  int child_signal_;
  int patience_ms_;
  std::vector<Worker> workers_;
  std::vector<ExecFailure*> free_slots_;
};

}  // namespace guardian
