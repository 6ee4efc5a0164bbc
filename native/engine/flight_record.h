// The flight record: the current and last calls of this process, group by group, in memory that
// outlives it. The launcher created that memory, and reads it when something went wrong.
//
//   | header | group | group | ...      a page each; those of no group are never touched
//
// A call is written when it begins, and its state changes when it ends: stores into one cache line,
// and a coarse clock. A reader accepts an entry only if its word is the same before and after: the
// word holds the call's number plus one and its state, and is changed first and last.
// src/rallypoint/base/flight_record.py reads this layout. Without a launcher there is no record.
//
// While a program traces (docs/decisions/084-traces.md), each call that ends is also written into a
// ring for all groups, in pages that no group has used, and times are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/layout.h"
#include "engine/life_word.h"
#include "engine/waiting.h"

namespace rallypoint {

inline constexpr std::uint32_t kRecordMagic = 0x52504652;
inline constexpr std::uint32_t kRecordVersion = 2;
inline constexpr std::size_t kRecordPage = 4096;
inline constexpr unsigned kRecordPages = 1024;  // pages of a process: the header and the groups
inline constexpr unsigned kRecordedCalls = 32;
inline constexpr unsigned kRecordedTransfers = 16;
inline constexpr unsigned kKeptPages = 64;  // of groups that are gone
// Where the ring begins; groups use only pages below it meanwhile.
inline constexpr unsigned kTracePage = 512;
inline constexpr unsigned kTracedCalls = (kRecordPages - kTracePage) * kRecordPage / 64;
inline constexpr std::uint32_t kTraceVersion = 1;

enum class CallState : std::uint64_t { none, running, done, failed };

struct alignas(64) RecordedCall {
  std::atomic<std::uint64_t> word;  // (number + 1) << 2 | state; kChanging
  Relaxed<std::uint64_t> since_ns;  // CLOCK_MONOTONIC, when it began
  Relaxed<std::uint64_t> what;      // an Operator (executor.h)
  Relaxed<std::uint64_t> count;     // items of a block
  Relaxed<std::uint32_t> peer;      // of a send or receive: a rank in the group, or ~0 for any
  Relaxed<std::uint32_t> trouble;   // why it failed
  Relaxed<std::uint64_t> ended_ns;  // valid once the word says that it has ended
  // What the group has done in all (kCounts); older readers skip these bytes. A collective's entry:
  // the bytes of blocks up to this call, and the time waited up to its beginning or, once it has
  // ended, its end. Those of sends and receives are no part of their entries: GroupPage.
  std::atomic<std::uint64_t> counts[2];
};
static_assert(sizeof(RecordedCall) == 64);
inline constexpr std::uint64_t kChanging = static_cast<std::uint64_t>(CallState::running);

// Where a transfer is recorded, as long as the number there is its own: a transfer that a thread
// waits for may take the place of one that nobody waits for.
struct RecordedTransfer {
  RecordedCall* call = nullptr;  // null: nowhere
  std::uint64_t number_plus_one = 0;
};

// The line of the program where a thread waits for a call, recorded only if it has waited for long.
// For a receive it is followed by a NUL and the tag of a message that has arrived instead.
struct alignas(64) CallSite {
  std::atomic<std::uint64_t> number;  // the call's plus one; 0 while it changes
  Relaxed<std::uint64_t> text[23];    // ends with a NUL

  void write(std::uint64_t number_plus_one, std::string_view site);
};

enum class GroupPresence : std::uint32_t {
  none,
  here,
  left,
  foreign,
  foreign_left,
  steps
};  // foreign_page.h; steps: engine/step_record.py, and no group

struct alignas(kRecordPage) GroupPage {
  std::atomic<GroupPresence> presence;
  std::uint32_t counts_version;       // kCountsVersion; 0: this writer counts nothing
  std::atomic<std::uint64_t> queued;  // collectives begun in the background that have not ended
  char description[1024 - 2 * sizeof(CallSite) - 16];  // JSON, padded with NULs
  CallSite call_site;
  CallSite transfer_site;
  RecordedCall calls[kRecordedCalls];  // by number
  RecordedCall transfers[kRecordedTransfers];

  std::atomic<std::uint64_t>& transferred_bytes() { return transfers[0].counts[0]; }
  std::atomic<std::uint64_t>& transfers_waited_ns() { return transfers[0].counts[1]; }
  // The sum of the squares of all waits, of collectives as well: shows whether they are many that
  // are alike, or a few long ones.
  std::atomic<std::uint64_t>& waited_squared() { return transfers[1].counts[0]; }
};
static_assert(sizeof(GroupPage) == kRecordPage);

// Counters only grow: from two readings follows what was done in between, whenever they are taken.
// A wait is time in which a call could not continue without others; spins do not count.
inline constexpr std::uint32_t kCountsVersion = 1;
// In units of 2^15 ns, squared: an hour is 2^53 of them.
inline std::uint64_t squared_wait(std::uint64_t waited_ns) {
  const std::uint64_t units = waited_ns >> 15;
  return units * units;
}

struct alignas(64) TracedCall {
  std::atomic<std::uint64_t> stamp;  // calls traced before it, plus one; 0 while it changes
  Relaxed<std::uint64_t> word;       // from here on as in RecordedCall
  Relaxed<std::uint64_t> since_ns;
  Relaxed<std::uint64_t> what;
  Relaxed<std::uint64_t> count;
  Relaxed<std::uint64_t> ended_ns;
  Relaxed<std::uint32_t> peer;
  Relaxed<std::uint32_t> page;  // of its group
};
static_assert(sizeof(TracedCall) == 64);

struct alignas(kRecordPage) RecordHeader {
  std::atomic<std::uint32_t> magic;  // written last
  std::uint32_t version;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint32_t> groups;      // pages that have ever been used
  std::atomic<std::uint32_t> unrecorded;  // groups for which there was no page
  char names[kRecordPage - 60];           // JSON, padded with NULs
  std::atomic<std::uint32_t> life_word;   // of this process, from its first group on (life_word.h)
  std::uint32_t unused;
  std::atomic<std::uint64_t> traced;  // calls that were ever written into the ring
  // CLOCK_MONOTONIC; the tracing program extends it; 0: no tracing
  std::atomic<std::uint64_t> trace_until;
  std::uint32_t trace_version;  // the version that this process writes
  // Seconds of CLOCK_MONOTONIC; a reader extends it: other backends' groups are looked at more
  // often.
  std::atomic<std::uint32_t> watched_until;
  std::atomic<std::uint32_t> asked;     // incremented by a reader who wants to know more of other
  std::atomic<std::uint32_t> answered;  // backends' groups; the last question that was answered
};
static_assert(sizeof(RecordHeader) == kRecordPage);
static_assert(offsetof(RecordHeader, life_word) == kLifeWordAt);

// Makes this process write its record at `offset` of a file in memory; the descriptor may be closed
// afterwards. `names` explains the numbers in it; "{}" means not yet known, to be called again.
// Returns whether it does: only one process does, and the file must be large enough.
bool open_flight_record(int fd, std::uint64_t offset, std::string_view names);
// A page in which this process writes the steps of its program; null without a record, or if there
// is no page left.
std::byte* open_steps_page();

// One group's page, as its communicator writes it. Without a record, all methods do nothing.
class GroupRecord {
 public:
  explicit GroupRecord(std::string_view description);
  ~GroupRecord();
  GroupRecord(const GroupRecord&) = delete;
  GroupRecord& operator=(const GroupRecord&) = delete;

  void leave();
  bool is_kept() const { return page_ != nullptr; }
  const GroupPage* page() const { return page_; }

  // A collective begins, or ends; one after the other. `bytes`: of a block. `numbers`: how many
  // calls it counts as for the executor.
  void begin(std::uint64_t what, std::uint64_t count, std::uint64_t bytes, unsigned numbers) {
    if (page_ == nullptr || has_failed_) return;
    RecordedCall& call = page_->calls[number_ % kRecordedCalls];
    bytes_ += bytes;
    write(call, ++number_, what, count, 0);
    call.counts[0].store(bytes_, std::memory_order_relaxed);
    call.counts[1].store(waited_ns_, std::memory_order_relaxed);
    current_ = &call;
    number_ += numbers - 1;
  }
  // `is_quick`: it took far less than a tick of the coarse clock, which need not be read again.
  void end(Trouble trouble, bool is_quick, std::uint64_t waited_ns) {
    if (current_ == nullptr) return;
    if (waited_ns != 0) add_wait(waited_ns);
    current_->ended_ns = is_quick ? current_->since_ns : coarse_now_ns();
    finish(*current_, current_->word.load(std::memory_order_relaxed) >> 2, trouble);
    has_failed_ = trouble != Trouble::none;
    current_ = nullptr;
  }
  void queue() {
    if (page_ != nullptr) page_->queued.fetch_add(1, std::memory_order_relaxed);
  }
  void unqueue() {
    if (page_ != nullptr) page_->queued.fetch_sub(1, std::memory_order_relaxed);
  }
  // The number of the running collective plus one, or 0; on any thread.
  std::uint64_t running() const;

  // Sends and receives: any number at a time, on any thread. If too many are in progress, there is
  // no place, except for one that a thread waits for, from `take_place` to `leave_place`.
  RecordedTransfer post(std::uint64_t what, std::uint64_t count, std::uint64_t bytes,
                        std::uint32_t peer);
  RecordedTransfer take_place(std::uint64_t what, std::uint64_t count, std::uint32_t peer);
  static void leave_place(const RecordedTransfer& transfer);
  static void finish(const RecordedTransfer& transfer, Trouble trouble);
  // Threads that wait for the transfer keep its place, counted from `await` to `await_no_more`.
  void await(const RecordedTransfer& transfer) { awaited(transfer).fetch_add(1); }
  void await_no_more(const RecordedTransfer& transfer) { awaited(transfer).fetch_sub(1); }
  // A thread has waited for one of them.
  void has_waited(std::uint64_t waited_ns);

  void set_call_site(std::string_view site) { page_->call_site.write(running(), site); }
  void set_site(const RecordedTransfer& transfer, std::string_view site) {
    page_->transfer_site.write(transfer.number_plus_one, site);
  }

 private:
  [[gnu::cold]] void add_wait(std::uint64_t waited_ns);
  static void write(RecordedCall& call, std::uint64_t number_plus_one, std::uint64_t what,
                    std::uint64_t count, std::uint32_t peer);
  static void finish(RecordedCall& call, std::uint64_t number_plus_one, Trouble trouble);
  std::atomic<std::uint32_t>& awaited(const RecordedTransfer& transfer) {
    return awaited_[transfer.call - page_->transfers];
  }

  GroupPage* page_;
  RecordedCall* current_ = nullptr;
  std::uint64_t number_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t waited_ns_ = 0;
  bool has_failed_ = false;  // later calls fail too, and are not recorded
  std::atomic<std::uint64_t> transfers_{0};
  std::atomic<std::uint32_t> awaited_[kRecordedTransfers] = {};  // by threads, by place
};

}  // namespace rallypoint
