// Takes the operations of each lane in order, piece by piece, until all are done.
//
// It names no algorithm and knows no transport beyond what Channel offers. A lane that cannot
// proceed is left and tried again later, so that one thread runs all lanes. It never waits, and
// only returns errors that it finds.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/call.h"
#include "engine/channel.h"
#include "engine/peer_memory.h"
#include "engine/prepared_call.h"
#include "engine/waiting.h"
#include "engine/ways.h"

namespace rallypoint {

enum class Step { finished, moved, blocked, failed };

// An error that a message has shown.
struct Finding {
  Trouble trouble = Trouble::none;
  std::uint32_t culprit = 0;  // a member of the channel
  std::uint64_t sent = 0;     // bytes, and how many it should have been
  std::uint64_t expected = 0;
};

class LaneRunner {
 public:
  LaneRunner(Region& region, PeerMemory& memory, Channel channel, WaitPolicy policy)
      : region_(region),
        memory_(memory),
        channel_(std::move(channel)),
        wire_(channel_.wire()),
        has_neighbours_(region.has_neighbours()),
        policy_(policy),
        views_(memory) {}

  // The call must stay where it is until it is finished.
  void start(const Call& call) {
    call_ = &call;
    if (!prepared_.fits(call)) prepare();
    polls_ = prepared_.lane_count == 1;
    if (trial_ != nullptr || prepared_.may_expose) choose_way();
  }
  // From now on until the next call, whoever advances it counts how often it has been in vain.
  void stop_polling() { polls_ = false; }
  // Runs every lane as far as possible, but no more than one turn of a long call: others have their
  // turns in between.
  Step advance();
  void finish() {
    if (!is_simple_) rewind();
    if (times_) note_time();
    channel_.iterations += prepared_.cut.pieces;
    ++channel_.calls;
  }

  Channel& channel() { return channel_; }
  const Call& call() const { return *call_; }
  const PreparedCall& prepared() const { return prepared_; }
  // The rank that the call waits for, once it is blocked.
  std::uint32_t blocker() const { return blocker_; }
  const Finding& finding() const { return finding_; }
  void forget_finding() { finding_ = {}; }

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
  struct Payload {
    const std::byte* at;
    std::size_t bytes;
  };
  // An operand to be copied from a peer's memory.
  struct Read {
    std::size_t operand;
    std::uint32_t member;
    std::uint64_t address;
  };
  // How much of a lane's message to other hosts has been sent.
  struct FarSend {
    std::vector<bool> is_sent;  // by receiver
    std::size_t sent = 0;
    std::vector<iovec> payload;
  };

  void prepare();
  void rewind();
  void choose_way();
  void note_time();

  // kSimple: nothing is split, which holds for most small calls and saves the arithmetic.
  template <bool kSimple>
  Step advance(std::uint32_t lane);
  template <bool kSimple>
  bool send(std::uint32_t lane, const Operation& send, std::uint64_t piece);
  bool find_place(const Operation& send, std::uint64_t piece, std::uint64_t bytes, Place& place);
  bool expose(std::uint32_t lane, const Operation& send, std::uint64_t piece, std::uint64_t bytes,
              const Place& place);
  bool are_buffers_readable();
  void await(const Operation& send, std::uint64_t iteration);
  bool are_awaited_taken();
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
  void finish_pieces();
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

  Region& region_;
  PeerMemory& memory_;
  Channel channel_;
  MessageTransport* wire_;  // null: all ranks are on this host
  bool has_neighbours_;
  WaitPolicy policy_;
  bool polls_ = false;          // for a line before the lane counts as blocked
  const Call* call_ = nullptr;  // valid until it is finished
  PreparedCall prepared_;       // it, or the last one
  std::uint64_t turn_ = 1;      // operations, on one piece each, of all lanes
  std::uint64_t left_ = 0;      // of this turn
  Lane lanes_[kLanes];
  std::uint64_t finished_ = 0;        // pieces of the output that are complete
  std::uint32_t blocker_ = 0;         // the rank that a blocked lane depends on
  const Operand* missing_ = nullptr;  // the operand for which the last blocked operation waits
  Finding finding_;
  std::vector<std::byte> scratch_;
  std::vector<const std::byte*> sources_;  // of the current reduce, by operand
  FarSend far_sends_[kLanes];
  PeerViews views_;
  bool exposes_private_ = false;  // may read this rank's messages outside arenas
  const std::byte* readable_input_ = nullptr;
  const std::byte* readable_output_ = nullptr;
  WayTrials trials_;
  WayTrial* trial_ = nullptr;  // for calls like this one; null: there is no trial
  Way way_ = Way::copy;
  bool is_simple_ = false;
  bool times_ = false;  // whether this call is timed, and when it began
  double began_s_ = 0;
  std::vector<Payload> touched_;               // messages to be touched after the current reduce
  std::vector<std::size_t> exposed_operands_;  // of the current reduce,
  std::vector<Read> reads_;                    // and those of them that are not mapped here
  std::vector<std::byte> staging_;
  std::vector<const std::byte*> staged_;  // by operand
  std::vector<Occupant> awaited_;         // messages that receivers may still be reading
};

// On the path of every message, hence in the header for inlining.

template <bool kSimple>
inline LaneRunner::Piece LaneRunner::piece_of(const Chunks& chunks, std::uint32_t offset,
                                              std::uint64_t piece) const {
  const std::uint64_t index = chunks.index + offset;
  if constexpr (kSimple)
    return {buffer(chunks.buffer) + chunks.index * prepared_.block_bytes, prepared_.cut.count};
  const std::uint64_t block = index / prepared_.program->chunks;
  const std::uint64_t chunk = index % prepared_.program->chunks;
  std::byte* at = nullptr;
  std::uint64_t count = prepared_.cut.count;
  const Block* const table = prepared_.has_tables ? blocks(chunks.buffer) : nullptr;
  if (table != nullptr) {
    at = table[block].at;
    count = table[block].items;
  } else if (chunks.buffer != Buffer::scratch) {
    at = buffer(chunks.buffer) + block * prepared_.block_bytes;
  }
  const std::uint64_t start = std::min(chunk * prepared_.cut.chunk, count);
  const std::uint64_t end = std::min(start + prepared_.cut.chunk, count);
  const std::uint64_t first = std::min(start + piece * prepared_.cut.piece, end);
  const std::uint64_t items = std::min(prepared_.cut.piece, end - first);
  if (chunks.buffer == Buffer::scratch) {
    return {
        const_cast<std::byte*>(scratch_.data()) + index * prepared_.cut.piece * prepared_.cut.item,
        items};
  }
  return {at + first * prepared_.cut.item, items};
}

template <bool kSimple>
inline std::uint64_t LaneRunner::bytes_of(const Chunks& chunks, std::uint32_t count,
                                          std::uint64_t piece) const {
  if constexpr (kSimple) return count * prepared_.block_bytes;
  std::uint64_t items = 0;
  for (std::uint32_t offset = 0; offset < count; ++offset) {
    items += piece_of<false>(chunks, offset, piece).items;
  }
  return items * prepared_.cut.item;
}

}  // namespace rallypoint
