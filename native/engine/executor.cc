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
  if (chunk * item * program.max_span <= kBlockBytes) return;
  const std::uint64_t most = std::max<std::uint64_t>(kBlockBytes / (item * program.max_span), 1);
  pieces = (chunk + most - 1) / most;
  piece = (chunk + pieces - 1) / pieces;
  if (most > kAlign) piece = std::min((piece + kAlign - 1) / kAlign * kAlign, most);
  pieces = (chunk + piece - 1) / piece;
}

void Executor::begin(const Call& call) {
  call_ = &call;
  program_ = call.program;
  cut_ = Cut(*program_, call.count, item_bytes(call.dtype));
  reducer_ = reducer(call.dtype, call.op);
  signature_ = signature_of(call);
  finished_ = 0;
  blocker_is_gone_ = false;
  trouble_ = Trouble::none;
  std::fill(std::begin(lanes_), std::end(lanes_), LanePosition{});
  const std::size_t scratch = program_->scratch_chunks * cut_.piece * cut_.item;
  if (scratch_.size() < scratch) scratch_.resize(scratch);

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

Trouble Executor::run(const Call& call, Host& host) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    host.before_wait();
    lock.lock();
  }
  if (region_.poisoned()) return Trouble::aborted;
  begin(call);
  Waiter waiter(region_, policy_, host);
  const std::uint32_t lanes = static_cast<std::uint32_t>(program_->lanes.size());
  for (;;) {
    bool finished = true;
    bool moved = false;
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      const LanePosition before = lanes_[lane];
      finished &= advance(lane) == Step::finished;
      moved |= before.operation != lanes_[lane].operation || before.piece != lanes_[lane].piece;
    }
    if (trouble_ != Trouble::none) return trouble_;
    if (call.op == ReduceOp::avg && moved) finish_pieces();
    if (finished) break;
    if (moved) {
      waiter.reset();
      blocker_is_gone_ = false;
    } else if (waiter.pause()) {
      const Trouble trouble = look_for_trouble(waiter.waited_s(), host);
      if (trouble != Trouble::none) return trouble;
    }
  }
  channel_.iterations += cut_.pieces;
  ++channel_.calls;
  return Trouble::none;
}

Executor::Step Executor::advance(std::uint32_t lane) {
  const auto& operations = program_->lanes[lane];
  LanePosition& position = lanes_[lane];
  while (position.piece < cut_.pieces) {
    for (; position.operation < operations.size(); ++position.operation) {
      const Operation& operation = operations[position.operation];
      const bool done = operation.is_send ? send(lane, operation, position.piece)
                                          : reduce(lane, operation, position.piece);
      if (!done) return Step::blocked;
    }
    position.operation = 0;
    ++position.piece;
    channel_.set_progress(lane, channel_.iterations + position.piece, 0);
  }
  return Step::finished;
}

bool Executor::send(std::uint32_t lane, const Operation& send, std::uint64_t piece) {
  const std::uint64_t iteration = channel_.iterations + piece;
  const std::uint64_t bytes = bytes_of(send.source.index, send.count, piece);
  std::byte* target = channel_.reserve(*program_, lane, send, iteration, bytes, blocker_);
  if (target == nullptr) return false;
  for (std::uint32_t offset = 0; offset < send.count; ++offset) {
    const Piece source = piece_of(send.source, offset, piece);
    const std::uint64_t length = source.items * cut_.item;
    if (length > 0) std::memcpy(target, source.at, length);
    target += length;
  }
  channel_.publish(*program_, lane, send, iteration, bytes, signature_);
  return true;
}

bool Executor::reduce(std::uint32_t lane, const Operation& reduce, std::uint64_t piece) {
  if (!gather(reduce, piece)) return false;
  if (trouble_ != Trouble::none) return false;
  combine(reduce, piece);
  if (reduce.takes_messages) {
    const std::uint32_t done = static_cast<std::uint32_t>(lanes_[lane].operation) + 1;
    channel_.set_progress(lane, channel_.iterations + piece, done);
    Region::fence();
    for (const Operand& operand : reduce.operands) {
      if (operand.remote) channel_.wake(operand.peer);
    }
  }
  return true;
}

// Look whether every message that the operation needs is there.
bool Executor::gather(const Operation& reduce, std::uint64_t piece) {
  incoming_.clear();
  for (const Operand& operand : reduce.operands) {
    if (!operand.remote) {
      incoming_.push_back(nullptr);
      continue;
    }
    const Line* line = channel_.peek(*program_, operand, channel_.iterations + piece);
    if (line == nullptr) {
      blocker_ = channel_.rank_of(operand.peer);
      return false;
    }
    const std::uint32_t first = reduce.targets.empty() ? 0 : reduce.targets[0].index;
    if (line->signature != signature_) {
      trouble_ = fail_against(Trouble::mismatch, operand.peer);
      return false;
    }
    const std::byte* payload = channel_.payload(*line, operand);
    if (payload == nullptr || line->bytes != bytes_of(first, reduce.count, piece)) {
      trouble_ = fail_against(Trouble::corrupt, operand.peer);
      return false;
    }
    incoming_.push_back(payload);
  }
  return true;
}

void Executor::combine(const Operation& reduce, std::uint64_t piece) {
  operands_.resize(reduce.operands.size());
  for (std::uint32_t offset = 0; offset < reduce.count; ++offset) {
    const Piece target = piece_of(reduce.targets[0], offset, piece);
    const std::uint64_t length = target.items * cut_.item;
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      if (incoming_[i] == nullptr) {
        operands_[i] = piece_of(reduce.operands[i].chunks, offset, piece).at;
      } else {
        operands_[i] = incoming_[i];
        incoming_[i] += length;
      }
    }
    if (length == 0) continue;
    reducer_(target.at, operands_.data(), operands_.size(), target.items);
    for (std::size_t i = 1; i < reduce.targets.size(); ++i) {
      std::memcpy(piece_of(reduce.targets[i], offset, piece).at, target.at, length);
    }
  }
}

Executor::Piece Executor::piece_of(const Chunks& chunks, std::uint32_t offset,
                                   std::uint64_t piece) const {
  const std::uint64_t index = chunks.index + offset;
  const std::uint64_t block = program_->chunks == 1 ? index : index / program_->chunks;
  const std::uint64_t chunk = program_->chunks == 1 ? 0 : index % program_->chunks;
  const std::uint64_t start = std::min(chunk * cut_.chunk, cut_.count);
  const std::uint64_t end = std::min(start + cut_.chunk, cut_.count);
  const std::uint64_t first = std::min(start + piece * cut_.piece, end);
  const std::uint64_t items = std::min(cut_.piece, end - first);
  if (chunks.buffer == Buffer::scratch) {
    return {const_cast<std::byte*>(scratch_.data()) + index * cut_.piece * cut_.item, items};
  }
  std::byte* const base =
      chunks.buffer == Buffer::output ? call_->output : const_cast<std::byte*>(call_->input);
  return {base + (block * cut_.count + first) * cut_.item, items};
}

std::uint64_t Executor::bytes_of(std::uint32_t first, std::uint32_t count,
                                 std::uint64_t piece) const {
  std::uint64_t items = 0;
  for (std::uint32_t offset = 0; offset < count; ++offset) {
    items += piece_of({Buffer::scratch, first}, offset, piece).items;
  }
  return items * cut_.item;
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
      const Piece piece = piece_of({Buffer::output, index}, 0, finished_);
      divide(call_->dtype, piece.at, piece.items, program_->ranks);
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
  if (waited_s > call_->timeout_s) return fail(Trouble::timeout, blocker_);
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
