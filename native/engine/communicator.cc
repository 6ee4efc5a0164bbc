#include "engine/communicator.h"

#include <unistd.h>

#include <bit>
#include <utility>

#include "engine/collective.h"

namespace rallypoint {
namespace {

constexpr std::size_t kMostCalls = 1024;         // outstanding collectives,
constexpr std::size_t kMostTransfers = 1 << 14;  // and sends and receives
constexpr long kLookUs = 1000;
constexpr double kForeverS = 1e9;
constexpr double kLeaveS = 2;
constexpr unsigned kLeaveLookUs = 200;
constexpr unsigned kLockLooks = 50;
// A call of at most this many items that did not wait takes some microseconds.
constexpr std::uint64_t kQuickItems = 1 << 14;
constexpr unsigned kTurns = 4;  // of calls, before other communicators have their turns
constexpr unsigned kLooks = 3;  // without success, before it is recorded where the program waits
constexpr std::uint16_t kReceive = 0xFFFF;

constexpr unsigned kLooksForMail = 16;
// A wait of at most so many sleeps, of milliseconds, need not know whether signal handlers may run:
// asking takes 10 us. Until it has asked, none runs.
constexpr unsigned kLooksForHandlers = 3;

// A host that also records, once a wait takes long, where the program is.
class Noter : public Host {
 public:
  explicit Noter(Host& host) : host_(host) {}
  void before_wait() override { host_.before_wait(); }
  bool runs_handlers() override { return host_.runs_handlers(); }
  bool is_alone() override { return host_.is_alone(); }
  std::string site() override { return host_.site(); }
  bool is_interrupted() override {
    if (++looks_ >= kLooks) note(host_, looks_);
    return host_.is_interrupted();
  }

 private:
  virtual void note(Host& host, unsigned look) = 0;

  Host& host_;
  unsigned looks_ = 0;
};

// Waits for the collective that is currently running.
class CallNoter final : public Noter {
 public:
  CallNoter(Host& host, GroupWaits& waits) : Noter(host), waits_(waits) {}
  // To be called if it has waited.
  void end() {
    if (noted_ != 0) waits_.wait_for(noted_);
  }

 private:
  void note(Host& host, unsigned) override {
    GroupRecord& record = waits_.record();
    if (!record.is_kept()) return;
    const std::uint64_t running = record.running();
    if (running == 0) return;
    if (running != noted_) {
      end();
      noted_ = running;
      record.set_call_site(host.site());
    }
    waits_.wait_for(running);
  }

  GroupWaits& waits_;
  std::uint64_t noted_ = 0;
};

// What is recorded of a send or receive.
struct TransferWords {
  explicit TransferWords(const Transfer& transfer)
      : what(Operator{transfer.sends ? collective::kSend : kReceive, transfer.dtype, ReduceOp::sum,
                      transfer.tag}
                 .bits()),
        items(transfer.bytes / item_bytes(transfer.dtype)),
        peer(transfer.peer) {}

  std::uint64_t what;
  std::uint64_t items;
  std::uint32_t peer;
};

// Waits for a send or receive; for a receive, it also records which other message has arrived
// instead. A transfer that had no place in the record, as too many were in progress, gets one while
// a thread waits for it.
class TransferNoter final : public Noter {
 public:
  TransferNoter(Host& host, GroupWaits& waits, const Work& work, const Mailbox& mailbox,
                const Transfer& transfer)
      : Noter(host),
        waits_(waits),
        work_(work),
        mailbox_(mailbox),
        transfer_(transfer),
        recorded_(work.record()) {}
  ~TransferNoter() {
    if (!is_noted_) return;
    waits_.record().await_no_more(recorded_);
    if (work_.record().call == nullptr) {
      if (work_.is_done()) {
        GroupRecord::finish(recorded_, work_.trouble());
      } else {
        GroupRecord::leave_place(recorded_);
      }
    }
    waits_.wait_for(recorded_);
  }
  TransferNoter(const TransferNoter&) = delete;
  TransferNoter& operator=(const TransferNoter&) = delete;

 private:
  void note(Host& host, unsigned look) override {
    const bool is_first = !is_noted_;
    if (is_first) {
      if (!find_place()) return;
      is_noted_ = true;
      waits_.record().await(recorded_);
      site_ = host.site();
    }
    if (is_first || look % kLooksForMail == 0) note_site(is_first);
    waits_.wait_for(recorded_);
  }
  bool find_place() {
    if (recorded_.call != nullptr) return true;
    const TransferWords words(transfer_);
    recorded_ = waits_.record().take_place(words.what, words.items, words.peer);
    return recorded_.call != nullptr;
  }
  void note_site(bool is_first) {
    const auto tag = transfer_.sends ? std::nullopt : mailbox_.unwanted_tag(transfer_);
    if (!is_first && tag == tag_) return;
    tag_ = tag;
    const std::string came = tag ? '\0' + std::to_string(*tag) : "";
    waits_.record().set_site(recorded_, site_ + came);
  }

  GroupWaits& waits_;
  const Work& work_;
  const Mailbox& mailbox_;
  const Transfer& transfer_;
  RecordedTransfer recorded_;
  bool is_noted_ = false;
  std::string site_;
  std::optional<std::int32_t> tag_;
};

std::deque<Ring> make_rings(const Region& region) {
  std::deque<Ring> rings;
  const std::uint32_t rank = region.rank();
  auto* const base = region.at<std::byte>(rank, region.layout().rings(rank));
  for (unsigned i = 0; i < kLanes; ++i) rings.emplace_back(base + i * kRingBytes);
  return rings;
}

std::vector<std::uint32_t> ranks_of(const std::vector<FarRank>& far) {
  std::vector<std::uint32_t> ranks;
  for (const FarRank& each : far) ranks.push_back(each.rank);
  return ranks;
}

// Tells each send which receivers share memory with this rank.
void part_receivers(Program& program, const Region& region) {
  for (auto& lane : program.lanes) {
    for (Operation& operation : lane) {
      std::vector<Receiver> all;
      all.swap(operation.receivers);
      for (const Receiver& to : all) {
        (region.is_far(to.rank) ? operation.far : operation.receivers).push_back(to);
      }
    }
  }
}

}  // namespace

Communicator::Communicator(int fd, std::uint32_t rank, std::uint32_t ranks, WaitPolicy policy,
                           const std::vector<FarRank>& far, const MakeTransports& connect,
                           std::string_view description)
    : region_(fd, rank, ranks, ranks_of(far)),
      memory_(region_),
      transports_(far.empty() ? Transports{} : connect(region_)),
      policy_(policy),
      record_(description),
      rings_(make_rings(region_)),
      collective_(region_, memory_,
                  Channel::collective(region_, rings_, transports_.messages.get()), policy),
      queue_(collective_, record_),
      mailbox_(region_, memory_, std::move(transports_.mail), policy) {
  region_.set_messenger(transports_.control.get());
  for (const FarRank& each : far) region_.state(each.rank).pid.store(each.pid);
}

Communicator::~Communicator() {
  if (is_served_.load()) ProgressThread::instance().remove(*this);
  leave();
  region_.set_messenger(nullptr);
}

void Communicator::leave() {
  MessageTransport* const wire = transports_.messages.get();
  if (wire != nullptr && region_.presence(region_.rank()) == Presence::here) {
    const double until_s = now_s() + kLeaveS;
    mailbox_.finish(until_s);
    // Others learn only from the end of its streams that nothing more comes from this rank. Threads
    // hold the lock for moments, unless the program has left one of them in a call.
    std::unique_lock lock(collective_.mutex, std::defer_lock);
    while (!lock.try_lock() && now_s() < until_s) usleep(kLeaveLookUs);
    if (lock) wire->finish_writing();
    while (lock && wire->unconfirmed() > 0 && !region_.poisoned() && region_.first_lost() < 0 &&
           now_s() < until_s) {
      usleep(kLeaveLookUs);
    }
    transports_.control->leave();
  }
  region_.leave();
  record_.leave();
}

void Communicator::revoke() {
  region_.spread(Trouble::revoked, static_cast<std::int32_t>(region_.rank()), nullptr, nullptr);
}

bool Communicator::end_calls(double most_s) {
  const double until_s = now_s() + most_s;
  for (;;) {
    {
      const std::unique_lock lock(collective_.mutex, std::try_to_lock);
      if (lock && queue_.is_empty() && mailbox_.is_empty()) return true;
    }
    if (now_s() > until_s) return false;
    revoke();
    if (!progress(false)) usleep(kLeaveLookUs);
  }
}

// Only for what will then be read: unread data would ring the bell again and again.
void Communicator::arm() {
  if (transports_.messages == nullptr) return;
  if (!queue_.is_empty()) {
    const std::unique_lock lock(collective_.mutex, std::try_to_lock);
    if (lock) transports_.messages->arm();  // otherwise another thread is working on it
  }
  mailbox_.arm();
}

std::uint64_t Communicator::kind(std::uint32_t collective, std::uint32_t root, std::uint64_t bytes,
                                 bool uneven) {
  const auto size_class = bytes == 0 ? 0 : std::bit_width(bytes - 1) + 1;  // at most 65
  return std::uint64_t{root} << 32 | std::uint64_t{collective} << 8 |
         static_cast<std::uint64_t>(uneven) << 7 | static_cast<std::uint64_t>(size_class);
}

const Program* Communicator::find(std::uint64_t kind) const {
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? nullptr : found->second;
}

std::string Communicator::teach(std::uint64_t kind, std::span<const std::int32_t> words,
                                std::uint32_t rank, std::uint32_t ranks, bool averages_at_once) {
  auto program = std::make_unique<Program>();
  std::string error = decode(words, *program);
  if (!error.empty()) return error;
  if (program->rank != rank || program->ranks != ranks) {
    return "the program is for rank " + std::to_string(program->rank) + " of " +
           std::to_string(program->ranks) + ", not for rank " + std::to_string(rank) + " of " +
           std::to_string(ranks);
  }
  program->averages_at_once = averages_at_once;
  if (region_.has_far()) part_receivers(*program, region_);
  kinds_[kind] = program.get();
  programs_.push_back(std::move(program));
  return {};
}

Trouble Communicator::run(const Call& call, Host& host) {
  std::optional<Waiter> waiter;
  std::shared_ptr<Work> work;
  {
    std::unique_lock lock(collective_.mutex, std::try_to_lock);
    if (!lock) {
      host.before_wait();  // its owner may need the GIL to proceed
      lock.lock();
    }
    if (queue_.is_empty() && call.agreement == nullptr) {
      record_.begin(call.what.bits(), call.count, call.count * item_bytes(call.what.dtype), 1);
      if (collective_.run(call, host, waiter) != Step::blocked) {
        const bool has_waited = waiter && waiter->has_waited();
        record_.end(collective_.trouble(), !has_waited && call.count <= kQuickItems,
                    has_waited ? waiter->waited_ns() : 0);
        return collective_.trouble();
      }
      work = std::make_shared<Work>();
      queue_.adopt(call, work, waiter ? waiter->waited_ns() : 0);
    } else {
      work = std::make_shared<Work>();
      queue_.push(call, work);
    }
  }
  // The call refers to the caller's memory: stay until it is no longer in use.
  return finish(*work, host, waiter);
}

Trouble Communicator::finish(const Work& work, Host& host, std::optional<Waiter>& waiter) {
  if (wait(work, kForeverS, host, waiter)) return work.trouble();
  host.before_wait();  // the holder of the lock may need the GIL to proceed
  {
    std::unique_lock lock(collective_.mutex, std::defer_lock);
    for (unsigned look = 0; look < kLockLooks && !lock.try_lock(); ++look) usleep(kLeaveLookUs);
    if (work.is_done()) return work.trouble();
    // Without the lock, another thread is in a call: peers are told of the trouble, but not in
    // which call.
    collective_.interrupt(lock.owns_lock());
  }
  NoHost patient;
  wait(work, kForeverS, patient, waiter);
  return Trouble::interrupted;
}

bool Communicator::submit(const Call& call, std::shared_ptr<Work> work, bool immediately,
                          Host& host) {
  while (queue_.size() >= kMostCalls) {
    const std::shared_ptr<Work> first = queue_.first();
    if (first != nullptr && !wait(*first, kForeverS, host)) return false;
  }
  serve();
  const bool is_first = queue_.is_empty();
  queue_.push(call, std::move(work));
  // A small operation is begun here: that costs less than waking the thread, which does the rest.
  if (!immediately && is_first && progress(false) && queue_.is_empty()) return true;
  ProgressThread::instance().notify(immediately);
  return true;
}

RecordedTransfer Communicator::record(const Transfer& transfer) {
  if (!record_.is_kept()) return {};
  const TransferWords words(transfer);
  return record_.post(words.what, words.items, transfer.bytes, words.peer);
}

void Communicator::serve() {
  std::call_once(served_, [this] {
    ProgressThread::instance().add(*this);
    is_served_.store(true);
  });
}

void Communicator::stand_by() {
  try {
    serve();
  } catch (const std::system_error&) {
    return;  // no further thread is allowed: the calls of handlers wait for this one
  }
  ProgressThread::instance().notify(true);
}

bool Communicator::post(Transfer& transfer, std::shared_ptr<Work> work) {
  if (mailbox_.size() >= kMostTransfers) return false;
  transfer.asked = transfer.peer;
  work->set_record(record(transfer));
  const Work& posted = *work;
  serve();
  mailbox_.post({&transfer, std::move(work)});
  if (!posted.is_done()) ProgressThread::instance().notify(transfer.bytes > kMailBytes);
  return true;
}

Trouble Communicator::transfer(Transfer& transfer, Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  transfer.asked = transfer.peer;
  const RecordedTransfer recorded = record(transfer);
  Mailbox::Item item{&transfer};
  if (carry_out(item, host)) {
    if (recorded.call != nullptr) GroupRecord::finish(recorded, item.trouble);
    return item.trouble;
  }
  const auto work = std::make_shared<Work>();
  work->set_record(recorded);
  item.work = work;
  mail_waiters_.fetch_add(1);
  mailbox_.post(std::move(item));
  mail_waiters_.fetch_sub(1);
  if (mailbox_.has_backlog()) {
    serve();
    ProgressThread::instance().notify(true);
  }
  if (work->is_done() || wait(transfer, *work, kForeverS, host)) return work->trouble();
  mailbox_.interrupt(transfer);
  NoHost patient;
  wait(transfer, *work, kForeverS, patient);
  return Trouble::interrupted;
}

// Carries out a transfer while it is the only one and need not sleep: it then needs no place in a
// list, and no work that outlives the call. Returns whether it has ended.
bool Communicator::carry_out(Mailbox::Item& item, Host& host) {
  Mailbox::Step step = mailbox_.step(item);
  if (step == Mailbox::Step::done || step == Mailbox::Step::others) {
    return step == Mailbox::Step::done;
  }
  Waiter waiter(region_, policy_, host, nullptr);
  bool must_sleep = false;
  while (!must_sleep && step != Mailbox::Step::done && step != Mailbox::Step::others) {
    if (step == Mailbox::Step::moved) {
      waiter.reset();
    } else {
      must_sleep = waiter.pause(item.transfer->asked);
    }
    if (!must_sleep) step = mailbox_.step(item);
  }
  if (waiter.has_waited()) record_.has_waited(waiter.waited_ns());
  return step == Mailbox::Step::done;
}

bool Communicator::wait(const Transfer& transfer, const Work& work, double timeout_s, Host& host) {
  const double until_s = now_s() + timeout_s;
  const bool has_end = timeout_s < kForeverS;
  bool is_said = false;
  bool has_slept = false;
  unsigned looks = 0;
  bool is_helped = false;  // by the progress thread, which is not needed unless handlers run
  TransferNoter noter(host, waits_, work, mailbox_, transfer);
  mail_waiters_.fetch_add(1);
  {
    Waiter waiter(region_, policy_, host, &mailbox_);
    while (!work.is_done()) {
      if (mailbox_.advance(std::exchange(has_slept, false))) {
        waiter.reset();
        if (std::exchange(is_said, false)) mailbox_.set_waiting(nullptr);
      } else if (waiter.pause(transfer.asked)) {
        has_slept = true;
        if (now_s() > until_s) break;
        if (++looks < kLooksForHandlers) continue;
        if (looks == kLooksForHandlers && host.runs_handlers()) {
          is_helped = true;
          mail_waiters_.fetch_sub(1);
          stand_by();
        }
        if (noter.is_interrupted()) break;
        is_said = is_said && mailbox_.is_waiting(transfer);  // a handler may have waited, too
        // A caller that waits for a limited time may do something else afterwards.
        if (!is_said && !has_end && host.is_alone()) {
          mailbox_.set_waiting(&transfer);
          is_said = true;
        }
      }
    }
    if (waiter.has_waited()) record_.has_waited(waiter.waited_ns());
  }
  if (is_said) mailbox_.set_waiting(nullptr);
  if (!is_helped) mail_waiters_.fetch_sub(1);
  if (is_served_.load() && !mailbox_.is_empty()) ProgressThread::instance().notify(true);
  return work.is_done();
}

bool Communicator::progress(bool has_slept) {
  bool moved = !mailbox_.is_empty() && mailbox_.advance(has_slept);
  const std::unique_lock lock(collective_.mutex, std::try_to_lock);
  if (!lock) return moved;  // another thread is working on it
  NoHost host;
  for (unsigned turn = 0; turn < kTurns && queue_.advance(has_slept, host) == Step::moved; ++turn) {
    moved = true;
  }
  return moved;
}

bool Communicator::wait(const Work& work, double timeout_s, Host& host) {
  std::optional<Waiter> waiter;
  return wait(work, timeout_s, host, waiter);
}

bool Communicator::wait(const Work& work, double timeout_s, Host& host,
                        std::optional<Waiter>& waiter) {
  const double end_s = now_s() + timeout_s;
  CallNoter noter(host, waits_);
  NoHost patient;  // an interruption ends the wait, not the operation
  bool has_slept = false;
  unsigned looks = 0;
  while (!work.is_done()) {
    std::unique_lock lock(collective_.mutex, std::try_to_lock);
    if (lock) {
      if (!waiter) waiter.emplace(region_, policy_, host, transports_.messages.get());
      do {
        if (queue_.advance(std::exchange(has_slept, false), patient) == Step::moved) {
          waiter->reset();
        } else {
          has_slept = waiter->pause(collective_.blocker());
        }
      } while (!has_slept && !work.is_done());
      lock.unlock();
    } else {
      host.before_wait();
      work.sleep(kLookUs);
    }
    if (work.is_done() || now_s() > end_s) break;
    if (++looks < kLooksForHandlers) continue;
    if (looks == kLooksForHandlers && host.runs_handlers()) stand_by();
    if (noter.is_interrupted()) break;  // a handler's call needs the lock
  }
  noter.end();
  if (!queue_.is_empty()) ProgressThread::instance().notify(true);
  return work.is_done();
}

}  // namespace rallypoint
