#include "engine/stash.h"

#include <algorithm>
#include <new>
#include <utility>

namespace rallypoint {

std::size_t Stash::take_in() {
  std::size_t count = 0;
  for (std::uint32_t source = 0; source < region_.ranks(); ++source) {
    // Large messages, which take memory, and those whose senders wait, only if that does not help.
    if (boxes_.is_crowded(source)) count += take_in_from(source, false);
    if (boxes_.is_crowded(source)) count += take_in_from(source, true);
  }
  return count;
}

std::size_t Stash::take_in_from(std::uint32_t source, bool costly) {
  std::size_t count = 0;
  for (int slot = 0; slot < static_cast<int>(kEnvelopes); ++slot) {
    Envelope& from = boxes_.envelope(source, slot);
    if (boxes_.sequence_for(region_.rank(), source, slot) == 0 ||
        from.request.load(std::memory_order_relaxed) != Request::none ||
        (is_large(from.bytes) || from.is_synchronous) != costly) {
      continue;
    }
    std::unique_ptr<std::byte[]> data(new (std::nothrow) std::byte[from.bytes]);
    if (data == nullptr) break;
    StashedMessage& stashed = messages_.emplace_back();
    stashed.data = std::move(data);
    stashed.sequence = from.sequence;
    stashed.transfer = {.peer = source,
                        .tag = from.tag,
                        .dtype = from.type(),
                        .data = stashed.data.get(),
                        .bytes = from.bytes};
    stashed.item.transfer = &stashed.transfer;
    stashed.item.number = from.number;
    stashed.item.slot = slot;
    from.request.store(Request::matched, std::memory_order_release);
    ++count;
  }
  return count;
}

StashedMessage* Stash::find(std::uint32_t source, std::int32_t tag) {
  StashedMessage* found = nullptr;
  for (StashedMessage& each : messages_) {
    if (each.is_wanted || each.transfer.peer != source || each.transfer.tag != tag) continue;
    if (found == nullptr || each.sequence < found->sequence) found = &each;
  }
  return found;
}

std::optional<std::int32_t> Stash::unwanted_tag(std::uint32_t source) const {
  for (const StashedMessage& each : messages_) {
    if (!each.is_wanted && each.transfer.peer == source) return each.transfer.tag;
  }
  return std::nullopt;
}

void Stash::drop(const StashedMessage& message) {
  messages_.remove_if([&](const StashedMessage& each) { return &each == &message; });
}

std::size_t Stash::clear() {
  const auto partial = std::count_if(messages_.begin(), messages_.end(),
                                     [](const StashedMessage& each) { return !each.is_whole; });
  messages_.clear();
  return static_cast<std::size_t>(partial);
}

}  // namespace rallypoint
