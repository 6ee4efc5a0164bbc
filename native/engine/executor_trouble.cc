// What keeps a program from going on, for a rank that has waited in vain, and how all are told.

#include <unistd.h>

#include <utility>

#include "engine/executor.h"

namespace rallypoint {
namespace {

constexpr int kRecordLooks = 1000;
constexpr unsigned kRecordLookUs = 100;
constexpr double kCutOffS = 0.5;
constexpr double kAskS = 0.01;  // a late rank is not made later by questions

}  // namespace

// What the work itself has shown.
void Executor::tell(Host& host) {
  if (trouble_ == Trouble::aborted) return;  // all know
  if (trouble_ == Trouble::peer_lost || trouble_ == Trouble::unreadable) {
    fail(trouble_, channel_.rank_of(culprit_));
  } else {
    fail_against(trouble_, culprit_, host);
  }
}

// A peer that is gone may have sent its last message just before: believe it the second time.
Trouble Executor::look_for_trouble(Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  if (began_s_ == 0) began_s_ = now_s();
  for (std::uint32_t member = 0; member < program_->ranks; ++member) {
    if (is_blocked_by_mismatch(member)) return fail_against(Trouble::mismatch, member, host);
  }
  const bool was_gone = std::exchange(blocker_is_gone_, true);
  if (const int lost = region_.first_lost(); lost >= 0) {
    return was_gone ? fail(Trouble::peer_lost, static_cast<std::uint32_t>(lost)) : Trouble::none;
  }
  if (has_left(blocker_)) {
    return was_gone ? fail(Trouble::peer_left, blocker_) : Trouble::none;
  }
  if (is_cut_off(blocker_)) return fail(Trouble::peer_lost, blocker_);
  blocker_is_gone_ = false;
  if (now_s() - began_s_ > call_->timeout_s) return fail(Trouble::timeout, blocker_);
  if (host.is_interrupted()) return fail(Trouble::interrupted, region_.rank());
  return Trouble::none;
}

// Who left another host may have messages under way.
bool Executor::has_left(std::uint32_t rank) const {
  return region_.presence(rank) == Presence::left &&
         (!region_.is_far(rank) || wire_->has_ended(rank));
}

// Without a connection for messages, although its host says nothing.
bool Executor::is_cut_off(std::uint32_t rank) {
  if (!region_.is_far(rank) || !wire_->has_ended(rank)) {
    cut_off_s_ = 0;
  } else if (cut_off_s_ == 0) {
    cut_off_s_ = now_s();
  }
  return cut_off_s_ != 0 && now_s() - cut_off_s_ > kCutOffS;
}

bool Executor::is_blocked_by_mismatch(std::uint32_t member) const {
  if (channel_.rank_of(member) != blocker_) return false;
  if (region_.is_far(blocker_) && now_s() - began_s_ > kAskS) {
    region_.messenger()->ask(blocker_, channel_.calls);
  }
  const CallRecord& theirs = channel_.call(member, channel_.calls);
  const std::uint64_t number = channel_.calls + 1;
  if (theirs.number.load(std::memory_order_acquire) != number) return false;
  const std::uint64_t signature = theirs.signature.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return theirs.number.load(std::memory_order_relaxed) == number && signature != signature_;
}

void Executor::interrupt(bool has_mutex) {
  const CallRecord* own = has_mutex ? &channel_.call(channel_.self(), channel_.calls) : nullptr;
  if (own != nullptr && own->number.load(std::memory_order_relaxed) != channel_.calls + 1) {
    own = nullptr;  // it has not begun yet
  }
  region_.spread(Trouble::interrupted, static_cast<std::int32_t>(region_.rank()), nullptr, own);
}

Trouble Executor::fail(Trouble trouble, std::uint32_t rank) {
  region_.spread(trouble, static_cast<std::int32_t>(rank), nullptr,
                 &channel_.call(channel_.self(), channel_.calls), 0, 0, call_->timeout_s);
  return trouble;
}

// The culprit's message may have come before its record, which it writes when it waits or ends.
Trouble Executor::fail_against(Trouble trouble, std::uint32_t member, Host& host) {
  const CallRecord& theirs = channel_.call(member, channel_.calls);
  host.before_wait();
  const std::uint32_t rank = channel_.rank_of(member);
  if (region_.is_far(rank)) region_.messenger()->ask(rank, channel_.calls);
  for (int look = 0; look < kRecordLooks; ++look) {
    if (theirs.number.load(std::memory_order_acquire) == channel_.calls + 1) break;
    usleep(kRecordLookUs);
  }
  region_.spread(trouble, static_cast<std::int32_t>(channel_.rank_of(member)), &theirs,
                 &channel_.call(channel_.self(), channel_.calls), sent_, expected_);
  return trouble;
}

}  // namespace rallypoint
