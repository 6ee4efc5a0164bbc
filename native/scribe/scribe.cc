#include "scribe/scribe.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/process.h"
#include "engine/waiting.h"
#include "scribe/group_watch.h"
#include "scribe/trace.h"

namespace rallypoint {
namespace {

// A recorder's text, with or without the calls; null: there is none.
using DumpTrace = std::function<std::string(bool includes_calls)>;
// The name of a backend, and that of a group.
using Pages = std::map<std::pair<std::string, std::string>, ForeignPage*>;

constexpr timespec kPause{0, 100'000'000};
constexpr timespec kPauseWhileWatched{0, 20'000'000};
constexpr std::uint64_t kLongNs = 2'000'000'000;   // a call, or a pause, that long is examined
constexpr std::uint64_t kApartNs = 1'000'000'000;  // between searches for groups that are not found
constexpr unsigned kMostSearches = 3;
constexpr auto kLastDump = std::chrono::seconds(1);

constexpr const char* kCpu = "libtorch_cpu.so";
constexpr const char* kCuda = "libtorch_cuda.so";
// Of c10d: std::string (bool includes_collectives, bool only_active), and from PyTorch 2.15 on also
// for any backend: std::string (bool, bool, const std::string& backend).
constexpr const char* kDumpGloo = "_ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb";
constexpr const char* kDumpNccl = "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb";
constexpr const char* kDumpAny =
    "_ZN4c10d18dump_fr_trace_jsonEbbRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";

// A std::string as libstdc++ has it in memory, PyTorch's C++ library. This code may be built with
// another one, whose strings have another form (libc++ in scripts/wheel).
struct TorchString {
  const char* data;
  std::size_t bytes;
  union {
    char local[16];  // of a short text
    std::size_t capacity;
  };
};

// One that a function of PyTorch returns.
class ReturnedString : TorchString {
 public:
  ReturnedString(const ReturnedString&) = delete;
  ~ReturnedString() {
    if (data != local) std::free(const_cast<char*>(data));  // operator new has it from malloc
  }
  std::string text() const { return {data, bytes}; }
};

// Null if the library is not loaded, or lacks it.
template <typename... Arguments>
auto find(const char* library, const char* symbol) {
  using Function = ReturnedString (*)(Arguments...);
  void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return loaded == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(loaded, symbol));
}

bool records_itself(const std::string& backend) { return backend == "gloo" || backend == "nccl"; }

DumpTrace recorder_of(const std::string& backend) {
  if (backend != "nccl") {
    if (const auto dump = find<bool, bool, const TorchString&>(kCpu, kDumpAny)) {
      return [=](bool includes_calls) {
        const TorchString name{backend.data(), backend.size(), {.capacity = backend.size()}};
        return dump(includes_calls, false, name).text();
      };
    }
  }
  if (records_itself(backend)) {
    const bool is_gloo = backend == "gloo";
    const auto dump = find<bool, bool>(is_gloo ? kCpu : kCuda, is_gloo ? kDumpGloo : kDumpNccl);
    if (dump != nullptr) {
      return [=](bool includes_calls) { return dump(includes_calls, false).text(); };
    }
  }
  return nullptr;
}

std::uint64_t wall_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

// From the wall clock to the monotonic one. As long as nobody sets the clock, the same difference
// is used for all calls, so that their order and the time between them do not depend on who read
// them.
class MonotonicTime {
 public:
  void look() {
    std::uint64_t difference_ns = 0, took_ns = ~0ull;
    for (int i = 0; i < kTries && took_ns > kPreciseNs; ++i) {  // it may be preempted in between
      const std::uint64_t before_ns = now_ns();
      difference_ns = wall_ns() - before_ns;
      took_ns = now_ns() - before_ns;
    }
    const auto moved_ns = static_cast<std::int64_t>(difference_ns - difference_ns_);
    if (std::abs(moved_ns) > kClockSetNs) difference_ns_ = difference_ns;
  }

  std::uint64_t at(std::int64_t wall_ns) const {
    return wall_ns <= 0 ? 0 : static_cast<std::uint64_t>(wall_ns) - difference_ns_;
  }

 private:
  static constexpr int kTries = 5;
  static constexpr std::uint64_t kPreciseNs = 10'000;
  static constexpr std::int64_t kClockSetNs = 1'000'000;

  std::uint64_t difference_ns_ = 0;
};

struct Progress {
  ForeignPage* page = nullptr;  // null: its group is unknown, or nobody watches it
  bool is_known = false;
  unsigned searches = 0;
  std::int64_t enqueued = -1;
  std::int64_t completed = -1;
  std::int64_t written = -1;  // what had been begun when the calls were last written
  std::uint64_t since_ns = 0;
  std::int64_t skipped = 0;   // of what was counted: in no entry
  std::int64_t together = 0;  // calls that may have been in progress at once, since none was
};

// The recorder of a backend, and what has been seen in it.
class Source {
 public:
  Source(std::string backend, DumpTrace dump)
      : backend_(std::move(backend)), dump_(std::move(dump)) {}

  const std::string& backend() const { return backend_; }
  bool is_in_progress() const { return is_in_progress_; }  // a call, of any watched group
  std::int64_t completed() const { return completed_; }    // of all watched groups
  void look(const Pages& pages, bool is_asked);

 private:
  bool read(bool includes_calls, Trace& trace);
  void fold(const Pages& pages);

  std::string backend_;
  DumpTrace dump_;
  std::map<std::int64_t, Progress> groups_;  // by the recorder's number
  MonotonicTime clock_;
  std::uint64_t folded_ns_ = 0;
  bool is_in_progress_ = false;
  std::int64_t completed_ = 0;
};

bool Source::read(bool includes_calls, Trace& trace) {
  if (dump_ == nullptr) return false;
  try {
    if (parse_trace(dump_(includes_calls), trace)) {
      if (!records_itself(backend_)) as_others_count(trace);
      return true;
    }
  } catch (...) {  // it is not the expected function
  }
  dump_ = nullptr;
  return false;
}

void Source::look(const Pages& pages, bool is_asked) {
  Trace trace;
  if (!read(false, trace)) return;
  const std::uint64_t now_ns = coarse_now_ns();
  bool is_wanted = is_asked;
  for (const TraceStatus& status : trace.statuses) {
    Progress& progress = groups_[status.group_id];
    const bool is_sought = !progress.is_known && progress.searches < kMostSearches;
    if (is_sought && now_ns - folded_ns_ > kApartNs) is_wanted = true;
    const bool was_idle = progress.enqueued <= progress.completed;
    if (progress.completed != status.completed ||
        (was_idle && progress.enqueued != status.enqueued)) {
      progress.since_ns = now_ns;
    }
    const std::int64_t running = status.enqueued - status.completed;
    const std::int64_t new_ones = status.enqueued - progress.enqueued;
    progress.together = running <= 0 ? 0 : std::max({progress.together, running, new_ones});
    progress.enqueued = status.enqueued;
    progress.completed = status.completed;
    const bool is_quiet = now_ns - progress.since_ns > kLongNs;
    if (is_quiet && progress.written != status.enqueued) is_wanted = true;
  }
  if (is_wanted) fold(pages);
  is_in_progress_ = false;
  completed_ = 0;
  for (const TraceStatus& status : trace.statuses) {
    Progress& progress = groups_[status.group_id];
    if (is_wanted) {
      progress.written = status.enqueued;
      ++progress.searches;
    }
    if (progress.page == nullptr) continue;
    // gloo completes two calls at a time. If the first one is done last, its count stays too low by
    // one, so after two or more at once the last one cannot be told from none.
    const std::int64_t running = status.enqueued - status.completed;
    if (running > (progress.together > 1 ? 1 : 0)) is_in_progress_ = true;
    completed_ += status.completed;
    const auto count = [&](std::int64_t counted) {
      return static_cast<std::uint64_t>(std::max<std::int64_t>(0, counted - progress.skipped));
    };
    const std::uint64_t enqueued = count(status.enqueued);
    if (progress.page->enqueued != enqueued) progress.page->changed_ns = now_ns;
    progress.page->enqueued = enqueued;
    progress.page->completed = count(status.completed);
    progress.page->looked_ns = now_ns;
  }
}

void Source::fold(const Pages& pages) {
  Trace trace;
  if (!read(true, trace)) return;
  folded_ns_ = coarse_now_ns();
  clock_.look();
  std::map<std::int64_t, std::int64_t> last;    // number of each group's last call
  std::map<std::string, std::int64_t> current;  // a name may have belonged to another group before
  for (const TraceEntry& entry : trace.entries) {
    last[entry.group_id] = std::max(last[entry.group_id], entry.number);
    const auto [found, is_new] = current.try_emplace(entry.group, entry.group_id);
    found->second = std::max(found->second, entry.group_id);
  }
  for (const TraceEntry& entry : trace.entries) {
    Progress& progress = groups_[entry.group_id];
    progress.skipped = entry.skipped;
    if (std::exchange(progress.is_known, true)) continue;
    const auto found = pages.find({backend_, entry.group});
    const bool is_watched = found != pages.end() && current[entry.group] == entry.group_id;
    progress.page = is_watched ? found->second : nullptr;
  }
  for (const TraceEntry& entry : trace.entries) {
    ForeignPage* const page = groups_[entry.group_id].page;
    const bool is_late = entry.number + kForeignCalls <= last[entry.group_id];
    if (page == nullptr || entry.is_message || entry.number < 1 || is_late) continue;
    write(*page, {.number = static_cast<std::uint64_t>(entry.number) - 1,
                  .count_of_backend = static_cast<std::uint64_t>(entry.count),
                  .is_done = entry.is_done,
                  .since_ns = clock_.at(entry.created_ns),
                  .ended_ns = clock_.at(entry.completed_ns),
                  .operation = entry.operation,
                  .dtype = entry.dtype,
                  .shape = entry.shape,
                  .dimensions = entry.dimensions});
  }
}

class Scribe {
 public:
  bool watch(const std::string& backend, const std::string& name, ForeignPage& page);
  void start(int signal);

 private:
  void run(int signal);
  void stop();
  void sample_waits();

  std::timed_mutex mutex_;
  Pages pages_;
  std::deque<GroupWatch> watches_;  // of all pages
  std::vector<Source> sources_;
  std::uint64_t sampled_ns_ = 0;
  std::uint64_t waited_ns_ = 0;  // so far, for what is in progress
  std::int64_t completed_ = 0;
  bool is_started_ = false;
  std::atomic<bool> is_stopped_ = false;
};

Scribe& scribe() {
  static constinit PerProcess<Scribe> state;
  return state.get();
}

bool Scribe::watch(const std::string& backend, const std::string& name, ForeignPage& page) {
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Source& source) { return source.backend() == backend; };
  if (std::ranges::none_of(sources_, is_it)) {
    DumpTrace dump = recorder_of(backend);
    if (dump == nullptr) return false;
    sources_.emplace_back(backend, std::move(dump));
  }
  pages_[{backend, name}] = &page;
  watches_.emplace_back(page);
  return true;
}

void Scribe::start(int signal) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_started_, true)) return;
  // What the recorder uses was created before, and is destroyed after this.
  std::atexit([] { scribe().stop(); });
  start_thread([this, signal] { run(signal); });
}

void Scribe::stop() {
  const std::unique_lock lock(mutex_, kLastDump);
  is_stopped_ = true;
}

// DDP waits for its collectives in C++, where nobody counts. So the time since the last look counts
// as a wait if one of gloo's calls is in progress now. Other backends tell the end of a call late
// or never.
void Scribe::sample_waits() {
  const std::uint64_t now_ns = coarse_now_ns();
  const std::uint64_t before_ns = std::exchange(sampled_ns_, now_ns);
  const auto gloo = std::ranges::find(sources_, "gloo", &Source::backend);
  if (gloo == sources_.end() || before_ns == 0) return;
  const bool goes_on = std::exchange(completed_, gloo->completed()) == completed_;
  if (!goes_on || !gloo->is_in_progress()) waited_ns_ = 0;
  if (!gloo->is_in_progress()) return;
  ForeignPage* first = nullptr;  // Python's waits are counted there, too
  for (const auto& [names, page] : pages_) {
    const bool is_open = page->presence.load(std::memory_order_relaxed) == GroupPresence::foreign;
    if (is_open && (first == nullptr || page < first)) first = page;
  }
  if (first != nullptr) extend_sampled_wait(*first, waited_ns_, now_ns - before_ns);
  waited_ns_ += now_ns - before_ns;
}

void Scribe::run(int signal) {
  pthread_setname_np(pthread_self(), "rally-scribe");
  if (signal > 0) {
    sigset_t taken;
    sigemptyset(&taken);
    sigaddset(&taken, signal);
    pthread_sigmask(SIG_UNBLOCK, &taken, nullptr);
  }
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (is_stopped_) return;
      const bool is_asked = is_asked_for_more();
      for (Source& source : sources_) source.look(pages_, is_asked);
      if (is_asked) answer_question();
      for (GroupWatch& watch : watches_) watch.look();
      sample_waits();
    }
    nanosleep(is_watched() ? &kPauseWhileWatched : &kPause, nullptr);
  }
}

}  // namespace

bool watch_group(const std::string& backend, const std::string& name, ForeignPage& page) {
  return scribe().watch(backend, name, page);
}

void start_scribe(int signal) { scribe().start(signal); }

}  // namespace rallypoint
