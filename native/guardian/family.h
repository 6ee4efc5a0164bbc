// Every process below the guardian: the workers, and, because the guardian is a subreaper, whatever
// any of them left behind, however it detached itself. Reaps them all and reports workers' ends in
// the order in which they happened.
#pragma once

#include <sys/epoll.h>

#include <deque>
#include <vector>

#include "channel.h"
#include "early_ends.h"
#include "template.h"
#include "worker.h"

namespace guardian {

class Family {
 public:
  // `epoll` reports ended workers; `child_signal` is the signalfd that receives SIGCHLD. With
  // `sessions`, each worker gets its own session.
  Family(Channel& channel, int epoll, int child_signal, bool sessions);

  // Starts a worker: by the template if there is one, else by fork and exec.
  void spawn(SpawnRequest request, const int (&fds)[kWorkerFds]);
  // Starts the template, by fork and exec; its own socket to us takes the place of a record.
  void start_template(const SpawnRequest& request, const int (&fds)[kWorkerFds]);
  // The template's socket is readable.
  void hear_template();
  // Starts what has waited too long for the template.
  void check_template();
  // Signals the worker's whole process group. Does nothing if the worker has ended.
  void signal(const SignalRequest& request);
  // A pidfd became readable: its worker has ended.
  void worker_ended(uint32_t id);
  // Reaps orphans that have ended. False: a worker has ended too, and its pidfd must be handled
  // first.
  bool reap_orphans();
  // Reports workers that are about to end, as soon as it is known how; `hears_more`: `early_ends`
  // is readable.
  void note_early_ends(bool hears_more);
  int early_ends() const { return early_ends_.fd(); }
  // Reports workers that a signal has stopped, or let continue; nothing while they are paused.
  void note_stops();
  // Sends SIGKILL to all but the template, repeatedly, until none is left, or for as long as that
  // may help.
  void end();
  // Ends the template too.
  void end_all();
  // Stops every process below us until `resume`. Others may continue some: `stay_paused`, to be
  // called when children report, stops those again.
  void pause();
  void stay_paused();
  void resume();
  // Everything may run until then, and is ended or paused by `enforce_fence` afterwards. The timer
  // wakes the caller; it also counts while the machine is suspended.
  void set_fence(const FenceRequest& fence);
  void enforce_fence();
  bool is_past_fence() const;
  // How long to wait for events, or -1: not for ever only where the system grants no signalfd or no
  // timerfd.
  int wait_ms() const;
  int fence_timer() const { return fence_timer_; }

  static constexpr uint64_t kWorkerEvent = 1ull << 32;    // epoll data: this bit | worker id
  static constexpr uint64_t kTemplateEvent = 1ull << 33;  // the template's socket

 private:
  Worker* find(uint32_t id);
  Worker* find_pid(pid_t pid);
  bool is_template(const Worker& worker) const;
  void start(const SpawnRequest& request, const int (&fds)[kWorkerFds]);
  void start(std::vector<Template::Waiting> requests);
  void adopt(const Template::Waiting& fork, const Template::Answer& answer);
  void add(uint32_t id, pid_t pid, ExecFailure* slot);
  void tell_failure(uint32_t id, pid_t pid, SpawnStage stage, int error);
  ExecFailure* take_slot();
  void reap(const Worker& worker);
  void tell_end(const Worker& worker, int code, int status, int64_t time_ns);
  void reap_all();
  void signal_all(int number);
  std::vector<pid_t> children() const;  // negative: a worker and its group
  std::vector<pid_t> kill_all();
  void drop_waiting();

  Channel& channel_;
  int epoll_;
  int child_signal_;
  bool sessions_;
  int fence_timer_;
  int patience_ms_;
  FenceRequest fence_{};
  bool has_fenced_ = false;
  bool is_paused_ = false;
  EarlyEnds early_ends_;
  std::deque<EarlyEnd> ending_;  // it is not yet known how
  Template template_;
  std::vector<Worker> workers_;
  std::vector<ExecFailure*> free_slots_;
};

}  // namespace guardian
