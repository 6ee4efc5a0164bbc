#include "engine/program.h"

#include <algorithm>
#include <set>

#include "engine/layout.h"

namespace rallypoint {
namespace {

constexpr std::int32_t kSend = 1;
constexpr std::int32_t kReduce = 2;
constexpr std::uint32_t kMaxRanks = 1 << 24;
// Even one item of the largest type from each chunk must fit into a message.
constexpr std::uint32_t kMostSpan = kBlockBytes / kMostItemBytes;
constexpr std::uint32_t kMaxOperations = (1 << kOperationBits) - 2;

// Reads words one by one; after the first impossible one every read gives 0 and `ok` is false.
class Reader {
 public:
  explicit Reader(std::span<const std::int32_t> words) : words_(words) {}

  std::uint32_t next(std::uint64_t below) {
    if (at_ >= words_.size()) return fail();
    const std::int32_t word = words_[at_++];
    if (word < 0 || static_cast<std::uint64_t>(word) >= below) return fail();
    return static_cast<std::uint32_t>(word);
  }
  std::size_t left() const { return words_.size() - at_; }
  bool ok() const { return ok_; }

 private:
  std::uint32_t fail() {
    ok_ = false;
    return 0;
  }

  std::span<const std::int32_t> words_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

std::uint64_t chunks_in(const Program& program, Buffer buffer) {
  switch (buffer) {
    case Buffer::input:
      return std::uint64_t{program.input_blocks} * program.chunks;
    case Buffer::output:
      return std::uint64_t{program.output_blocks} * program.chunks;
    default:
      return program.scratch_chunks;
  }
}

// Lengths depend on the index modulo the number of chunks, so all chunks must agree in it.
void read_chunks(Reader& reader, const Program& program, Chunks& chunks) {
  chunks.buffer = static_cast<Buffer>(reader.next(3));
  chunks.index = reader.next(chunks_in(program, chunks.buffer));
}

bool fits(const Program& program, const Chunks& chunks, std::uint32_t count) {
  return chunks.index + std::uint64_t{count} <= chunks_in(program, chunks.buffer);
}

bool read_send(Reader& reader, const Program& program, std::uint32_t ordinal, Operation& send) {
  send.is_send = true;
  send.ordinal = ordinal;
  read_chunks(reader, program, send.source);
  send.count = reader.next(std::uint64_t{1} << 31);
  const std::uint32_t receivers = reader.next(program.ranks);
  if (!reader.ok() || receivers > reader.left() / 3 || ordinal >= program.sends) return false;
  for (std::uint32_t i = 0; i < receivers; ++i) {
    const std::uint32_t rank = reader.next(program.ranks);
    const std::uint32_t lane = reader.next(kLanes);
    send.receivers.push_back({rank, lane, reader.next(kMaxOperations)});
  }
  return reader.ok() && receivers > 0 && fits(program, send.source, send.count);
}

bool read_reduce(Reader& reader, const Program& program, Operation& reduce) {
  const std::uint32_t operands = reader.next(kMaxRanks);
  const std::uint32_t targets = reader.next(kMaxRanks);
  reduce.count = reader.next(std::uint64_t{1} << 31);
  if (!reader.ok() || operands == 0 || operands > reader.left() / 3) return false;
  for (std::uint32_t i = 0; i < operands; ++i) {
    Operand operand{};
    operand.remote = reader.next(2) == 1;
    if (operand.remote) {
      const std::uint32_t place = reader.next(std::uint64_t{1} << 31);
      operand.peer = place & (kMaxRanks - 1);
      operand.lane = place >> 24;
      operand.ordinal = reader.next(program.sends);
      reduce.takes_messages = true;
      if (operand.peer >= program.ranks || operand.peer == program.rank || operand.lane >= kLanes) {
        return false;
      }
    } else {
      read_chunks(reader, program, operand.chunks);
      if (!fits(program, operand.chunks, reduce.count)) return false;
    }
    reduce.operands.push_back(operand);
  }
  if (!reader.ok() || targets > reader.left() / 2) return false;
  for (std::uint32_t i = 0; i < targets; ++i) {
    Chunks target{};
    read_chunks(reader, program, target);
    if (target.buffer == Buffer::input || !fits(program, target, reduce.count)) return false;
    reduce.targets.push_back(target);
  }
  return reader.ok() && (targets > 0) == (reduce.count > 0);
}

}  // namespace

std::string decode(std::span<const std::int32_t> words, Program& program) {
  Reader reader(words);
  const std::string broken = "the encoded program is malformed";
  if (reader.next(std::uint64_t{kMagic} + 1) != kMagic) return broken + ": wrong magic number";
  program.ranks = reader.next(kMaxRanks);
  program.rank = reader.next(program.ranks);
  program.identity = reader.next(std::uint64_t{1} << 31);
  program.chunks = reader.next(kMaxRanks);
  program.input_blocks = reader.next(kMaxRanks);
  program.output_blocks = reader.next(kMaxRanks);
  program.scratch_chunks = reader.next(kMaxRanks);
  program.sends = reader.next(kMaxOperations);
  program.max_span = reader.next(std::uint64_t{1} << 31);
  program.copies = reader.next(2) == 1;
  const std::uint32_t lanes = reader.next(kLanes + 1);
  if (!reader.ok() || program.chunks == 0 || program.max_span == 0) {
    return broken + " in its header";
  }
  if (program.max_span > kMostSpan) {
    return "a message of the program has " + std::to_string(program.max_span) +
           " chunks, and at most " + std::to_string(kMostSpan) +
           " go at once; send them in several messages";
  }

  std::vector<std::uint32_t> lengths;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) lengths.push_back(reader.next(kMaxOperations));
  program.max_operands = 0;
  std::set<std::uint32_t> senders;
  for (std::uint32_t lane = 0; lane < lanes && reader.ok(); ++lane) {
    std::uint32_t sends = 0;
    auto& operations = program.lanes.emplace_back();
    for (std::uint32_t i = 0; i < lengths[lane]; ++i) {
      Operation operation{};
      const bool good = reader.next(kReduce + 1) == kSend
                            ? read_send(reader, program, sends++, operation)
                            : read_reduce(reader, program, operation);
      if (!good || operation.count > program.max_span) {
        return broken + " at operation " + std::to_string(i) + " of lane " + std::to_string(lane);
      }
      operation.place = i;
      operation.is_last = i + 1 == lengths[lane];
      program.max_operands =
          std::max(program.max_operands, static_cast<std::uint32_t>(operation.operands.size()));
      for (const Operand& operand : operation.operands) {
        if (operand.remote) senders.insert(operand.peer);
      }
      operations.push_back(std::move(operation));
    }
  }
  program.hears_from_all = senders.size() + 1 == program.ranks;
  if (!reader.ok() || reader.left() != 0) return broken + ": its length is wrong";
  return {};
}

}  // namespace rallypoint
