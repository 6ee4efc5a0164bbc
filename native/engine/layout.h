// The shared region of one communicator: what every rank maps, and the position of each word.
//
//   | header | rank 0 | rank 1 | ...          each rank writes only its own area, except
//                                             for the header's poison and the peers' bells
// Area of a rank:
//   state      presence, pid, and the bell that peers ring when it sleeps
//   calls      what it called last, for peers that wait for something else
//   progress   per lane: which messages it has taken
//   lines      per lane: its last 64 messages; small ones travel in the line itself
//   outbox     envelopes of messages to single ranks (mailbox.h), and which it has taken of others'
//   rings      per lane: the payload of larger messages
//   blocks     per envelope: the same; and a wide one, for one large message to a single rank
//
// Counters only grow and are never reset. The pages of unused lanes and envelopes are never
// touched, so they occupy no memory. This file defines only the layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/reduce.h"

namespace rallypoint {

inline constexpr std::uint32_t kMagic = 0x52504C31;
inline constexpr std::uint32_t kLayoutVersion = 6;
inline constexpr std::size_t kLineBytes =
    128;  // two cache lines: adjacent-line prefetch couples them
inline constexpr std::size_t kInlineBytes = kLineBytes - 32;
inline constexpr unsigned kLanes = 4;
inline constexpr unsigned kLines = 64;
inline constexpr unsigned kEnvelopes = 32;
inline constexpr unsigned kCalls = 16;
inline constexpr std::size_t kRingBytes = 1 << 20;
inline constexpr std::size_t kLapBytes = 64 << 10;
inline constexpr std::size_t kBlockBytes = 256 << 10;  // the largest message; a ring holds four
inline constexpr std::size_t kMailBytes = 32 << 10;    // a block of an envelope
inline constexpr std::size_t kWideBytes = 1 << 20;     // for one large message at a time
inline constexpr std::uint64_t kInline = ~std::uint64_t{0};
inline constexpr std::uint64_t kExposed = kInline - 1;
inline constexpr unsigned kOperationBits = 16;  // bits of a sequence or progress number

// The first value of the numbers of messages and calls, and of bells: tests begin just below the
// point where 32 bits no longer suffice.
#ifndef RALLYPOINT_FIRST_ORDINAL
#define RALLYPOINT_FIRST_ORDINAL 0
#endif
inline constexpr std::uint64_t kFirstOrdinal = RALLYPOINT_FIRST_ORDINAL;

// One message. `sequence` is written last and read first.
struct alignas(kLineBytes) Line {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t signature;
  std::uint64_t offset;  // into the sender's ring, or kInline, or kExposed: the payload is a Place
  std::uint64_t bytes : 63;
  std::uint64_t is_touched : 1;  // by its receivers, once they have read it (copy.h)
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Line) == kLineBytes);

struct alignas(kLineBytes) Progress {
  std::atomic<std::uint64_t> value;
};

// A number that others may read at any time; another number tells them whether it is valid.
template <typename T>
class Relaxed {
 public:
  operator T() const { return value_.load(std::memory_order_relaxed); }
  Relaxed& operator=(T value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Relaxed& operator=(const Relaxed& other) { return *this = static_cast<T>(other); }

 private:
  std::atomic<T> value_;
};

// What a rank called: enough to describe a mismatch. `number` is the call's plus one, and zero
// while the record changes.
struct alignas(64) CallRecord {
  std::atomic<std::uint64_t> number;
  std::atomic<std::uint64_t> signature;
  Relaxed<std::uint64_t> count;
  Relaxed<std::int32_t> collective;
  Relaxed<std::int32_t> reduce_op;
  Relaxed<std::int32_t> dtype;
  Relaxed<std::int32_t> root;  // of a send or recv: the tag
};

// A message to one rank. The sender clears `sequence` first and writes it last, so that a
// concurrent reader finds it changed. The message is gone once the receiver acknowledges its
// ordinal and all before, in its own area; or, if it is taken out of order or its sender waits,
// once the receiver clears `sequence`. Tiny payloads come with the line.
enum class Request : std::uint32_t { none, matched, parts };

struct alignas(kLineBytes) Envelope {
  std::atomic<std::uint64_t> sequence;  // of the sender's messages
  std::atomic<std::uint32_t> to;
  std::atomic<std::int32_t> tag;
  std::uint64_t bytes;
  std::uint64_t number : 48;           // of the sender's transfers
  std::uint64_t dtype : 8;             // a DType
  std::uint64_t is_synchronous : 1;    // its sender waits until it is received
  std::uint64_t is_exposed : 1;        // the payload is a Place: the receiver reads it there
  std::uint64_t is_wide : 1;           // its parts go through the wide block
  std::uint64_t is_touched : 1;        // by its receiver, once it has read it (copy.h)
  std::uint64_t is_timed : 1;          // and says in `payload` how long it copied, a double
  std::atomic<std::uint64_t> ordinal;  // of the sender's messages to this receiver
  std::atomic<Request> request;        // by the receiver
  std::uint32_t before;                // of a message that goes in parts: its block's count
  std::byte payload[kLineBytes - 48];

  DType type() const { return static_cast<DType>(dtype); }
};
static_assert(sizeof(Envelope) == kLineBytes);

// The number of parts that have passed through a block, over all messages. Parts of a message that
// fits into the block are not counted as taken; a message's first part is present as soon as its
// envelope is, which contains the count before it.
struct alignas(kLineBytes) Parts {
  std::atomic<std::uint32_t> written;
  alignas(64) std::atomic<std::uint32_t> taken;
};

struct alignas(kLineBytes) Outbox {
  std::atomic<std::uint64_t> published;  // the last sequence, set after its envelope's
};

// What a rank waits for while it does nothing else: `epoch` is odd during the wait.
struct alignas(64) Waiting {
  std::atomic<std::uint64_t> epoch;
  std::atomic<std::uint32_t> peer;
  std::atomic<std::int32_t> tag;
  std::atomic<std::int32_t> slot;  // of a send, or -1
  std::atomic<std::uint32_t> sends;
  std::atomic<std::uint32_t> unsent;  // sends that have found no room yet, always up to date
};

enum class Presence : std::uint32_t { absent, here, left };

struct alignas(kLineBytes) RankState {
  std::atomic<std::uint32_t> presence;
  std::atomic<std::int32_t> pid;
  // An address in its memory that holds its pid, for others to try to read.
  std::atomic<std::uint64_t> word_at;
  alignas(64) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleeping;
  alignas(64) std::atomic<std::uint32_t> core;  // where it last waited, plus one
  Waiting waiting;
};

enum class Trouble : std::uint32_t {
  none,
  peer_lost,
  peer_left,
  mismatch,
  timeout,
  interrupted,
  aborted,
  corrupt,
  lengths,
  circle,
  unreadable,
  unreachable,
  revoked,
  exhausted,
};
inline constexpr unsigned kTroubles = static_cast<unsigned>(Trouble::exhausted) + 1;

inline constexpr unsigned kMostInCircle = 8;

struct CircleMember {
  std::uint32_t rank;
  std::uint32_t peer;
  std::int32_t tag;
  std::uint32_t sends;
  std::uint64_t epoch;  // of its wait
};

// The trouble, its culprit, and the rank that found it.
struct Blame {
  Trouble trouble = Trouble::none;
  std::uint32_t culprit = 0;
  std::uint32_t reporter = 0;

  // In one word, so that a reporter that is killed has written all of it or nothing.
  std::uint64_t packed() const {
    return std::uint64_t{culprit} << 40 | std::uint64_t{reporter} << 16 |
           static_cast<std::uint64_t>(trouble);
  }
  static Blame unpacked(std::uint64_t word) {
    return {static_cast<Trouble>(word & 0xFFFF), static_cast<std::uint32_t>(word >> 40),
            static_cast<std::uint32_t>(word >> 16 & 0xFFFFFF)};
  }
};

// The first rank in trouble writes it; from then on every rank refuses to work. The details follow
// the blame, and are missing if their writer is killed in between.
struct alignas(kLineBytes) Poison {
  std::atomic<std::uint64_t> blame;  // packed; 0: none
  std::atomic<std::uint32_t> is_complete;
  std::uint64_t sent;      // lengths: how many bytes came; unreachable, exhausted: the error
  std::uint64_t expected;  // and should have
  double timeout_s;        // timeout: how long was waited
  CallRecord theirs;       // what the culprit called
  CallRecord ours;         // what the reporter called
  std::uint32_t circle_size;
  CircleMember circle[kMostInCircle];
};

struct Header {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t ranks;
  Poison poison;
};

// The position of everything, from the number of ranks alone.
class Layout {
 public:
  explicit constexpr Layout(std::size_t ranks) : ranks_(ranks) {}

  constexpr std::size_t bytes() const { return area(ranks_); }
  constexpr std::size_t state(std::size_t rank) const { return area(rank); }
  constexpr std::size_t calls(std::size_t rank) const { return state(rank) + sizeof(RankState); }
  constexpr std::size_t progress(std::size_t rank) const {
    return up(calls(rank) + kCalls * sizeof(CallRecord), kLineBytes);
  }
  constexpr std::size_t lines(std::size_t rank) const {
    return progress(rank) + kLanes * sizeof(Progress);
  }
  constexpr std::size_t outbox(std::size_t rank) const {
    return lines(rank) + kLanes * kLines * sizeof(Line);
  }
  constexpr std::size_t envelopes(std::size_t rank) const { return outbox(rank) + sizeof(Outbox); }
  constexpr std::size_t parts(std::size_t rank) const {
    return envelopes(rank) + kEnvelopes * sizeof(Envelope);
  }
  // For each sender, the ordinal before which all its messages have been taken.
  constexpr std::size_t taken(std::size_t rank) const {
    return parts(rank) + (kEnvelopes + 1) * sizeof(Parts);
  }
  constexpr std::size_t rings(std::size_t rank) const {
    return up(taken(rank) + ranks_ * sizeof(std::atomic<std::uint64_t>), kPage);
  }
  constexpr std::size_t blocks(std::size_t rank) const { return rings(rank) + kLanes * kRingBytes; }
  constexpr std::size_t wide(std::size_t rank) const {
    return blocks(rank) + kEnvelopes * kMailBytes;
  }

 private:
  // On systems with larger pages two areas may share one, which costs a little memory and time.
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
  }
  constexpr std::size_t area(std::size_t rank) const {
    const std::size_t fixed = sizeof(RankState) + kCalls * sizeof(CallRecord) + kLineBytes +
                              kLanes * (sizeof(Progress) + kLines * sizeof(Line)) + sizeof(Outbox) +
                              kEnvelopes * sizeof(Envelope) + (kEnvelopes + 1) * sizeof(Parts) +
                              ranks_ * sizeof(std::atomic<std::uint64_t>);
    const std::size_t stride =
        up(fixed, kPage) + kPage + kLanes * kRingBytes + kEnvelopes * kMailBytes + kWideBytes;
    return up(sizeof(Header), kPage) + rank * stride;
  }

  std::size_t ranks_;
};

}  // namespace rallypoint
