// The process that has imported what the workers need, and forks them: base/template.py.
//
//   guardian --request, descriptors--> template --fork--> middle --fork--> worker
//            <------ answer ----------  the middle ends, which makes the worker the guardian's
//            child
//            --a byte--------------------------------------------------------> worker goes on
//
// A worker does nothing before that byte: if the guardian gives up before the answer, or dies, it
// ends at the end of the file. Rule: the guardian never waits; requests queue here, one is under
// way at a time, and what the template does not do in time is handed back, to be started by exec.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "protocol.h"

namespace guardian {

class Template {
 public:
  // A worker to be forked. Its descriptors are our own.
  struct Waiting {
    SpawnRequest request;
    int fds[kWorkerFds];
  };
  // What the template sends: it is ready (no pid), or has forked a worker.
  struct Answer {
    int32_t pid;    // 0: it could not
    int32_t stage;  // a SpawnStage, and errno, if the worker could not be set up
    int32_t error;
  };

  // `socket` is ours from now on; `sessions`: each worker gets its own.
  void begin(uint32_t id, int socket, bool sessions);
  uint32_t id() const { return id_; }
  bool exists() const { return socket_ >= 0; }

  // Whether it is to be asked for workers now.
  bool is_usable() const { return exists() && !is_late_ && !is_stopped_; }
  // Duplicates the descriptors. False: there are none left.
  bool add(SpawnRequest&& request, const int (&fds)[kWorkerFds]);
  // Whether a process may exist of which the guardian does not know yet that it is a worker.
  bool is_forking() const { return go_ >= 0; }

  // Its next answer; `forked` is the worker that it belongs to, if that is still wanted.
  bool receive(Answer& answer, std::optional<Waiting>& forked);
  // Lets the worker go on that `receive` has returned; without this, `take_unsent` ends it.
  void let_go();
  bool has_ended() const { return has_ended_; }

  // It has ended; or does not run: all that wait are handed back.
  std::vector<Waiting> end();
  std::vector<Waiting> give_up();
  // One that waits is handed back.
  std::optional<Waiting> withdraw(uint32_t worker);
  // Asks for the next one; what could not be sent is handed back.
  std::vector<Waiting> take_unsent();
  // A signal that was not ours has stopped it, or lets it continue.
  void set_stopped(bool is_stopped) { is_stopped_ = is_stopped; }
  // After `give_up`: it is to be asked again, if it owes no answer; else once that has come.
  void use_again();
  // Time begins again, after a pause.
  void renew_deadline();
  // When `give_up` is due (CLOCK_MONOTONIC, in ns); 0: nothing waits.
  int64_t deadline_ns() const;

 private:
  void ask();
  void forget_go();

  uint32_t id_ = 0;
  int socket_ = -1;
  bool sessions_ = false;
  bool is_ready_ = false;
  bool is_late_ = false;
  bool is_stopped_ = false;
  bool owes_answer_ = false;
  bool has_ended_ = false;
  int go_ = -1;  // to the worker that is being forked, which is the first in the queue
  int64_t since_ns_ = 0;
  std::deque<Waiting> waiting_;
  std::vector<Waiting> unsent_;
};

// Closes the descriptors.
void release(Template::Waiting& waiting);

}  // namespace guardian
