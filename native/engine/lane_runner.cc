#include "engine/lane_runner.h"

#include <algorithm>
#include <cstring>

#include "engine/copy.h"

namespace rallypoint {
namespace {

constexpr std::uint64_t kTurnBytes = 1 << 20;  // about 100 us, over all lanes

}  // namespace

void LaneRunner::prepare() {
  prepared_ = PreparedCall(*call_, memory_.reach);
  const Program& program = *prepared_.program;
  for (std::uint32_t lane = 0; lane < prepared_.lane_count; ++lane) {
    const auto& operations = program.lanes[lane];
    const Operation* const first = operations.data();
    lanes_[lane] = {first, first + operations.size(), first, 0};
  }
  const std::uint64_t piece = prepared_.cut.piece * prepared_.cut.item;
  const std::uint64_t most = piece * program.max_span;
  trial_ = nullptr;
  if (has_neighbours_ && most >= kTriedBytes) {
    const bool may_read =
        prepared_.may_expose && piece >= kReadBytes && (memory_.reach & kPrivate) != 0;
    Ways ways(Way::copy_past_caches);
    if (may_read) ways.add(Way::read);
    const bool is_told = may_read && (memory_.reach & kAlways) != 0;
    const auto lap = static_cast<unsigned>(Ring::lap(most) / prepared_.cut.pieces);
    if (!is_told) {
      trial_ = &trials_.of(&program, prepared_.block_bytes, ways, std::max(lap, 1U));
    }
  }
  way_ = Way::copy;
  is_simple_ = prepared_.is_simple;
  times_ = false;
  turn_ = kTurnBytes / std::max<std::uint64_t>(most, 1) + prepared_.lane_count;
  const std::size_t scratch = program.scratch_chunks * prepared_.cut.piece * prepared_.cut.item;
  if (scratch_.size() < scratch) scratch_.resize(scratch);
  sources_.resize(program.max_operands);
}

void LaneRunner::rewind() {
  for (std::uint32_t lane = 0; lane < prepared_.lane_count; ++lane) lanes_[lane].piece = 0;
  finished_ = 0;
}

// A message that is not what was expected.
void LaneRunner::misfit(const Line& line, std::uint32_t member, bool is_whole,
                        std::uint64_t bytes) {
  finding_.trouble = line.signature != prepared_.signature ? Trouble::mismatch
                     : is_whole && prepared_.has_tables    ? Trouble::lengths
                                                           : Trouble::corrupt;
  finding_.culprit = member;
  finding_.sent = line.bytes;
  finding_.expected = bytes;
}

// Checks whether every message that the operation needs has arrived, and where it is.
inline bool LaneRunner::gather(const Operation& reduce, std::uint64_t iteration,
                               std::uint64_t bytes) {
  const std::byte** source = sources_.data();
  exposed_operands_.clear();
  touched_.clear();
  for (const Operand& operand : reduce.operands) {
    const std::byte*& payload = *source++;
    if (!operand.remote) continue;
    const Line* line = channel_.peek(*prepared_.program, operand, iteration);
    if (line == nullptr && polls_ && (wire_ == nullptr || !channel_.is_far(operand))) {
      unsigned polls = policy_.polls(region_, channel_.rank_of(operand.peer));
      for (; line == nullptr && polls > 0; --polls) {
        relax();
        line = channel_.peek(*prepared_.program, operand, iteration);
      }
    }
    if (line == nullptr) {
      blocker_ = channel_.rank_of(operand.peer);
      missing_ = &operand;
      return false;
    }
    payload = channel_.payload(*line, operand);
    if (line->signature != prepared_.signature || payload == nullptr || line->bytes != bytes) {
      misfit(*line, operand.peer, payload != nullptr, bytes);
      return false;
    }
    if (line->offset == kExposed) [[unlikely]] {
      if (!prepared_.may_expose || reduce.count != 1) {
        misfit(*line, operand.peer, false, bytes);
        return false;
      }
      exposed_operands_.push_back(static_cast<std::size_t>(source - sources_.data() - 1));
    }
    if (line->is_touched) touched_.push_back({payload, bytes});
  }
  return true;
}

// The chunks of a message are consecutive.
template <bool kSimple>
inline void LaneRunner::combine(const Operation& reduce, std::uint64_t piece) {
  if (reduce.targets.empty()) return;
  for (std::uint32_t offset = 0; offset < (kSimple ? 1 : reduce.count); ++offset) {
    const Piece target = piece_of<kSimple>(reduce.targets[0], offset, piece);
    const std::uint64_t length =
        kSimple ? prepared_.block_bytes : target.items * prepared_.cut.item;
    const std::byte** source = sources_.data();
    for (const Operand& operand : reduce.operands) {
      if (!operand.remote) *source = piece_of<kSimple>(operand.chunks, offset, piece).at;
      ++source;
    }
    // A message from the network may have been written directly to its target.
    const bool is_there = reduce.operands.size() == 1 && sources_[0] == target.at;
    if (length == 0) continue;
    const std::uint64_t divisor = reduce.operands.size() > 1 ? prepared_.divisor : 1;
    if (prepared_.past_caches && reduce.operands.size() == 1 && !is_there) {
      copy_past_caches(target.at, sources_[0], length);
    } else if (!is_there) {
      prepared_.reducer(target.at, sources_.data(), reduce.operands.size(), target.items, divisor);
    }
    for (std::size_t i = 1; i < reduce.targets.size(); ++i) {
      std::memcpy(piece_of<kSimple>(reduce.targets[i], offset, piece).at, target.at, length);
    }
    if constexpr (!kSimple) {
      for (std::size_t i = 0; i < reduce.operands.size(); ++i) sources_[i] += length;
    }
  }
}

// A full ring stops its sender, and so does a message that is read in place, so the sender must not
// oversleep; lines are many, and senders check for themselves now and then.
void LaneRunner::wake_senders(const Operation& reduce) {
  Region::fence();
  for (const Operand& operand : reduce.operands) {
    if (operand.remote) channel_.wake(operand.peer);
  }
}

template <bool kSimple>
inline bool LaneRunner::send(std::uint32_t lane, const Operation& send, std::uint64_t piece) {
  const std::uint64_t iteration = channel_.iterations + piece;
  const std::uint64_t bytes = bytes_of<kSimple>(send.source, send.count, piece);
  if (!send.far.empty()) [[unlikely]] {
    if (!send_far<kSimple>(lane, send, piece, bytes)) return false;
    if (send.receivers.empty()) {
      far_sends_[lane].sent = 0;
      return true;
    }
  }
  if constexpr (!kSimple) {
    Place place;
    if (prepared_.may_expose && find_place(send, piece, bytes, place)) {
      return expose(lane, send, piece, bytes, place);
    }
  }
  Slot slot;
  std::byte* target =
      channel_.reserve(*prepared_.program, lane, send, iteration, bytes, slot, blocker_);
  if (target == nullptr) return false;
  const std::uint32_t chunks = kSimple ? 1 : send.count;
  for (std::uint32_t offset = 0; offset < chunks; ++offset) {
    const Piece source = piece_of<kSimple>(send.source, offset, piece);
    const std::uint64_t length = kSimple ? bytes : source.items * prepared_.cut.item;
    copy(target, source.at, length, way_ == Way::copy_past_caches);
    target += length;
  }
  slot.is_touched = way_ == Way::touch && bytes >= kTriedBytes;
  channel_.publish(slot, send, iteration, bytes, prepared_.signature);
  far_sends_[lane].sent = 0;
  // All ways of a trial are timed until the receivers are done.
  if constexpr (!kSimple) {
    if (times_) await(send, iteration);
  }
  return true;
}

// Sends directly from the user's memory, to each receiver as much as its connection accepts.
template <bool kSimple>
bool LaneRunner::send_far(std::uint32_t lane, const Operation& send, std::uint64_t piece,
                          std::uint64_t bytes) {
  FarSend& state = far_sends_[lane];
  if (state.sent == send.far.size()) return true;  // the others are on this host
  if (state.sent == 0) state.is_sent.assign(send.far.size(), false);
  state.payload.clear();
  for (std::uint32_t offset = 0; offset < (kSimple ? 1 : send.count); ++offset) {
    const Piece source = piece_of<kSimple>(send.source, offset, piece);
    const std::uint64_t length = kSimple ? bytes : source.items * prepared_.cut.item;
    if (length == 0) continue;
    iovec* const last = state.payload.empty() ? nullptr : &state.payload.back();
    if (last != nullptr && static_cast<std::byte*>(last->iov_base) + last->iov_len == source.at) {
      last->iov_len += length;
    } else {
      state.payload.push_back({source.at, length});
    }
  }
  for (std::size_t i = 0; i < send.far.size(); ++i) {
    if (state.is_sent[i]) continue;
    if (channel_.send_far(send.far[i], lane, send, channel_.iterations + piece, prepared_.signature,
                          bytes, state.payload)) {
      state.is_sent[i] = true;
      ++state.sent;
    } else {
      blocker_ = channel_.rank_of(send.far[i].rank);
    }
  }
  return state.sent == send.far.size();
}

template <bool kSimple>
void LaneRunner::expect_far(const Operation& reduce, std::uint64_t piece, std::uint64_t bytes) {
  std::byte* target = nullptr;
  if (reduce.operands.size() == 1 && reduce.count == 1 && !reduce.targets.empty()) {
    target = piece_of<kSimple>(reduce.targets[0], 0, piece).at;
  }
  channel_.expect(*missing_, channel_.iterations + piece, prepared_.signature, target, bytes);
}

void LaneRunner::release_far(const Operation& reduce, std::uint64_t iteration) {
  for (const Operand& operand : reduce.operands) {
    if (operand.remote && channel_.is_far(operand)) channel_.release(operand, iteration);
  }
}

template <bool kSimple>
inline bool LaneRunner::reduce(std::uint32_t lane, const Operation& reduce, std::uint64_t piece) {
  if (!reduce.takes_messages) {
    combine<kSimple>(reduce, piece);
    return true;
  }
  const std::uint64_t bytes =
      reduce.targets.empty() ? 0 : bytes_of<kSimple>(reduce.targets[0], reduce.count, piece);
  missing_ = nullptr;
  if (!gather(reduce, channel_.iterations + piece, bytes)) {
    if (wire_ != nullptr && missing_ != nullptr && channel_.is_far(*missing_)) {
      expect_far<kSimple>(reduce, piece, bytes);
    }
    return false;
  }
  const bool is_exposed = !kSimple && !exposed_operands_.empty();
  if (is_exposed) reach(reduce, bytes);
  if (is_exposed && !reads_.empty()) {
    if (!combine_read(reduce, piece)) return false;
  } else {
    combine<kSimple>(reduce, piece);
  }
  if (is_exposed && !is_good()) return false;
  for (const Payload& message : touched_) touch(message.at, message.bytes);
  const std::uint64_t iteration = channel_.iterations + piece;
  if (wire_ != nullptr) release_far(reduce, iteration);
  // After a lane's last operation comes the end of the piece.
  channel_.set_progress(lane, iteration + reduce.is_last, reduce.is_last ? 0 : reduce.place + 1);
  if (bytes > kInlineBytes) wake_senders(reduce);
  return true;
}

template <bool kSimple>
Step LaneRunner::advance(std::uint32_t number) {
  Lane& lane = lanes_[number];
  const Operation* const start = lane.next;
  const std::uint64_t pieces = kSimple ? 1 : prepared_.cut.pieces;
  const Operation* next = start;
  for (std::uint64_t piece = lane.piece; piece < pieces; ++piece) {
    for (; next != lane.end; ++next) {
      const bool has_turn = kSimple || left_ > 0;
      if constexpr (!kSimple) left_ -= has_turn;
      if (has_turn && (next->is_send ? send<kSimple>(number, *next, piece)
                                     : reduce<kSimple>(number, *next, piece))) {
        continue;
      }
      const bool moved = next != start || piece != lane.piece;
      lane.next = next;
      lane.piece = piece;
      return moved ? Step::moved : Step::blocked;
    }
    next = lane.first;
    if (lane.end == lane.first || !lane.end[-1].takes_messages) {
      channel_.set_progress(number, channel_.iterations + piece + 1, 0);
    }
  }
  lane.next = lane.first;
  if constexpr (!kSimple) lane.piece = pieces;
  return Step::finished;
}

// The work between the arrival of a message and the next send is on the critical path of a chain of
// small calls; everything else is done while the peers' answers travel. The function is flattened
// for the same reason: calls between its parts were a sixth of its instructions.
[[gnu::flatten]] Step LaneRunner::advance() {
  if (is_simple_) return advance<true>(0);
  bool finished = true;
  bool moved = false;
  left_ = turn_;  // the first lanes that can proceed do, because some should run ahead of others
  for (std::uint32_t lane = 0; lane < prepared_.lane_count; ++lane) {
    if (lanes_[lane].piece == prepared_.cut.pieces) continue;
    const Step step = advance<false>(lane);
    finished &= step == Step::finished;
    moved |= step != Step::blocked;
  }
  if (prepared_.divides && moved) finish_pieces();
  if (finished && !awaited_.empty()) finished = are_awaited_taken();
  return finished ? Step::finished : moved ? Step::moved : Step::blocked;
}

// AVG: divides each piece of the output once all lanes are past it, while it is in the cache.
void LaneRunner::finish_pieces() {
  std::uint64_t complete = prepared_.cut.pieces;
  for (std::size_t lane = 0; lane < prepared_.program->lanes.size(); ++lane) {
    complete = std::min(complete, lanes_[lane].piece);
  }
  const std::uint32_t chunks = prepared_.program->output_blocks * prepared_.program->chunks;
  for (; finished_ < complete; ++finished_) {
    for (std::uint32_t index = 0; index < chunks; ++index) {
      const Piece piece = piece_of<false>({Buffer::output, index}, 0, finished_);
      const std::byte* const values = piece.at;
      prepared_.average(piece.at, &values, 1, piece.items, prepared_.program->ranks);
    }
  }
}

}  // namespace rallypoint
