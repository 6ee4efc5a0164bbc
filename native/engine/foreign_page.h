// The calls of a group of another backend (gloo, NCCL), in two pages of the flight record.
//
//   | status, description | calls, by number ... | sends and receives |
//
// The calls are what that backend reports, merged in by the scribe (scribe/scribe.h); an entry is
// written once for each number, and whether it is done also follows from the status, which is
// newer. Sends and receives are written by the thread that makes them (pytorch/other_backends.py).
// src/rallypoint/base/flight_record.py reads this layout.
#pragma once

#include <cstdint>
#include <string_view>

#include "engine/flight_record.h"

namespace rallypoint {

inline constexpr unsigned kForeignCalls = 32;
inline constexpr unsigned kForeignTransfers = 16;

// For how long, and the sum of the squares (flight_record.h).
struct WaitCounts {
  std::atomic<std::uint64_t> ns;
  std::atomic<std::uint64_t> squared;
};

struct alignas(64) ForeignCall {
  std::atomic<std::uint64_t> word;  // as a RecordedCall's
  Relaxed<std::uint64_t> since_ns;  // CLOCK_MONOTONIC
  Relaxed<std::uint64_t> ended_ns;  // 0: not known
  // The backend's own number for it; messages are counted as well.
  Relaxed<std::uint64_t> count_of_backend;
  char operation[48];  // as the backend calls it
  char dtype[16];      // the same
  std::int64_t shape[8];
  std::uint32_t dimensions;  // ~0: not known
  std::uint32_t unused;
  WaitCounts waits;  // of the group: see ForeignPage
};
static_assert(sizeof(ForeignCall) == 192);

struct alignas(64) ForeignTransfer {
  std::atomic<std::uint64_t> word;
  Relaxed<std::uint64_t> since_ns;
  Relaxed<std::uint64_t> count;  // items
  Relaxed<std::uint32_t> peer;   // a rank in the group, or ~0 for any
  Relaxed<std::int32_t> tag;
  Relaxed<std::uint32_t> sends;  // otherwise it is a receive
  char dtype[28];
};
static_assert(sizeof(ForeignTransfer) == 64);

struct alignas(kRecordPage) ForeignPage {
  std::atomic<GroupPresence> presence;  // foreign, foreign_left
  std::uint32_t counts_version;         // as a GroupPage's
  Relaxed<std::uint64_t> looked_ns;     // when the scribe last looked; 0: never
  Relaxed<std::uint64_t> changed_ns;    // when it first saw the present number of the last call
  Relaxed<std::uint64_t> enqueued;      // the backend's count of its last call,
  Relaxed<std::uint64_t> completed;     // and of the last completed one
  std::atomic<std::uint64_t> transfers_begun;
  char description[1024 - 6 * sizeof(std::uint64_t)];  // JSON, filled up with NULs
  ForeignCall calls[kForeignCalls];                    // by number
  ForeignTransfer transfers[kForeignTransfers];

  // Of Python, for works; and as the scribe has sampled them, wherever the program waited. Both are
  // of all groups of other backends, and counted in the first one.
  WaitCounts& waits() { return calls[0].waits; }
  WaitCounts& sampled_waits() { return calls[1].waits; }
};
static_assert(sizeof(ForeignPage) == 2 * kRecordPage);

// A page for a group; null without a record, or if there is no page left.
ForeignPage* open_foreign_page(std::string_view description);

struct CallOfBackend {
  std::uint64_t number;
  std::uint64_t count_of_backend;
  bool is_done;
  std::uint64_t since_ns;
  std::uint64_t ended_ns;
  std::string_view operation;
  std::string_view dtype;
  const std::int64_t* shape;
  std::uint32_t dimensions;
};

// One thread at a time.
void write(ForeignPage& page, const CallOfBackend& call);

// Any thread; returns the index of the transfer, or -1 if all are in use.
int begin_transfer(ForeignPage& page, bool sends, std::uint32_t peer, std::int32_t tag,
                   std::uint64_t count, std::string_view dtype);
void end_transfer(ForeignPage& page, unsigned which, CallState how);
void add_wait(ForeignPage& page, std::uint64_t waited_ns);
// A wait that had been sampled for `waited_ns` continues.
void extend_sampled_wait(ForeignPage& page, std::uint64_t waited_ns, std::uint64_t by_ns);
// The backend refused the transfer, so it has not counted it either.
void withdraw_transfer(ForeignPage& page, unsigned which);

// Whether a reader of the record has asked for more than the status since `answer_question`.
bool is_asked_for_more();
void answer_question();
// Whether a reader follows the counts now.
bool is_watched();

}  // namespace rallypoint
