// What follows from the kind and size of a call, before it runs and after each piece.

#include <algorithm>

#include "engine/copy.h"
#include "engine/executor.h"

namespace rallypoint {
namespace {

constexpr std::uint64_t kAlign = 16;  // items; chunks of long arrays begin at cache lines

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 29;
}

std::uint64_t signature_of(const Call& call) {
  std::uint64_t hash = mix(0, call.program->identity);
  hash = mix(hash, call.what.bits());
  return mix(hash, call.count);
}

}  // namespace

Cut::Cut(const Program& program, std::uint64_t count_, std::uint64_t item_)
    : item(item_), count(count_) {
  chunk = program.chunks == 1 ? count : (count + program.chunks - 1) / program.chunks;
  if (program.chunks > 1 && chunk > 4 * kAlign) chunk = (chunk + kAlign - 1) / kAlign * kAlign;
  piece = chunk;
  pieces = 1;
  is_simple = program.chunks == 1 && program.scratch_chunks == 0 && program.max_span == 1 &&
              program.lanes.size() == 1;
  if (chunk * item * program.max_span <= kBlockBytes) return;
  is_simple = false;
  const std::uint64_t most = std::max<std::uint64_t>(kBlockBytes / (item * program.max_span), 1);
  pieces = (chunk + most - 1) / most;
  piece = (chunk + pieces - 1) / pieces;
  if (most > kAlign) piece = std::min((piece + kAlign - 1) / kAlign * kAlign, most);
  pieces = (chunk + piece - 1) / piece;
}

// What follows from the kind and size of a call alone.
void Executor::prepare() {
  program_ = call_->program;
  what_ = call_->what;
  lane_count_ = static_cast<std::uint32_t>(program_->lanes.size());
  for (std::uint32_t lane = 0; lane < lane_count_; ++lane) {
    const auto& operations = program_->lanes[lane];
    const Operation* const first = operations.data();
    lanes_[lane] = {first, first + operations.size(), first, 0};
  }
  cut_ = Cut(*program_, call_->count, item_bytes(what_.dtype));
  const bool averages = what_.op == ReduceOp::avg;
  divides_ = averages && !program_->averages_at_once;
  divisor_ = averages && !divides_ ? program_->ranks : 1;
  has_tables_ = call_->input_blocks != nullptr || call_->output_blocks != nullptr;
  may_expose_ = memory_.reach != 0 && !program_->copies && !divides_ &&
                cut_.piece * cut_.item >= kExposedBytes;
  is_simple_ = cut_.is_simple && !divides_ && !has_tables_ && !may_expose_;
  block_bytes_ = cut_.count * cut_.item;
  // What an all_reduce in place receives was read there shortly before.
  const bool is_read_before = call_->input == call_->output && program_->max_operands > 1;
  past_caches_ = !is_read_before && block_bytes_ * program_->output_blocks >= kHugeBytes;
  reducer_ = reducer(what_.dtype, divides_ ? ReduceOp::sum : what_.op);
  average_ = divides_ ? reducer(what_.dtype, ReduceOp::avg) : nullptr;
  signature_ = signature_of(*call_);
  spins_ = lane_count_ == 1 ? policy_.spins : 0;
  const std::size_t scratch = program_->scratch_chunks * cut_.piece * cut_.item;
  if (scratch_.size() < scratch) scratch_.resize(scratch);
  sources_.resize(program_->max_operands);
}

// Tell the peers what is called. Only a rank that waits in vain looks, so it need not come first;
// and a call that ended at once, having heard from every rank, was the same call everywhere.
void Executor::record() {
  CallRecord& record = channel_.call(channel_.self(), channel_.calls);
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.signature.store(signature_, std::memory_order_relaxed);
  record.count = cut_.count;
  record.collective = what_.collective;
  record.reduce_op = static_cast<std::int32_t>(what_.op);
  record.dtype = static_cast<std::int32_t>(what_.dtype);
  record.root = what_.root;
  record.number.store(channel_.calls + 1, std::memory_order_release);
  if (Messenger* const messenger = region_.messenger()) messenger->answer(channel_.calls);
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
      const std::byte* const values = piece.at;
      average_(piece.at, &values, 1, piece.items, program_->ranks);
    }
  }
}

}  // namespace rallypoint
