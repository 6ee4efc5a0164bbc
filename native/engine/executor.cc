#include "engine/executor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/copy.h"

namespace rallypoint {
namespace {

// What takes milliseconds to arrive is not worth a core's time that others could use; but who
// sleeps between two pieces of it is woken late each time.
constexpr unsigned kFarYields = 300;
constexpr std::uint64_t kFarLongBytes = 128 << 10;

}  // namespace

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
  exposed_operands_.clear();
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
    if (line->offset == kExposed) [[unlikely]] {
      if (!may_expose_ || reduce.count != 1) {
        misfit(*line, operand.peer, false, bytes);
        return false;
      }
      exposed_operands_.push_back(static_cast<std::size_t>(source - sources_.data() - 1));
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
    if (past_caches_ && reduce.operands.size() == 1 && !is_there) {
      copy_past_caches(target.at, sources_[0], length);
    } else if (!is_there) {
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

// A full ring stops its sender, and so does a message that is read where it lies, so it must not
// oversleep; lines are many, and it looks for itself now and then.
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
  if constexpr (!kSimple) {
    Place place;
    if (may_expose_ && find_place(send, piece, bytes, place)) {
      return expose(lane, send, piece, bytes, place);
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
  const bool is_exposed = !kSimple && !exposed_operands_.empty();
  if (is_exposed) reach(reduce, bytes);
  if (is_exposed && !reads_.empty()) {
    if (!combine_read(reduce, piece)) return false;
  } else {
    combine<kSimple>(reduce, piece);
  }
  if (is_exposed && !is_good()) return false;
  const std::uint64_t iteration = channel_.iterations + piece;
  if (wire_ != nullptr) release_far(reduce, iteration);
  // After a lane's last operation comes the end of the piece.
  channel_.set_progress(lane, iteration + reduce.is_last, reduce.is_last ? 0 : reduce.place + 1);
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
    if (lane.end == lane.first || !lane.end[-1].takes_messages) {
      channel_.set_progress(number, channel_.iterations + piece + 1, 0);
    }
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
  if (finished && !exposed_.empty()) finished = are_exposed_taken();
  return finished ? Step::finished : moved ? Step::moved : Step::blocked;
}

inline void Executor::start(const Call& call) {
  call_ = &call;
  if (program_ != call.program || cut_.count != call.count || what_.bits() != call.what.bits() ||
      has_tables_ || call.input_blocks != nullptr || call.output_blocks != nullptr) {
    prepare();
  }
  if (may_expose_) {
    views_.trim();
    exposes_private_ = (memory_.reach & kPrivate) != 0 && are_buffers_readable();
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
    tell(host);
    return Step::failed;
  }
  if (step != Step::blocked || !has_slept) return step;
  trouble_ = look_for_trouble(host);
  return trouble_ == Trouble::none ? step : Step::failed;
}

}  // namespace rallypoint
