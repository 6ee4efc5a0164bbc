// Groups of other backends, as Python registers them and their sends and receives.

#include "python/foreign.h"

#include <nanobind/stl/string.h>

#include <string_view>
#include <vector>

#include "engine/foreign_page.h"
#include "engine/process.h"
#include "scribe/scribe.h"
#include "scribe/trace.h"

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

// Only accessed with the GIL held. The pages belong to this process, not to its forked children.
struct Pages {
  unsigned generation = rallypoint::generation();
  std::vector<ForeignPage*> all;

  ForeignPage* find(std::size_t number) const {
    const bool is_ours = generation == rallypoint::generation() && number < all.size();
    return is_ours ? all[number] : nullptr;
  }
};

Pages& pages() {
  static auto* const state = new Pages;
  return *state;
}

int open_foreign_group(const std::string& description) {
  Pages& known = pages();
  if (known.generation != generation()) return -1;
  ForeignPage* const page = open_foreign_page(description);
  if (page == nullptr) return -1;
  known.all.push_back(page);
  return static_cast<int>(known.all.size()) - 1;
}

bool record_foreign_calls(std::size_t group, const std::string& backend, const std::string& name,
                          int signal) {
  ForeignPage* const page = pages().find(group);
  if (page == nullptr || !watch_group(backend, name, *page)) return false;
  start_scribe(signal);
  return true;
}

int begin_foreign_transfer(std::size_t group, bool sends, std::int64_t peer, std::int32_t tag,
                           std::uint64_t count, const char* dtype) {
  ForeignPage* const page = pages().find(group);
  return page == nullptr
             ? -1
             : begin_transfer(*page, sends, static_cast<std::uint32_t>(peer), tag, count, dtype);
}

void end_foreign_transfer(std::size_t group, unsigned which, bool has_failed) {
  ForeignPage* const page = pages().find(group);
  const CallState how = has_failed ? CallState::failed : CallState::done;
  if (page != nullptr) end_transfer(*page, which, how);
}

void withdraw_foreign_transfer(std::size_t group, unsigned which) {
  ForeignPage* const page = pages().find(group);
  if (page != nullptr) withdraw_transfer(*page, which);
}

void add_foreign_wait(std::size_t group, std::uint64_t waited_ns) {
  ForeignPage* const page = pages().find(group);
  if (page != nullptr) add_wait(*page, waited_ns);
}

void leave_foreign_group(std::size_t group) {
  ForeignPage* const page = pages().find(group);
  if (page != nullptr) page->presence = GroupPresence::foreign_left;
}

// Decodes any bytes.
nb::object readable(std::string_view text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "replace"));
}

// For tests: (group id, enqueued, completed) of each group, and the entries' fields; or None.
nb::object read_trace(nb::bytes json, bool is_of_hooks) {
  Trace trace;
  if (!parse_trace({json.c_str(), json.size()}, trace)) return nb::none();
  if (is_of_hooks) as_others_count(trace);
  nb::list statuses;
  for (const TraceStatus& status : trace.statuses) {
    statuses.append(nb::make_tuple(status.group_id, status.enqueued, status.completed));
  }
  nb::list entries;
  for (const TraceEntry& entry : trace.entries) {
    nb::list shape;
    for (std::uint32_t i = 0; entry.dimensions <= 8 && i < entry.dimensions; ++i) {
      shape.append(entry.shape[i]);
    }
    entries.append(nb::make_tuple(
        entry.group_id, readable(entry.group), readable(entry.description), entry.number,
        entry.count, readable(entry.backend), readable(entry.operation), readable(entry.dtype),
        shape, entry.created_ns, entry.is_message, entry.is_done));
  }
  return nb::make_tuple(statuses, entries);
}

}  // namespace

void bind_foreign(nb::module_& module) {
  module.def("open_foreign_group", &open_foreign_group);
  module.def("record_foreign_calls", &record_foreign_calls);
  module.def("leave_foreign_group", &leave_foreign_group);
  module.def("begin_foreign_transfer", &begin_foreign_transfer);
  module.def("end_foreign_transfer", &end_foreign_transfer);
  module.def("withdraw_foreign_transfer", &withdraw_foreign_transfer);
  module.def("add_foreign_wait", &add_foreign_wait);
  module.def("read_trace", &read_trace);
}

}  // namespace rallypoint::python
