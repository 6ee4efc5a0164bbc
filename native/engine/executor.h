// Runs programs: takes the operations of each lane in order, piece by piece, until all are done.
//
// It names no algorithm and knows no transport beyond what Channel offers. A lane that cannot go on
// is left and tried again, so that one thread runs all lanes; how to wait in between is Waiter's.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/channel.h"
#include "engine/peer_memory.h"
#include "engine/program.h"
#include "engine/reduce.h"
#include "engine/waiting.h"

namespace rallypoint {

// What is called, in the eight bytes that are compared with the last call's.
struct Operator {
  std::uint16_t collective;
  DType dtype;
  ReduceOp op;
  std::int32_t root;  // of a send or recv: the tag

  std::uint64_t bits() const { return std::bit_cast<std::uint64_t>(*this); }
};

struct Block {
  std::byte* at;
  std::uint64_t items;
};

// One call of a collective.
struct Call {
  const Program* program;
  Operator what;
  std::uint64_t count;     // items of a block; where they differ, of the largest
  const std::byte* input;  // all blocks, one after the other,
  std::byte* output;
  double timeout_s;
  const Block* input_blocks = nullptr;  // or, unless null, each where it says
  const Block* output_blocks = nullptr;
  // Where a rank does not know the lengths of all blocks, the largest is agreed on first: an
  // all_reduce of one integer.
  const Program* agreement = nullptr;
};

// Smaller messages are copied, as it costs more to wait until they have been read where they lie.
inline constexpr std::uint64_t kExposedBytes = 32 << 10;

// How the items of a call are cut: blocks into chunks, chunks into pieces of at most a message.
struct Cut {
  std::uint64_t item = 0;    // bytes
  std::uint64_t count = 0;   // items of a block
  std::uint64_t chunk = 0;   // items of all chunks but the last ones, which may be shorter
  std::uint64_t piece = 0;   // items
  std::uint64_t pieces = 0;  // iterations of the program
  bool is_simple = false;    // one lane, one chunk, one piece: nothing is cut

  Cut() = default;
  Cut(const Program& program, std::uint64_t count, std::uint64_t item);
};

class Executor {
 public:
  Executor(Region& region, PeerMemory& memory, Channel channel, WaitPolicy policy)
      : region_(region),
        memory_(memory),
        views_(memory),
        channel_(std::move(channel)),
        policy_(policy),
        wire_(channel_.wire()) {}

  enum class Step { finished, moved, blocked, failed };

  // Returns `none` or what went wrong; after trouble the region is poisoned, and says whose fault.
  // One call at a time: threads take `mutex` first.
  Trouble run(const Call& call, Host& host);
  std::mutex mutex;

  // The same without waiting: after `begin`, `step` until it is finished or failed. Who has slept
  // says so, and trouble is then looked for.
  void begin(const Call& call);
  Step step(bool has_slept, Host& host);
  // This rank gives up; with the mutex, peers are told in which call it is.
  void interrupt(bool has_mutex);
  // The rank that the call waits for, once it is blocked.
  std::uint32_t blocker() const { return blocker_; }
  Trouble trouble() const { return trouble_; }

 private:
  struct Lane {
    const Operation* first = nullptr;
    const Operation* end = nullptr;
    const Operation* next = nullptr;
    std::uint64_t piece = 0;
  };
  struct Piece {
    std::byte* at;
    std::uint64_t items;
  };
  // An operand that is to be copied from a peer's memory.
  struct Read {
    std::size_t operand;
    std::uint32_t member;
    std::uint64_t address;
  };
  // How far a lane's message to other hosts has got.
  struct FarSend {
    std::vector<bool> is_sent;  // by receiver
    std::size_t sent = 0;
    std::vector<iovec> payload;
  };

  void start(const Call& call);
  void finish();
  void resume();
  Step go_on(bool has_slept, Host& host);
  void prepare();
  void record();
  void rewind();
  Step advance();
  Trouble wait(Host& host);

  // kSimple: nothing is cut, which is so for most small calls and saves the arithmetic.
  template <bool kSimple>
  Step advance(std::uint32_t lane);
  template <bool kSimple>
  bool send(std::uint32_t lane, const Operation& send, std::uint64_t piece);
  bool find_place(const Operation& send, std::uint64_t piece, std::uint64_t bytes, Place& place);
  bool expose(std::uint32_t lane, const Operation& send, std::uint64_t piece, std::uint64_t bytes,
              const Place& place);
  bool are_buffers_readable() const;
  bool are_exposed_taken();
  template <bool kSimple>
  bool send_far(std::uint32_t lane, const Operation& send, std::uint64_t piece,
                std::uint64_t bytes);
  template <bool kSimple>
  bool reduce(std::uint32_t lane, const Operation& reduce, std::uint64_t piece);
  template <bool kSimple>
  void expect_far(const Operation& reduce, std::uint64_t piece, std::uint64_t bytes);
  void release_far(const Operation& reduce, std::uint64_t iteration);
  void misfit(const Line& line, std::uint32_t member, bool is_whole, std::uint64_t bytes);
  bool gather(const Operation& reduce, std::uint64_t iteration, std::uint64_t bytes);
  void reach(const Operation& reduce, std::uint64_t bytes);
  bool is_good();
  bool combine_read(const Operation& reduce, std::uint64_t piece);
  bool read(const Read& from, std::uint64_t offset, std::byte* target, std::uint64_t bytes);
  template <bool kSimple>
  void combine(const Operation& reduce, std::uint64_t piece);
  void wake_senders(const Operation& reduce);
  std::byte* buffer(Buffer buffer) const {
    return buffer == Buffer::output ? call_->output : const_cast<std::byte*>(call_->input);
  }
  const Block* blocks(Buffer buffer) const {
    if (buffer == Buffer::scratch) return nullptr;
    return buffer == Buffer::output ? call_->output_blocks : call_->input_blocks;
  }
  template <bool kSimple>
  Piece piece_of(const Chunks& chunks, std::uint32_t offset, std::uint64_t piece) const;
  template <bool kSimple>
  std::uint64_t bytes_of(const Chunks& chunks, std::uint32_t count, std::uint64_t piece) const;
  void finish_pieces();
  void tell(Host& host);
  Trouble look_for_trouble(Host& host);
  bool is_blocked_by_mismatch(std::uint32_t member) const;
  bool has_left(std::uint32_t rank) const;
  bool is_cut_off(std::uint32_t rank);
  Trouble fail(Trouble trouble, std::uint32_t rank);
  Trouble fail_against(Trouble trouble, std::uint32_t member, Host& host);

  Region& region_;
  PeerMemory& memory_;
  PeerViews views_;
  Channel channel_;
  WaitPolicy policy_;
  tcp::Wire* wire_;  // null: all ranks are on this host
  std::vector<std::byte> scratch_;

  const Call* call_ = nullptr;    // valid during run
  const Call* agreed_ = nullptr;  // the call that waits for an agreement
  Call agreement_{};
  Call uneven_{};  // the call with the largest block that was agreed on
  std::int64_t largest_ = 0;
  double began_s_ = 0;                // when the call first had to wait
  double cut_off_s_ = 0;              // when its blocker was first seen without a connection
  const Program* program_ = nullptr;  // these, of the last call, are kept
  Operator what_{};
  std::uint32_t lane_count_ = 0;
  Cut cut_;
  bool is_simple_ = false;
  std::uint64_t block_bytes_ = 0;
  bool has_tables_ = false;
  bool past_caches_ = false;      // is received: no cache holds it, nor the place for it
  bool may_expose_ = false;       // ranks of this host may read messages where they lie,
  bool exposes_private_ = false;  // and those of this rank also outside arenas
  Reducer reducer_ = nullptr;
  Reducer average_ = nullptr;
  std::uint64_t divisor_ = 1;  // within a reduction
  bool divides_ = false;       // at the end of each piece
  std::uint64_t signature_ = 0;
  std::uint32_t blocker_ = 0;  // the rank that a blocked lane depends on
  bool blocker_is_gone_ = false;
  unsigned spins_ = 0;               // looks at a line before a lane counts as blocked
  std::uint64_t finished_ = 0;       // pieces of the output that are complete
  Trouble trouble_ = Trouble::none;  // what a message showed, and whose it was
  std::uint32_t culprit_ = 0;
  std::uint64_t sent_ = 0;  // bytes, and how many it should have been
  std::uint64_t expected_ = 0;
  const Operand* missing_ = nullptr;  // what the last operation that was blocked waits for
  Lane lanes_[kLanes];
  FarSend far_sends_[kLanes];
  std::vector<const std::byte*> sources_;      // of the current reduce, by operand
  std::vector<std::size_t> exposed_operands_;  // of the current reduce,
  std::vector<Read> reads_;                    // and those of them that are not in reach
  std::vector<std::byte> staging_;
  std::vector<const std::byte*> staged_;  // by operand
  std::vector<Occupant> exposed_;         // messages that receivers may still be reading
};

// Of every message, so in the header, where they can be inlined.

template <bool kSimple>
inline Executor::Piece Executor::piece_of(const Chunks& chunks, std::uint32_t offset,
                                          std::uint64_t piece) const {
  const std::uint64_t index = chunks.index + offset;
  if constexpr (kSimple) return {buffer(chunks.buffer) + chunks.index * block_bytes_, cut_.count};
  const std::uint64_t block = index / program_->chunks;
  const std::uint64_t chunk = index % program_->chunks;
  std::byte* at = nullptr;
  std::uint64_t count = cut_.count;
  const Block* const table = has_tables_ ? blocks(chunks.buffer) : nullptr;
  if (table != nullptr) {
    at = table[block].at;
    count = table[block].items;
  } else if (chunks.buffer != Buffer::scratch) {
    at = buffer(chunks.buffer) + block * block_bytes_;
  }
  const std::uint64_t start = std::min(chunk * cut_.chunk, count);
  const std::uint64_t end = std::min(start + cut_.chunk, count);
  const std::uint64_t first = std::min(start + piece * cut_.piece, end);
  const std::uint64_t items = std::min(cut_.piece, end - first);
  if (chunks.buffer == Buffer::scratch) {
    return {const_cast<std::byte*>(scratch_.data()) + index * cut_.piece * cut_.item, items};
  }
  return {at + first * cut_.item, items};
}

template <bool kSimple>
inline std::uint64_t Executor::bytes_of(const Chunks& chunks, std::uint32_t count,
                                        std::uint64_t piece) const {
  if constexpr (kSimple) return count * block_bytes_;
  std::uint64_t items = 0;
  for (std::uint32_t offset = 0; offset < count; ++offset) {
    items += piece_of<false>(chunks, offset, piece).items;
  }
  return items * cut_.item;
}

}  // namespace rallypoint
