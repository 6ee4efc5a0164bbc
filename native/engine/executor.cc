#include "engine/executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rallypoint {
namespace {

constexpr std::uint64_t kAlign = 16;  // items; chunks of long arrays begin at cache lines

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 29;
}

std::uint64_t signature_of(const Call& call) {
  std::uint64_t hash = mix(0, call.program->identity);
  hash = mix(hash, static_cast<std::uint64_t>(static_cast<std::uint32_t>(call.collective)) << 32 |
                       static_cast<std::uint32_t>(call.root));
  hash =
      mix(hash, static_cast<std::uint64_t>(call.dtype) << 8 | static_cast<std::uint64_t>(call.op));
  return mix(hash, call.count);
}

}  // namespace

Cut::Cut(const Program& program, std::uint64_t count_, std::uint64_t item_)
    : item(item_), count(count_) {
  chunk = program.chunks == 1 ? count : (count + program.chunks - 1) / program.chunks;
  if (program.chunks > 1 && chunk > 4 * kAlign) chunk = (chunk + kAlign - 1) / kAlign * kAlign;
  piece = chunk;
  pieces = 1;
  is_whole = program.chunks == 1 && program.scratch_chunks == 0;
  if (chunk * item * program.max_span <= kBlockBytes) return;
  is_whole = false;
  const std::uint64_t most = std::max<std::uint64_t>(kBlockBytes / (item * program.max_span), 1);
  pieces = (chunk + most - 1) / most;
  piece = (chunk + pieces - 1) / pieces;
  if (most > kAlign) piece = std::min((piece + kAlign - 1) / kAlign * kAlign, most);
  pieces = (chunk + piece - 1) / piece;
}

void Executor::begin(const Call& call) {
  const bool is_like_last = program_ == call.program && call_.count == call.count &&
                            call_.op == call.op && call_.dtype == call.dtype &&
                            call_.root == call.root && call_.collective == call.collective;
  call_ = call;
  if (!is_like_last) prepare();  // training repeats its calls
  finished_ = 0;
  for (std::uint32_t lane = 0; lane < lane_count_; ++lane) lanes_[lane] = {};

  CallRecord& record = channel_.call(channel_.self(), channel_.calls);
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.signature.store(signature_, std::memory_order_relaxed);
  record.count = call.count;
  record.collective = call.collective;
  record.reduce_op = static_cast<std::int32_t>(call.op);
  record.dtype = static_cast<std::int32_t>(call.dtype);
  record.root = call.root;
  record.number.store(channel_.calls + 1, std::memory_order_release);
}

// What follows from the kind and size of a call alone.
void Executor::prepare() {
  program_ = call_.program;
  lane_count_ = static_cast<std::uint32_t>(program_->lanes.size());
  cut_ = Cut(*program_, call_.count, item_bytes(call_.dtype));
  block_bytes_ = cut_.count * cut_.item;
  reducer_ = reducer(call_.dtype, call_.op);
  signature_ = signature_of(call_);
  spins_ = lane_count_ == 1 ? policy_.spins : 0;
  const std::size_t scratch = program_->scratch_chunks * cut_.piece * cut_.item;
  if (scratch_.size() < scratch) scratch_.resize(scratch);
  incoming_.resize(program_->max_operands);
  operands_.resize(program_->max_operands);
}

template <bool kWhole>
inline Executor::Piece Executor::piece_of(const Chunks& chunks, std::uint32_t offset,
                                          std::uint64_t piece) const {
  const std::uint64_t index = chunks.index + offset;
  if constexpr (kWhole) return {buffer(chunks.buffer) + index * block_bytes_, cut_.count};
  const std::uint64_t block = index / program_->chunks;
  const std::uint64_t chunk = index % program_->chunks;
  const std::uint64_t start = std::min(chunk * cut_.chunk, cut_.count);
  const std::uint64_t end = std::min(start + cut_.chunk, cut_.count);
  const std::uint64_t first = std::min(start + piece * cut_.piece, end);
  const std::uint64_t items = std::min(cut_.piece, end - first);
  if (chunks.buffer == Buffer::scratch) {
    return {const_cast<std::byte*>(scratch_.data()) + index * cut_.piece * cut_.item, items};
  }
  return {buffer(chunks.buffer) + (block * cut_.count + first) * cut_.item, items};
}

template <bool kWhole>
inline std::uint64_t Executor::bytes_of(std::uint32_t first, std::uint32_t count,
                                        std::uint64_t piece) const {
  if constexpr (kWhole) return count * block_bytes_;
  std::uint64_t items = 0;
  for (std::uint32_t offset = 0; offset < count; ++offset) {
    items += piece_of<false>({Buffer::scratch, first}, offset, piece).items;
  }
  return items * cut_.item;
}

// Look whether every message that the operation needs is there.
inline bool Executor::gather(const Operation& reduce, std::uint64_t iteration,
                             std::uint64_t bytes) {
  for (std::size_t i = 0; i < reduce.operands.size(); ++i) {
    const Operand& operand = reduce.operands[i];
    if (!operand.remote) continue;
    const Line* line = channel_.peek(*program_, operand, iteration);
    for (unsigned spin = 0; line == nullptr && spin < spins_; ++spin) {
      relax();
      line = channel_.peek(*program_, operand, iteration);
    }
    if (line == nullptr) {
      blocker_ = channel_.rank_of(operand.peer);
      return false;
    }
    incoming_[i] = channel_.payload(*line, operand);
    if (line->signature != signature_) {
      trouble_ = fail_against(Trouble::mismatch, operand.peer);
      return false;
    }
    if (incoming_[i] == nullptr || line->bytes != bytes) {
      trouble_ = fail_against(Trouble::corrupt, operand.peer);
      return false;
    }
  }
  return true;
}

template <bool kWhole>
inline void Executor::combine(const Operation& reduce, std::uint64_t piece) {
  const std::size_t operands = reduce.operands.size();
  for (std::uint32_t offset = 0; offset < reduce.count; ++offset) {
    const Piece target = piece_of<kWhole>(reduce.targets[0], offset, piece);
    const std::uint64_t length = target.items * cut_.item;
    for (std::size_t i = 0; i < operands; ++i) {
      const Operand& operand = reduce.operands[i];
      if (operand.remote) {
        operands_[i] = incoming_[i];
        incoming_[i] += length;
      } else {
        operands_[i] = piece_of<kWhole>(operand.chunks, offset, piece).at;
      }
    }
    if (length == 0) continue;
    reducer_(target.at, operands_.data(), operands, target.items);
    for (std::size_t i = 1; i < reduce.targets.size(); ++i) {
      std::memcpy(piece_of<kWhole>(reduce.targets[i], offset, piece).at, target.at, length);
    }
  }
}

// A full ring stops its sender, so it must not oversleep; lines are many, and it looks for
// itself now and then.
void Executor::wake_senders(const Operation& reduce) {
  Region::fence();
  for (const Operand& operand : reduce.operands) {
    if (operand.remote) channel_.wake(operand.peer);
  }
}

template <bool kWhole>
inline bool Executor::send(std::uint32_t lane, const Operation& send, std::uint64_t piece) {
  const std::uint64_t iteration = channel_.iterations + piece;
  const std::uint64_t bytes = bytes_of<kWhole>(send.source.index, send.count, piece);
  Slot slot;
  std::byte* target = channel_.reserve(*program_, lane, send, iteration, bytes, slot, blocker_);
  if (target == nullptr) return false;
  for (std::uint32_t offset = 0; offset < send.count; ++offset) {
    const Piece source = piece_of<kWhole>(send.source, offset, piece);
    const std::uint64_t length = source.items * cut_.item;
    if (length > 0) std::memcpy(target, source.at, length);
    target += length;
  }
  channel_.publish(slot, send, iteration, bytes, signature_);
  return true;
}

template <bool kWhole>
inline bool Executor::reduce(std::uint32_t lane, std::size_t at, const Operation& reduce,
                             std::uint64_t piece) {
  if (!reduce.takes_messages) {
    combine<kWhole>(reduce, piece);
    return true;
  }
  const std::uint32_t first = reduce.targets.empty() ? 0 : reduce.targets[0].index;
  const std::uint64_t bytes = bytes_of<kWhole>(first, reduce.count, piece);
  if (!gather(reduce, channel_.iterations + piece, bytes)) return false;
  combine<kWhole>(reduce, piece);
  // After a lane's last operation, the end of the piece says it all.
  if (at + 1 < program_->lanes[lane].size()) {
    channel_.set_progress(lane, channel_.iterations + piece, static_cast<std::uint32_t>(at) + 1);
  }
  if (bytes > kInlineBytes) wake_senders(reduce);
  return true;
}

template <bool kWhole>
Executor::Step Executor::advance(std::uint32_t lane) {
  const auto& operations = program_->lanes[lane];
  const LanePosition start = lanes_[lane];
  const std::uint64_t pieces = kWhole ? 1 : cut_.pieces;
  std::size_t at = start.operation;
  for (std::uint64_t piece = start.piece; piece < pieces; ++piece) {
    for (; at < operations.size(); ++at) {
      const Operation& operation = operations[at];
      const bool done = operation.is_send ? send<kWhole>(lane, operation, piece)
                                          : reduce<kWhole>(lane, at, operation, piece);
      if (done) continue;
      lanes_[lane] = {at, piece};
      return at == start.operation && piece == start.piece ? Step::blocked : Step::moved;
    }
    at = 0;
    channel_.set_progress(lane, channel_.iterations + piece + 1, 0);
  }
  lanes_[lane] = {0, pieces};
  return Step::finished;
}

// Run every lane as far as it goes.
Executor::Step Executor::advance() {
  bool finished = true;
  bool moved = false;
  for (std::uint32_t lane = 0; lane < lane_count_; ++lane) {
    const Step step = cut_.is_whole ? advance<true>(lane) : advance<false>(lane);
    finished &= step == Step::finished;
    moved |= step != Step::blocked;
  }
  if (call_.op == ReduceOp::avg && moved) finish_pieces();
  return finished ? Step::finished : moved ? Step::moved : Step::blocked;
}

Trouble Executor::run(const Call& call, Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  begin(call);
  if (advance() != Step::finished) {
    const Trouble trouble = wait(host);
    if (trouble != Trouble::none) return trouble;
  }
  channel_.iterations += cut_.pieces;
  ++channel_.calls;
  return Trouble::none;
}

// The rest of a call that could not be run in one go.
Trouble Executor::wait(Host& host) {
  Waiter waiter(region_, policy_, host);
  blocker_is_gone_ = false;
  trouble_ = Trouble::none;
  for (;;) {
    const Step step = advance();
    if (step == Step::finished) return Trouble::none;
    if (trouble_ != Trouble::none) return trouble_;
    if (step == Step::moved) {
      waiter.reset();
      blocker_is_gone_ = false;
    } else if (waiter.pause()) {
      const Trouble trouble = look_for_trouble(waiter.waited_s(), host);
      if (trouble != Trouble::none) return trouble;
    }
  }
}

// AVG: divide each piece of the output once all lanes are past it, while it is in the cache.
void Executor::finish_pieces() {
  std::uint64_t complete = cut_.pieces;
  for (std::size_t lane = 0; lane < program_->lanes.size(); ++lane) {
    complete = std::min(complete, lanes_[lane].piece);
  }
  const std::uint32_t chunks = program_->output_blocks * program_->chunks;
  for (; finished_ < complete; ++finished_) {
    for (std::uint32_t index = 0; index < chunks; ++index) {
      const Piece piece = piece_of<false>({Buffer::output, index}, 0, finished_);
      divide(call_.dtype, piece.at, piece.items, program_->ranks);
    }
  }
}

// A peer that is gone may have sent its last message just before: believe it the second time.
Trouble Executor::look_for_trouble(double waited_s, Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  for (std::uint32_t member = 0; member < program_->ranks; ++member) {
    if (is_blocked_by_mismatch(member)) return fail_against(Trouble::mismatch, member);
  }
  const bool was_gone = std::exchange(blocker_is_gone_, true);
  if (const int lost = region_.first_lost(); lost >= 0) {
    return was_gone ? fail(Trouble::peer_lost, static_cast<std::uint32_t>(lost)) : Trouble::none;
  }
  if (region_.presence(blocker_) == Presence::left) {
    return was_gone ? fail(Trouble::peer_left, blocker_) : Trouble::none;
  }
  blocker_is_gone_ = false;
  if (waited_s > call_.timeout_s) return fail(Trouble::timeout, blocker_);
  if (host.is_interrupted()) return fail(Trouble::interrupted, region_.rank());
  return Trouble::none;
}

bool Executor::is_blocked_by_mismatch(std::uint32_t member) const {
  if (channel_.rank_of(member) != blocker_) return false;
  const CallRecord& theirs = channel_.call(member, channel_.calls);
  const std::uint64_t number = channel_.calls + 1;
  if (theirs.number.load(std::memory_order_acquire) != number) return false;
  const std::uint64_t signature = theirs.signature.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return theirs.number.load(std::memory_order_relaxed) == number && signature != signature_;
}

Trouble Executor::fail(Trouble trouble, std::uint32_t rank) {
  region_.spread(trouble, static_cast<std::int32_t>(rank), nullptr,
                 &channel_.call(channel_.self(), channel_.calls));
  return trouble;
}

Trouble Executor::fail_against(Trouble trouble, std::uint32_t member) {
  region_.spread(trouble, static_cast<std::int32_t>(channel_.rank_of(member)),
                 &channel_.call(member, channel_.calls),
                 &channel_.call(channel_.self(), channel_.calls));
  return trouble;
}

}  // namespace rallypoint
