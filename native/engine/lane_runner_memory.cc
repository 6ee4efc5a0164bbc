// Messages that stay in their sender's memory until their receivers have read them there.
//
//   sender     its line says where the message lies; the call ends when all have taken it
//   receiver   reads and combines it, and then looks whether that memory was still the message
//
// A sender in trouble says so in the region before its caller gets the memory back. So what was
// read is valid if there is no trouble afterwards; otherwise it is never used.

#include <cstring>

#include "engine/lane_runner.h"

namespace rallypoint {
namespace {

// Data that is read stays in the cache until it is used.
constexpr std::uint64_t kStepBytes = 256 << 10;

}  // namespace

void LaneRunner::choose_way() {
  views_.trim();
  const Way untried = (memory_.reach & kAlways) != 0 ? Way::read : Way::copy;
  times_ = trial_ != nullptr && trial_->begin();
  way_ = trial_ != nullptr ? trial_->way() : untried;
  exposes_private_ = way_ == Way::read && are_buffers_readable();
  is_simple_ = prepared_.is_simple && !times_;
  if (times_) began_s_ = now_s();
}

void LaneRunner::note_time() {
  trial_->note(now_s() - began_s_);
  times_ = false;
}

// Whether this rank's arrays are memory that others can read at all. The result of the last call is
// reused for the same arrays, because checking takes a system call.
bool LaneRunner::are_buffers_readable() {
  const bool is_known =
      call_->input == readable_input_ && call_->output == readable_output_ && !prepared_.has_tables;
  if (is_known) return true;
  const auto are = [&](const std::byte* at, const Block* table, std::uint32_t blocks) {
    if (blocks == 0) return true;
    if (table == nullptr) return memory_.can_expose(at);
    return std::all_of(table, table + blocks, [&](const Block& block) {
      return block.items == 0 || memory_.can_expose(block.at);
    });
  };
  // A rank may have no input, and pass on what is in its output: both count.
  if (!are(call_->input, call_->input_blocks, prepared_.program->input_blocks) ||
      !are(call_->output, call_->output_blocks, prepared_.program->output_blocks)) {
    return false;
  }
  readable_input_ = call_->input;
  readable_output_ = call_->output;
  return true;
}

// The place of a message, if others should read it there. Scratch memory does not qualify: later
// pieces reuse it.
bool LaneRunner::find_place(const Operation& send, std::uint64_t piece, std::uint64_t bytes,
                            Place& place) {
  if (bytes < kExposedBytes || send.count != 1 || send.source.buffer == Buffer::scratch)
    return false;
  place = memory_.place_of(piece_of<false>(send.source, 0, piece).at, bytes);
  return place.arena.segment != 0 || (exposes_private_ && bytes >= kReadBytes);
}

bool LaneRunner::expose(std::uint32_t lane, const Operation& send, std::uint64_t piece,
                        std::uint64_t bytes, const Place& place) {
  const std::uint64_t iteration = channel_.iterations + piece;
  static_assert(sizeof place <= kInlineBytes);
  Slot slot;
  std::byte* const payload =
      channel_.reserve(*prepared_.program, lane, send, iteration, sizeof place, slot, blocker_);
  if (payload == nullptr) return false;
  std::memcpy(payload, &place, sizeof place);
  slot.offset = kExposed;
  channel_.publish(slot, send, iteration, bytes, prepared_.signature);
  far_sends_[lane].sent = 0;
  await(send, iteration);
  return true;
}

// The call does not end before the message has been taken.
void LaneRunner::await(const Operation& send, std::uint64_t iteration) {
  // A receiver that has taken a later piece has taken this one.
  for (Occupant& known : awaited_) {
    if (known.receivers == &send.receivers) {
      known.iteration = iteration;
      return;
    }
  }
  awaited_.push_back({&channel_, iteration, &send.receivers});
}

bool LaneRunner::are_awaited_taken() {
  while (!awaited_.empty()) {
    if (!channel_.is_taken(awaited_.back(), blocker_)) return false;
    awaited_.pop_back();
  }
  return true;
}

// Finds where this process can read the messages, as far as they are mapped here.
void LaneRunner::reach(const Operation& reduce, std::uint64_t bytes) {
  reads_.clear();
  for (const std::size_t i : exposed_operands_) {
    Place place;
    std::memcpy(&place, sources_[i], sizeof place);  // from its line
    const std::uint32_t member = reduce.operands[i].peer;
    sources_[i] = views_.find(channel_.rank_of(member), place, bytes);
    if (sources_[i] == nullptr) reads_.push_back({i, member, place.address});
  }
}

// Whether everything that was read was still what had been sent.
bool LaneRunner::is_good() {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!region_.poisoned()) return true;
  finding_.trouble = Trouble::aborted;
  return false;
}

bool LaneRunner::combine_read(const Operation& reduce, std::uint64_t piece) {
  const Piece target = piece_of<false>(reduce.targets[0], 0, piece);
  const std::uint64_t bytes = target.items * prepared_.cut.item;
  const std::size_t operands = reduce.operands.size();
  const auto copy_to_others = [&](std::uint64_t offset, std::uint64_t length) {
    for (std::size_t i = 1; i < reduce.targets.size(); ++i) {
      std::memcpy(piece_of<false>(reduce.targets[i], 0, piece).at + offset, target.at + offset,
                  length);
    }
  };
  if (operands == 1) {
    if (!read(reads_[0], 0, target.at, bytes)) return false;
    copy_to_others(0, bytes);
    return true;
  }
  if (staging_.size() < reads_.size() * kStepBytes) staging_.resize(reads_.size() * kStepBytes);
  for (std::size_t i = 0; i < operands; ++i) {
    const Operand& operand = reduce.operands[i];
    if (!operand.remote) sources_[i] = piece_of<false>(operand.chunks, 0, piece).at;
  }
  staged_.resize(operands);
  for (std::uint64_t offset = 0; offset < bytes; offset += kStepBytes) {
    const std::uint64_t length = std::min(kStepBytes, bytes - offset);
    for (std::size_t i = 0; i < operands; ++i) {
      if (sources_[i] != nullptr) staged_[i] = sources_[i] + offset;
    }
    std::byte* at = staging_.data();
    for (const Read& from : reads_) {
      if (!read(from, offset, at, length)) return false;
      staged_[from.operand] = at;
      at += kStepBytes;
    }
    prepared_.reducer(target.at + offset, staged_.data(), operands, length / prepared_.cut.item,
                      prepared_.divisor);
    copy_to_others(offset, length);
  }
  return true;
}

bool LaneRunner::read(const Read& from, std::uint64_t offset, std::byte* target,
                      std::uint64_t bytes) {
  const std::uint32_t rank = channel_.rank_of(from.member);
  const Trouble trouble = memory_.read(rank, from.address + offset, target, bytes);
  if (trouble == Trouble::none) return true;
  finding_.trouble = trouble;
  finding_.culprit = from.member;
  return false;
}

}  // namespace rallypoint
