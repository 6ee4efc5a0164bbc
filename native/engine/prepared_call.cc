#include "engine/prepared_call.h"

#include <algorithm>

#include "engine/copy.h"
#include "engine/layout.h"

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

PreparedCall::PreparedCall(const Call& call, PeerMemoryAccess reach)
    : program(call.program),
      what(call.what),
      lane_count(static_cast<std::uint32_t>(program->lanes.size())),
      cut(*program, call.count, item_bytes(what.dtype)),
      block_bytes(cut.count * cut.item),
      has_tables(call.has_tables()),
      signature(signature_of(call)) {
  const bool averages = what.op == ReduceOp::avg;
  divides = averages && !program->averages_at_once;
  divisor = averages && !divides ? program->ranks : 1;
  may_expose = reach != 0 && !program->copies && !divides && cut.piece * cut.item >= kExposedBytes;
  is_simple = cut.is_simple && !divides && !has_tables && !may_expose;
  // The target of an in-place all_reduce was read shortly before.
  const bool is_read_before = call.input == call.output && program->max_operands > 1;
  past_caches = !is_read_before && block_bytes * program->output_blocks >= kHugeBytes;
  reducer = rallypoint::reducer(what.dtype, divides ? ReduceOp::sum : what.op);
  average = divides ? rallypoint::reducer(what.dtype, ReduceOp::avg) : nullptr;
}

}  // namespace rallypoint
