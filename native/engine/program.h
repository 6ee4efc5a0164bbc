// One rank's part of a program, decoded from the words of schedule/encode.py.
//
// The engine trusts a decoded program: every index has been checked here, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace rallypoint {

enum class Buffer : std::uint8_t { input, output, scratch };

struct Chunks {
  Buffer buffer;
  std::uint32_t index;
};

// A rank that takes a message, and the operation in its lane that does so.
struct Receiver {
  std::uint32_t rank;
  std::uint32_t lane;
  std::uint32_t operation;
};

struct Operand {
  bool remote;
  Chunks chunks;          // local
  std::uint32_t peer;     // remote: the sender,
  std::uint32_t lane;     // the sender's lane,
  std::uint32_t ordinal;  // the number of the send in that lane
};

struct Operation {
  bool is_send;
  bool takes_messages;
  bool is_last;         // of its lane
  std::uint32_t place;  // in its lane
  std::uint32_t count;  // chunks

  Chunks source;  // send
  std::uint32_t ordinal;
  std::vector<Receiver> receivers;  // that share memory with this rank,
  std::vector<Receiver> far;        // and that do not

  std::vector<Operand> operands;  // reduce
  std::vector<Chunks> targets;
};

struct Program {
  std::uint32_t ranks;
  std::uint32_t rank;
  std::uint32_t identity;  // the same on every rank
  std::uint32_t chunks;
  std::uint32_t input_blocks;
  std::uint32_t output_blocks;
  std::uint32_t scratch_chunks;
  std::uint32_t sends;     // the most sends in any lane of any rank
  std::uint32_t max_span;  // the most chunks in one operation of any rank
  std::uint32_t max_operands;
  bool copies;          // in place, what was sent may be overwritten before it is taken
  bool hears_from_all;  // this rank takes a message from every other
  // Every reduction of several operands combines the inputs of all ranks.
  bool averages_at_once = false;
  std::vector<std::vector<Operation>> lanes;

  // Whether blocks may be of different lengths.
  bool takes_uneven_blocks() const { return chunks == 1 && scratch_chunks == 0; }
};

// Returns an empty string, or what is wrong with the words.
std::string decode(std::span<const std::int32_t> words, Program& program);

}  // namespace rallypoint
