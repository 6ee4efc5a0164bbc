#include "scribe/trace.h"

#include <charconv>

#include "scribe/json.h"

namespace rallypoint {
namespace {

constexpr std::size_t kMostGroups = 4096;
constexpr std::size_t kMostEntries = 1 << 17;

// Some numbers are written as strings.
std::int64_t number(JsonReader& json) {
  std::int64_t value = -1;
  if (!json.starts_with('"')) {
    json.integer(value);
    return value;
  }
  std::string text;
  if (json.string(text)) std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void read_statuses(JsonReader& json, Trace& trace) {
  json.object([&](std::string_view key) {
    TraceStatus status;
    std::from_chars(key.data(), key.data() + key.size(), status.group_id);
    json.object([&](std::string_view name) {
      if (name == "last_enqueued_collective") {
        status.enqueued = number(json);
      } else if (name == "last_completed_collective") {
        status.completed = number(json);
      } else {
        json.skip();
      }
    });
    if (trace.statuses.size() < kMostGroups) trace.statuses.push_back(status);
  });
}

// Reads the shape of the first array of the call: [[4, 3], ...].
void read_shape(JsonReader& json, TraceEntry& entry) {
  bool is_first = true;
  json.array([&] {
    if (!is_first || !json.starts_with('[')) {
      json.skip();
      return;
    }
    is_first = false;
    std::uint32_t dimensions = 0;
    json.array([&] {
      std::int64_t size = 0;
      json.integer(size);
      if (dimensions < std::size(entry.shape)) entry.shape[dimensions] = size;
      ++dimensions;
    });
    entry.dimensions = dimensions <= std::size(entry.shape) ? dimensions : ~0u;
  });
}

void read_first(JsonReader& json, std::string& first, std::string* second = nullptr) {
  std::size_t count = 0;
  json.array([&] {
    if (count == 0) {
      json.string(first);
    } else if (count == 1 && second != nullptr) {
      json.string(*second);
    } else {
      json.skip();
    }
    ++count;
  });
}

// "gloo:all_reduce", "nccl:send 0->1".
void split(const std::string& name, TraceEntry& entry) {
  const std::size_t colon = name.find(':');
  if (colon != name.npos) entry.backend = name.substr(0, colon);
  entry.operation = colon == name.npos ? name : name.substr(colon + 1);
}

TraceEntry read_entry(JsonReader& json) {
  TraceEntry entry;
  std::string text;
  json.object([&](std::string_view key) {
    if (key == "pg_id") {
      entry.group_id = number(json);
    } else if (key == "process_group") {
      read_first(json, entry.group, &entry.description);
    } else if (key == "collective_seq_id") {
      entry.number = number(json);
    } else if (key == "p2p_seq_id") {
      entry.messages = number(json);
    } else if (key == "op_id") {
      entry.count = number(json);
    } else if (key == "profiling_name") {
      if (json.string(text)) split(text, entry);
    } else if (key == "input_sizes") {
      read_shape(json, entry);
    } else if (key == "input_dtypes") {
      read_first(json, entry.dtype);
    } else if (key == "time_created_ns") {
      entry.created_ns = number(json);
    } else if (key == "time_discovered_completed_ns") {
      if (!json.starts_with('n')) {
        entry.completed_ns = number(json);
      } else {
        json.skip();
      }
    } else if (key == "is_p2p") {
      json.boolean(entry.is_message);
    } else if (key == "retired") {
      bool is_retired = false;
      json.boolean(is_retired);
      entry.is_done = entry.is_done || is_retired;
    } else if (key == "state") {
      json.string(text);
      entry.is_completed = text == "completed";
      entry.is_done = entry.is_done || entry.is_completed;
    } else {
      json.skip();
    }
  });
  return entry;
}

}  // namespace

bool parse_trace(std::string_view text, Trace& trace) {
  trace = {};
  JsonReader json(text);
  bool has_version = false;
  json.object([&](std::string_view key) {
    if (key == "version") {
      std::string version;
      has_version = json.string(version) && version.starts_with("2.");
    } else if (key == "pg_status") {
      read_statuses(json, trace);
    } else if (key == "entries") {
      json.array([&] {
        TraceEntry entry = read_entry(json);
        if (trace.entries.size() < kMostEntries) trace.entries.push_back(std::move(entry));
      });
    } else {
      json.skip();
    }
  });
  if (json.is_at_end() && has_version) return true;
  trace = {};
  return false;
}

void as_others_count(Trace& of_hooks) {
  for (TraceStatus& status : of_hooks.statuses) {
    ++status.enqueued;
    ++status.completed;
  }
  for (TraceEntry& entry : of_hooks.entries) {
    const std::int64_t recorded = entry.number + entry.messages;
    entry.skipped = entry.count + 1 - recorded;
    entry.count = recorded;
    entry.is_done = entry.is_completed;
  }
}

}  // namespace rallypoint
