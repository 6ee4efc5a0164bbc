#include "engine/foreign_page.h"

#include <algorithm>
#include <cstring>

#include "engine/waiting.h"

namespace rallypoint {
namespace {

constexpr std::uint64_t kStates = 3;

std::uint64_t word(std::uint64_t number_plus_one, CallState state) {
  return number_plus_one << 2 | static_cast<std::uint64_t>(state);
}

template <std::size_t kSize>
void put(char (&to)[kSize], std::string_view text) {
  std::memset(to, 0, kSize);
  text.copy(to, kSize - 1);
}

}  // namespace

void write(ForeignPage& page, const CallOfBackend& call) {
  ForeignCall& entry = page.calls[call.number % kForeignCalls];
  const std::uint64_t word_now =
      word(call.number + 1, call.is_done ? CallState::done : CallState::running);
  const std::uint64_t had = entry.word.load(std::memory_order_relaxed);
  if (had == word_now || had >> 2 > word_now >> 2) return;
  if (had >> 2 != word_now >> 2) {
    entry.word.store(kChanging, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.since_ns = call.since_ns;
    entry.count_of_backend = call.count_of_backend;
    put(entry.operation, call.operation);
    put(entry.dtype, call.dtype);
    entry.dimensions = call.dimensions;
    if (call.dimensions <= std::size(entry.shape)) {
      std::copy_n(call.shape, call.dimensions, entry.shape);
    } else {
      entry.dimensions = ~0u;
    }
  }
  entry.ended_ns = call.ended_ns;
  entry.word.store(word_now, std::memory_order_release);
}

int begin_transfer(ForeignPage& page, bool sends, std::uint32_t peer, std::int32_t tag,
                   std::uint64_t count, std::string_view dtype) {
  const std::uint64_t number = page.transfers_begun.fetch_add(1, std::memory_order_relaxed);
  for (unsigned i = 0; i < kForeignTransfers; ++i) {
    const auto which = static_cast<unsigned>((number + i) % kForeignTransfers);
    ForeignTransfer& entry = page.transfers[which];
    std::uint64_t seen = entry.word.load(std::memory_order_relaxed);
    if ((seen & kStates) == static_cast<std::uint64_t>(CallState::running)) continue;
    if (!entry.word.compare_exchange_strong(seen, kChanging, std::memory_order_relaxed)) continue;
    std::atomic_thread_fence(std::memory_order_release);
    entry.since_ns = now_ns();
    entry.count = count;
    entry.peer = peer;
    entry.tag = tag;
    entry.sends = sends;
    put(entry.dtype, dtype);
    entry.word.store(word(number + 1, CallState::running), std::memory_order_release);
    return static_cast<int>(which);
  }
  return -1;
}

void end_transfer(ForeignPage& page, unsigned which, CallState how) {
  if (which >= kForeignTransfers) return;
  ForeignTransfer& entry = page.transfers[which];
  const std::uint64_t number_plus_one = entry.word.load(std::memory_order_relaxed) >> 2;
  entry.word.store(word(number_plus_one, how), std::memory_order_release);
}

void add_wait(ForeignPage& page, std::uint64_t waited_ns) {
  page.waits().ns.fetch_add(waited_ns, std::memory_order_relaxed);
  page.waits().squared.fetch_add(squared_wait(waited_ns), std::memory_order_relaxed);
}

void extend_sampled_wait(ForeignPage& page, std::uint64_t waited_ns, std::uint64_t by_ns) {
  const std::uint64_t squared = squared_wait(waited_ns + by_ns) - squared_wait(waited_ns);
  page.sampled_waits().ns.fetch_add(by_ns, std::memory_order_relaxed);
  page.sampled_waits().squared.fetch_add(squared, std::memory_order_relaxed);
}

void withdraw_transfer(ForeignPage& page, unsigned which) {
  page.transfers_begun.fetch_sub(1, std::memory_order_relaxed);
  end_transfer(page, which, CallState::done);
}

}  // namespace rallypoint
