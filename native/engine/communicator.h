// A process's part of one group: the region, the programs it has been taught, and the channels.
//
// The program for a call is chosen elsewhere; `find` looks it up once per kind of call, and `teach`
// stores it.
//
// Threads: `progress`, `arm` and `has_work` are called by the progress thread, all else by threads
// of the program; `find` and `teach` only under Python's lock.
//
// Locks, none of which is taken under the mailbox's:
//   executor's  the executor, the queue's first call, the connections for messages; a thread holds
//               it while it makes progress or sleeps shortly, and `wait` only tries to take it,
//               because whoever has it carries out the caller's operation, too
//   queue's     the list of calls, for moments
//   mailbox's   sends, receives, and the connections for mail
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/executor.h"
#include "engine/flight_record.h"
#include "engine/group_waits.h"
#include "engine/mailbox.h"
#include "engine/process.h"
#include "engine/progress_thread.h"
#include "engine/queue.h"
#include "engine/transport.h"

namespace rallypoint {

class Communicator final : public Progressable {
 public:
  // `far` are the ranks on other hosts, for which `connect` creates the transports. `description`
  // of the group is for the flight record.
  Communicator(int fd, std::uint32_t rank, std::uint32_t ranks, WaitPolicy policy,
               const std::vector<FarRank>& far, const MakeTransports& connect,
               std::string_view description = {});
  ~Communicator() override;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Whether this process inherited it by fork: it must then be left alone.
  bool is_parents() const { return generation_ != generation(); }
  Region& region() { return region_; }
  const Region& region() const override { return region_; }
  PeerMemory& memory() { return memory_; }

  // The kind of a call: calls of one kind share a program.
  static std::uint64_t kind(std::uint32_t collective, std::uint32_t root, std::uint64_t bytes,
                            bool uneven);
  const Program* find(std::uint64_t kind) const;
  // Returns an empty string, or what is wrong with a program for `rank` of `ranks`.
  std::string teach(std::uint64_t kind, std::span<const std::int32_t> words, std::uint32_t rank,
                    std::uint32_t ranks, bool averages_at_once);

  // Runs a collective of all ranks in the calling thread, after those submitted before. Once it
  // would have to sleep, it is carried out like one in the background: signal handlers, which then
  // run in this thread, may make further calls, which come after it.
  Trouble run(const Call& call, Host& host);
  // Carries it out in the background; `immediately` says whether that is worth waking a thread. If
  // there are too many already, it waits; returns false if that was interrupted.
  bool submit(const Call& call, std::shared_ptr<Work> work, bool immediately, Host& host);
  // The same for a send or receive. It never waits, because what peers wait for may be begun only
  // afterwards; if very many are outstanding already, it returns false.
  bool post(Transfer& transfer, std::shared_ptr<Work> work);
  // Sends or receives in the calling thread.
  Trouble transfer(Transfer& transfer, Host& host);
  // Makes progress with the communicator's operations until this one is done, the time is over, or
  // the host is interrupted; returns whether it is done.
  bool wait(const Work& work, double timeout_s, Host& host);
  bool wait(const Transfer& transfer, const Work& work, double timeout_s, Host& host);
  // The same for a collective for which nobody else can wait: an interruption of the wait ends the
  // collective, and the group with it.
  Trouble finish(const Work& work, Host& host) {
    std::optional<Waiter> waiter;
    return finish(work, host, waiter);
  }
  // Makes progress without waiting, for some turns of a call.
  bool progress(bool has_slept) override;
  void arm() override;
  // Ends the wait of every rank with an error, and every later call; takes part still.
  void revoke();
  // Waits until no call of this process is under way; if there are any, revokes first. Returns
  // false if that takes longer than `most_s`.
  bool end_calls(double most_s);
  // Leaves the group. Data on its way to other hosts is waited for, within limits.
  void leave();
  bool shares_cores() const override { return policy_.spins == 0; }
  bool has_work() const override {
    return !queue_.is_empty() || (!mailbox_.is_empty() && mail_waiters_.load() == 0);
  }

 private:
  void serve();
  // Has the progress thread stand by while this one waits, in case it runs signal handlers.
  void stand_by();
  Trouble finish(const Work& work, Host& host, std::optional<Waiter>& waiter);
  bool wait(const Work& work, double timeout_s, Host& host, std::optional<Waiter>& waiter);
  RecordedTransfer record(const Transfer& transfer);
  bool carry_out(Mailbox::Item& item, Host& host);

  const unsigned generation_ = generation();
  Region region_;
  PeerMemory memory_;
  Transports transports_;  // empty if all ranks are on this host; the mail is the mailbox's
  WaitPolicy policy_;
  GroupRecord record_;
  std::deque<Ring> rings_;  // by lane; a deque, because rings stay in place
  Executor collective_;
  Queue queue_;  // of collective_
  std::once_flag served_;
  std::atomic<bool> is_served_{false};  // by the progress thread
  Mailbox mailbox_;
  std::atomic<unsigned> mail_waiters_{0};  // they advance the mailbox themselves
  std::unordered_map<std::uint64_t, const Program*> kinds_;
  std::vector<std::unique_ptr<Program>> programs_;  // never dropped: messages refer to them
  GroupWaits waits_{record_};
};

}  // namespace rallypoint
