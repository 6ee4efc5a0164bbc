#include "engine/executor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace rallypoint {
namespace {

// What takes milliseconds to arrive is not worth a core's time that others could use.
constexpr unsigned kFarYields = 30;
constexpr std::uint64_t kFarLongBytes = 128 << 10;
constexpr std::uint64_t kAlign = 16;  // items; chunks of long arrays begin at cache lines

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 29;
}

std::uint64_t signature_of(const Call& call) {
  std::uint64_t hash = mix(0, call.program->identity);
  hash = mix(hash, call.what.bits());
  return mix(mix(hash, call.count), call.lengths);
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
  is_simple_ = cut_.is_simple && !divides_ && !has_tables_;
  block_bytes_ = cut_.count * cut_.item;
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

// A message that is not what was expected.
void Executor::misfit(const Line& line, std::uint32_t member, bool is_whole, std::uint64_t bytes) {
  trouble_ = line.signature != signature_ ? Trouble::mismatch
             : is_whole && has_tables_    ? Trouble::lengths
                                          : Trouble::corrupt;
  culprit_ = member;
  sent_ = line.bytes;
  expected_ = bytes;
}

// Look whether every message that the operation needs is there, and where.
inline bool Executor::gather(const Operation& reduce, std::uint64_t iteration,
                             std::uint64_t bytes) {
  const std::byte** source = sources_.data();
  for (const Operand& operand : reduce.operands) {
    const std::byte*& payload = *source++;
    if (!operand.remote) continue;
    const Line* line = channel_.peek(*program_, operand, iteration);
    const unsigned spins = wire_ != nullptr && channel_.is_far(operand) ? 0 : spins_;
    for (unsigned spin = 0; line == nullptr && spin < spins; ++spin) {
      relax();
      line = channel_.peek(*program_, operand, iteration);
    }
    if (line == nullptr) {
      blocker_ = channel_.rank_of(operand.peer);
      missing_ = &operand;
      return false;
    }
    payload = channel_.payload(*line, operand);
    if (line->signature != signature_ || payload == nullptr || line->bytes != bytes) {
      misfit(*line, operand.peer, payload != nullptr, bytes);
      return false;
    }
  }
  return true;
}

// The chunks of a message lie one after the other.
template <bool kSimple>
inline void Executor::combine(const Operation& reduce, std::uint64_t piece) {
  if (reduce.targets.empty()) return;
  for (std::uint32_t offset = 0; offset < (kSimple ? 1 : reduce.count); ++offset) {
    const Piece target = piece_of<kSimple>(reduce.targets[0], offset, piece);
    const std::uint64_t length = kSimple ? block_bytes_ : target.items * cut_.item;
    const std::byte** source = sources_.data();
    for (const Operand& operand : reduce.operands) {
      if (!operand.remote) *source = piece_of<kSimple>(operand.chunks, offset, piece).at;
      ++source;
    }
    // What came over the network may have gone straight to where it belongs.
    const bool is_there = reduce.operands.size() == 1 && sources_[0] == target.at;
    if (length == 0) continue;
    const std::uint64_t divisor = reduce.operands.size() > 1 ? divisor_ : 1;
    if (!is_there) {
      reducer_(target.at, sources_.data(), reduce.operands.size(), target.items, divisor);
    }
    for (std::size_t i = 1; i < reduce.targets.size(); ++i) {
      std::memcpy(piece_of<kSimple>(reduce.targets[i], offset, piece).at, target.at, length);
    }
    if constexpr (!kSimple) {
      for (std::size_t i = 0; i < reduce.operands.size(); ++i) sources_[i] += length;
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

template <bool kSimple>
inline bool Executor::send(std::uint32_t lane, const Operation& send, std::uint64_t piece) {
  const std::uint64_t iteration = channel_.iterations + piece;
  const std::uint64_t bytes = bytes_of<kSimple>(send.source, send.count, piece);
  if (!send.far.empty()) [[unlikely]] {
    if (!send_far<kSimple>(lane, send, piece, bytes)) return false;
    if (send.receivers.empty()) {
      far_sends_[lane].sent = 0;
      return true;
    }
  }
  Slot slot;
  std::byte* target = channel_.reserve(*program_, lane, send, iteration, bytes, slot, blocker_);
  if (target == nullptr) return false;
  const std::uint32_t chunks = kSimple ? 1 : send.count;
  for (std::uint32_t offset = 0; offset < chunks; ++offset) {
    const Piece source = piece_of<kSimple>(send.source, offset, piece);
    const std::uint64_t length = kSimple ? bytes : source.items * cut_.item;
    if (length > 0) std::memcpy(target, source.at, length);
    target += length;
  }
  channel_.publish(slot, send, iteration, bytes, signature_);
  far_sends_[lane].sent = 0;
  return true;
}

// Straight from the user's memory, to each receiver as far as its connection takes it.
template <bool kSimple>
bool Executor::send_far(std::uint32_t lane, const Operation& send, std::uint64_t piece,
                        std::uint64_t bytes) {
  FarSend& state = far_sends_[lane];
  if (state.sent == send.far.size()) return true;  // what is left goes to this host
  if (state.sent == 0) state.is_sent.assign(send.far.size(), false);
  state.payload.clear();
  for (std::uint32_t offset = 0; offset < (kSimple ? 1 : send.count); ++offset) {
    const Piece source = piece_of<kSimple>(send.source, offset, piece);
    const std::uint64_t length = kSimple ? bytes : source.items * cut_.item;
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
    if (channel_.send_far(send.far[i], lane, send, channel_.iterations + piece, signature_, bytes,
                          state.payload)) {
      state.is_sent[i] = true;
      ++state.sent;
    } else {
      blocker_ = channel_.rank_of(send.far[i].rank);
    }
  }
  return state.sent == send.far.size();
}

template <bool kSimple>
void Executor::expect_far(const Operation& reduce, std::uint64_t piece, std::uint64_t bytes) {
  std::byte* target = nullptr;
  if (reduce.operands.size() == 1 && reduce.count == 1 && !reduce.targets.empty()) {
    target = piece_of<kSimple>(reduce.targets[0], 0, piece).at;
  }
  channel_.expect(*missing_, channel_.iterations + piece, signature_, target, bytes);
}

void Executor::release_far(const Operation& reduce, std::uint64_t iteration) {
  for (const Operand& operand : reduce.operands) {
    if (operand.remote && channel_.is_far(operand)) channel_.release(operand, iteration);
  }
}

template <bool kSimple>
inline bool Executor::reduce(std::uint32_t lane, const Operation& reduce, std::uint64_t piece) {
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
  combine<kSimple>(reduce, piece);
  if (wire_ != nullptr) release_far(reduce, channel_.iterations + piece);
  // After a lane's last operation, the end of the piece says it all.
  if (!reduce.is_last) channel_.set_progress(lane, channel_.iterations + piece, reduce.place + 1);
  if (bytes > kInlineBytes) wake_senders(reduce);
  return true;
}

template <bool kSimple>
Executor::Step Executor::advance(std::uint32_t number) {
  Lane& lane = lanes_[number];
  const Operation* const start = lane.next;
  const std::uint64_t pieces = kSimple ? 1 : cut_.pieces;
  const Operation* next = start;
  for (std::uint64_t piece = lane.piece; piece < pieces; ++piece) {
    for (; next != lane.end; ++next) {
      const bool done = next->is_send ? send<kSimple>(number, *next, piece)
                                      : reduce<kSimple>(number, *next, piece);
      if (done) continue;
      const bool moved = next != start || piece != lane.piece;
      lane.next = next;
      lane.piece = piece;
      return moved ? Step::moved : Step::blocked;
    }
    next = lane.first;
    channel_.set_progress(number, channel_.iterations + piece + 1, 0);
  }
  lane.next = lane.first;
  if constexpr (!kSimple) lane.piece = pieces;
  return Step::finished;
}

// Run every lane as far as it goes.
Executor::Step Executor::advance() {
  if (is_simple_) return advance<true>(0);
  bool finished = true;
  bool moved = false;
  for (std::uint32_t lane = 0; lane < lane_count_; ++lane) {
    if (lanes_[lane].piece == cut_.pieces) continue;
    const Step step = advance<false>(lane);
    finished &= step == Step::finished;
    moved |= step != Step::blocked;
  }
  if (divides_ && moved) finish_pieces();
  return finished ? Step::finished : moved ? Step::moved : Step::blocked;
}

inline void Executor::start(const Call& call) {
  call_ = &call;
  if (program_ != call.program || cut_.count != call.count || what_.bits() != call.what.bits() ||
      has_tables_ || call.input_blocks != nullptr || call.output_blocks != nullptr) {
    prepare();
  }
}

inline void Executor::finish() {
  if (!is_simple_) rewind();
  channel_.iterations += cut_.pieces;
  ++channel_.calls;
}

// What happens between the arrival of a message and the next send is what a chain of small calls
// waits for; the rest is done while the peers' answers travel. Flattened for the same reason: calls
// between its parts were a sixth of its instructions.
[[gnu::flatten]] Trouble Executor::run(const Call& call, Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  start(call);
  if (advance() != Step::finished) {
    const Trouble trouble = wait(host);
    if (trouble != Trouble::none) return trouble;
  } else if (!program_->hears_from_all) {
    record();
  }
  finish();
  return Trouble::none;
}

void Executor::rewind() {
  for (std::uint32_t lane = 0; lane < lane_count_; ++lane) lanes_[lane].piece = 0;
  finished_ = 0;
}

// The rest of a call that could not be run in one go.
Trouble Executor::wait(Host& host) {
  resume();
  WaitPolicy policy = policy_;
  if (wire_ != nullptr && block_bytes_ >= kFarLongBytes) {
    policy.yields = std::min(policy.yields, kFarYields);
  }
  Waiter waiter(region_, policy, host, wire_);
  bool has_slept = false;
  for (;;) {
    switch (go_on(has_slept, host)) {
      case Step::finished:
        return Trouble::none;
      case Step::failed:
        return trouble_;
      case Step::moved:
        waiter.reset();
        has_slept = false;
        break;
      case Step::blocked:
        has_slept = waiter.pause(blocker_);
    }
  }
}

void Executor::resume() {
  record();
  began_s_ = 0;
  cut_off_s_ = 0;
  blocker_is_gone_ = false;
  trouble_ = Trouble::none;
}

void Executor::begin(const Call& call) {
  if (call.agreement != nullptr) {
    agreed_ = &call;
    largest_ = static_cast<std::int64_t>(call.count);
    auto* const bytes = reinterpret_cast<std::byte*>(&largest_);
    agreement_ = {call.agreement, call.what, 1, bytes, bytes, call.timeout_s};
    agreement_.what.dtype = DType::int64;
    agreement_.what.op = ReduceOp::max;
    start(agreement_);
  } else {
    start(call);
  }
  resume();
}

Executor::Step Executor::step(bool has_slept, Host& host) {
  if (region_.poisoned()) {
    trouble_ = Trouble::aborted;
    return Step::failed;
  }
  const Step step = go_on(has_slept, host);
  if (step != Step::finished) return step;
  finish();
  if (agreed_ == nullptr) return step;
  uneven_ = *std::exchange(agreed_, nullptr);
  uneven_.count = static_cast<std::uint64_t>(largest_);
  uneven_.agreement = nullptr;
  start(uneven_);
  resume();
  return Step::moved;
}

Executor::Step Executor::go_on(bool has_slept, Host& host) {
  const bool something_came = wire_ != nullptr && wire_->poll();
  Step step = advance();
  if (something_came && step == Step::blocked) step = Step::moved;
  if (step == Step::moved) blocker_is_gone_ = false;
  if (wire_ != nullptr && wire_->corrupt_rank() >= 0) {
    trouble_ = fail(Trouble::corrupt, static_cast<std::uint32_t>(wire_->corrupt_rank()));
    return Step::failed;
  }
  if (trouble_ != Trouble::none) {
    fail_against(trouble_, culprit_, host);
    return Step::failed;
  }
  if (step != Step::blocked || !has_slept) return step;
  trouble_ = look_for_trouble(host);
  return trouble_ == Trouble::none ? step : Step::failed;
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
