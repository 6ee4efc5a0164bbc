// The JSON of PyTorch's Flight Recorder (its version 2.x), as plain data.
//
//   {"version": "2.10", "pg_status": {"0": {"last_enqueued_collective": "8", ...}},
//    "entries": [{"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, ...}]}
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace rallypoint {

struct TraceStatus {
  std::int64_t group_id = -1;  // the recorder's; of this process only
  std::int64_t enqueued = -1;  // counts messages as well
  std::int64_t completed = -1;
};

struct TraceEntry {
  std::int64_t group_id = -1;
  std::string group;          // its name, the same on all members
  std::string description;    // of the group
  std::int64_t number = -1;   // of the group's collectives, from 1
  std::int64_t messages = 0;  // that were recorded before; gloo's are not
  std::int64_t count = -1;    // as TraceStatus counts
  std::int64_t skipped = 0;   // how many of these were not recorded; see `as_others_count`
  std::string backend;
  std::string operation;
  std::string dtype;
  std::int64_t shape[8] = {};
  std::uint32_t dimensions = ~0u;  // ~0: not known
  std::int64_t created_ns = 0;     // wall clock
  std::int64_t completed_ns = 0;   // wall clock; 0: not known
  bool is_message = false;
  bool is_completed = false;
  bool is_done = false;  // completed, or given up
};

struct Trace {
  std::vector<TraceStatus> statuses;
  std::vector<TraceEntry> entries;
};

// False if it is not such a text; the result is then empty.
bool parse_trace(std::string_view json, Trace& trace);

// Backends that record themselves count from 1. PyTorch's hooks, which record others from 2.15 on,
// count from 0, include calls that they do not record (captured CUDA graphs), and give up calls at
// once if no backend reports their end. This converts the latter into the former, except for
// skipped calls.
void as_others_count(Trace& of_hooks);

}  // namespace rallypoint
