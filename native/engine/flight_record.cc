#include "engine/flight_record.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "engine/foreign_page.h"
#include "engine/process.h"

namespace rallypoint {
namespace {

constexpr std::size_t kBytes = kRecordPages * kRecordPage;
constexpr std::string_view kNoNames = "{}";

// The header of this process's record, in which each call checks whether it is traced.
constinit std::atomic<RecordHeader*> kept{nullptr};

struct Record {
  std::mutex mutex;
  RecordHeader* header = nullptr;  // null also in a forked child: the record is its parent's
  bool holds_life_word = false;
  std::deque<GroupPage*> left;  // of groups that are gone, the oldest first

  GroupPage* page(unsigned number) const {
    return reinterpret_cast<GroupPage*>(header + 1) + number;
  }
  // The first of so many unused pages in a row, emptied; null if there are none. `groups` does not
  // count them yet.
  GroupPage* take(unsigned pages) const;
};

Record& record() {
  static constinit PerProcess<Record> state;
  return state.get();
}

template <std::size_t kSize>
void put(char (&to)[kSize], std::string_view text) {
  std::memset(to, 0, kSize);
  text.copy(to, kSize - 1);
}

// The memory is for one process; the record of another process is replaced if that process is gone.
bool claim(RecordHeader& header) {
  std::int32_t owner = 0;
  const auto own = static_cast<std::int32_t>(getpid());
  while (!header.pid.compare_exchange_strong(owner, own)) {
    if (owner != 0 && (owner == own || kill(owner, 0) == 0 || errno != ESRCH)) return false;
  }
  return true;
}

std::uint64_t word(std::uint64_t number_plus_one, CallState state) {
  return number_plus_one << 2 | static_cast<std::uint64_t>(state);
}

bool is_traced() {
  const RecordHeader* const header = kept.load(std::memory_order_relaxed);
  return header != nullptr && header->trace_until.load(std::memory_order_relaxed) != 0;
}

GroupPage* Record::take(unsigned pages) const {
  if (header == nullptr) return nullptr;
  const std::uint32_t used = header->groups.load(std::memory_order_relaxed);
  const bool is_of_trace = used + pages >= kTracePage;
  if (used + pages > kRecordPages - 1 || (is_of_trace && is_traced())) {
    header->unrecorded.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  if (is_of_trace) std::memset(static_cast<void*>(page(used)), 0, pages * kRecordPage);
  return page(used);
}

// Traces a call that ends, before its entry may be reused.
void trace(const RecordedCall& call, std::uint64_t word) {
  RecordHeader& header = *kept.load(std::memory_order_relaxed);
  if (call.ended_ns > header.trace_until.load(std::memory_order_relaxed)) {
    header.trace_until.store(0, std::memory_order_relaxed);  // the tracing program is gone
    return;
  }
  if (header.groups.load(std::memory_order_relaxed) >= kTracePage) return;
  char* const pages = reinterpret_cast<char*>(&header);
  const std::uint64_t before = header.traced.fetch_add(1, std::memory_order_relaxed);
  TracedCall& entry =
      reinterpret_cast<TracedCall*>(pages + kTracePage * kRecordPage)[before % kTracedCalls];
  entry.stamp.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.word = word;
  entry.since_ns = call.since_ns;
  entry.what = call.what;
  entry.count = call.count;
  entry.ended_ns = call.ended_ns;
  entry.peer = call.peer;
  entry.page = static_cast<std::uint32_t>((reinterpret_cast<const char*>(&call) - pages) /
                                          static_cast<std::ptrdiff_t>(kRecordPage));
  entry.stamp.store(before + 1, std::memory_order_release);
}

}  // namespace

bool open_flight_record(int fd, std::uint64_t offset, std::string_view names) {
  Record& state = record();
  const std::lock_guard lock(state.mutex);
  struct stat status{};
  if (state.header != nullptr && std::string_view(state.header->names) == kNoNames) {
    put(state.header->names, names);
    return true;
  }
  if (state.header != nullptr || offset % kRecordPage != 0 || fstat(fd, &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) < offset + kBytes) {
    return false;
  }
  void* const at =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (at == MAP_FAILED) return false;
  auto* const header = static_cast<RecordHeader*>(at);
  if (!claim(*header)) {
    munmap(at, kBytes);
    return false;
  }
  header->magic.store(0, std::memory_order_relaxed);
  if (header->groups.exchange(0) != 0) {  // from a program that ran here before
    // Refused where the system's pages are larger than ours, which then do not begin at one.
    if (madvise(header + 1, kBytes - kRecordPage, MADV_REMOVE) != 0) {
      std::memset(static_cast<void*>(header + 1), 0, kBytes - kRecordPage);
    }
  }
  header->version = kRecordVersion;
  header->traced.store(0, std::memory_order_relaxed);
  header->trace_until.store(0, std::memory_order_relaxed);
  header->trace_version = kTraceVersion;
  put(header->names, names);
  header->magic.store(kRecordMagic, std::memory_order_release);
  state.header = header;
  kept.store(header, std::memory_order_relaxed);
  return true;
}

void CallSite::write(std::uint64_t number_plus_one, std::string_view site) {
  constexpr std::size_t kBytesOfText = sizeof text;
  std::uint64_t words[std::size(decltype(text){})] = {};
  // Text that is too long is truncated at the front: the end of a path says more.
  const std::size_t most = kBytesOfText - 1;
  if (site.size() > most) site.remove_prefix(site.size() - most);
  std::memcpy(words, site.data(), site.size());
  number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < std::size(words); ++i) text[i] = words[i];
  number.store(number_plus_one, std::memory_order_release);
}

// Takes a page that was never used; if enough groups are gone, or there is none, that of the group
// that has been gone for longest. Readers take time for each page, and groups may be formed again
// whenever a rank is lost. While calls are traced, pages keep their groups.
GroupRecord::GroupRecord(std::string_view description) : page_(nullptr) {
  Record& state = record();
  const std::lock_guard lock(state.mutex);
  if (state.header == nullptr) return;
  if (!std::exchange(state.holds_life_word, true)) hold_life_word(state.header->life_word);
  const std::uint32_t used = state.header->groups.load(std::memory_order_relaxed);
  const bool is_of_trace = used + 1 >= kTracePage;
  const bool has_unused = used < kRecordPages - 1 && !(is_of_trace && is_traced());
  const bool reuses =
      !state.left.empty() && !is_traced() && (state.left.size() > kKeptPages || !has_unused);
  if (!reuses && !has_unused) {
    state.header->unrecorded.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (reuses) {
    page_ = state.left.front();
    state.left.pop_front();
    page_->presence.store(GroupPresence::none);
    std::atomic_thread_fence(std::memory_order_release);
  } else {
    page_ = state.page(used);
  }
  if (reuses || is_of_trace) {  // there, calls may have been traced
    std::memset(static_cast<void*>(page_->description), 0,
                kRecordPage - offsetof(GroupPage, description));
  }
  page_->queued.store(0, std::memory_order_relaxed);
  page_->counts_version = kCountsVersion;
  put(page_->description, description);
  page_->presence.store(GroupPresence::here, std::memory_order_release);
  if (!reuses) state.header->groups.store(used + 1, std::memory_order_release);
}

GroupRecord::~GroupRecord() {
  Record& state = record();
  const std::lock_guard lock(state.mutex);
  if (page_ == nullptr || state.header == nullptr) return;
  leave();
  state.left.push_back(page_);
}

ForeignPage* open_foreign_page(std::string_view description) {
  Record& state = record();
  const std::lock_guard lock(state.mutex);
  auto* const page = reinterpret_cast<ForeignPage*>(state.take(2));
  if (page == nullptr) return nullptr;
  put(page->description, description);
  page->counts_version = kCountsVersion;
  page->presence.store(GroupPresence::foreign, std::memory_order_release);
  state.header->groups.fetch_add(2, std::memory_order_release);
  return page;
}

std::byte* open_steps_page() {
  Record& state = record();
  const std::lock_guard lock(state.mutex);
  GroupPage* const page = state.take(1);
  if (page == nullptr) return nullptr;
  page->presence.store(GroupPresence::steps, std::memory_order_release);
  state.header->groups.fetch_add(1, std::memory_order_release);
  return reinterpret_cast<std::byte*>(page);
}

bool is_asked_for_more() {
  const RecordHeader* const header = record().header;
  return header != nullptr && header->asked.load(std::memory_order_acquire) !=
                                  header->answered.load(std::memory_order_relaxed);
}

bool is_watched() {
  const RecordHeader* const header = record().header;
  return header != nullptr &&
         coarse_now_ns() / 1'000'000'000 < header->watched_until.load(std::memory_order_relaxed);
}

void answer_question() {
  RecordHeader* const header = record().header;
  if (header == nullptr) return;
  header->answered.store(header->asked.load(std::memory_order_acquire), std::memory_order_release);
}

void GroupRecord::leave() {
  if (page_ != nullptr) page_->presence.store(GroupPresence::left, std::memory_order_release);
}

std::uint64_t GroupRecord::running() const {
  // Finds the last call begun, wherever it is: threads that do not run it ask for it.
  std::uint64_t last = 0;
  for (const RecordedCall& call : page_->calls) {
    last = std::max(last, call.word.load(std::memory_order_acquire));
  }
  return (last & 3) == static_cast<std::uint64_t>(CallState::running) ? last >> 2 : 0;
}

void GroupRecord::write(RecordedCall& call, std::uint64_t number_plus_one, std::uint64_t what,
                        std::uint64_t count, std::uint32_t peer) {
  call.word.store(kChanging, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  call.since_ns = is_traced() ? now_ns() : coarse_now_ns();
  call.what = what;
  call.count = count;
  call.peer = peer;
  call.word.store(word(number_plus_one, CallState::running), std::memory_order_release);
}

void GroupRecord::finish(RecordedCall& call, std::uint64_t number_plus_one, Trouble trouble) {
  const CallState state = trouble == Trouble::none ? CallState::done : CallState::failed;
  const std::uint64_t ended = word(number_plus_one, state);
  if (trouble != Trouble::none) {
    call.trouble = static_cast<std::uint32_t>(trouble);
    call.ended_ns = coarse_now_ns();
  }
  if (is_traced()) {
    call.ended_ns = now_ns();
    trace(call, ended);
  }
  call.word.store(ended, std::memory_order_release);
}

void GroupRecord::add_wait(std::uint64_t waited_ns) {
  waited_ns_ += waited_ns;
  current_->counts[1].store(waited_ns_, std::memory_order_relaxed);
  page_->waited_squared().fetch_add(squared_wait(waited_ns), std::memory_order_relaxed);
}

void GroupRecord::has_waited(std::uint64_t waited_ns) {
  if (page_ == nullptr || waited_ns == 0) return;
  page_->transfers_waited_ns().fetch_add(waited_ns, std::memory_order_relaxed);
  page_->waited_squared().fetch_add(squared_wait(waited_ns), std::memory_order_relaxed);
}

RecordedTransfer GroupRecord::post(std::uint64_t what, std::uint64_t count, std::uint64_t bytes,
                                   std::uint32_t peer) {
  if (page_ == nullptr) return {};
  page_->transferred_bytes().fetch_add(bytes, std::memory_order_relaxed);
  const std::uint64_t number = transfers_.fetch_add(1, std::memory_order_relaxed);
  for (unsigned i = 0; i < kRecordedTransfers; ++i) {
    RecordedCall& call = page_->transfers[(number + i) % kRecordedTransfers];
    std::uint64_t seen = call.word.load(std::memory_order_relaxed);
    if ((seen & 3) == static_cast<std::uint64_t>(CallState::running)) continue;
    if (!call.word.compare_exchange_strong(seen, kChanging, std::memory_order_relaxed)) continue;
    write(call, number + 1, what, count, peer);
    return {&call, number + 1};
  }
  return {};
}

RecordedTransfer GroupRecord::take_place(std::uint64_t what, std::uint64_t count,
                                         std::uint32_t peer) {
  if (page_ == nullptr) return {};
  const std::uint64_t number = transfers_.fetch_add(1, std::memory_order_relaxed);
  for (unsigned i = 0; i < kRecordedTransfers; ++i) {
    if (awaited_[i].load() != 0) continue;
    RecordedCall& call = page_->transfers[i];
    std::uint64_t seen = call.word.load(std::memory_order_relaxed);
    if (seen == kChanging || !call.word.compare_exchange_strong(seen, kChanging)) continue;
    write(call, number + 1, what, count, peer);
    return {&call, number + 1};
  }
  return {};
}

void GroupRecord::leave_place(const RecordedTransfer& transfer) {
  std::uint64_t own = word(transfer.number_plus_one, CallState::running);
  transfer.call->word.compare_exchange_strong(own, 0);
}

void GroupRecord::finish(const RecordedTransfer& transfer, Trouble trouble) {
  std::uint64_t own = word(transfer.number_plus_one, CallState::running);
  if (!transfer.call->word.compare_exchange_strong(own, kChanging)) return;  // another's by now
  finish(*transfer.call, transfer.number_plus_one, trouble);
}

}  // namespace rallypoint
