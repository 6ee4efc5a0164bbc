// What prevents a program from proceeding, for a rank that has waited without success, and how all
// ranks are told.

#include "engine/trouble_observer.h"

#include <unistd.h>

#include <utility>

namespace rallypoint {
namespace {

constexpr int kRecordLooks = 1000;
constexpr unsigned kRecordLookUs = 100;
constexpr double kCutOffS = 0.5;
constexpr double kAskS = 0.01;  // so that questions do not delay a late rank further

}  // namespace

// Only ranks that have waited without success read it, so it need not be written first;
void TroubleObserver::record() {
  CallRecord& record = channel_.call(channel_.self(), channel_.calls);
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.signature.store(prepared_.signature, std::memory_order_relaxed);
  record.count = prepared_.cut.count;
  record.collective = prepared_.what.collective;
  record.reduce_op = static_cast<std::int32_t>(prepared_.what.op);
  record.dtype = static_cast<std::int32_t>(prepared_.what.dtype);
  record.root = prepared_.what.root;
  record.number.store(channel_.calls + 1, std::memory_order_release);
  if (Messenger* const messenger = region_.messenger()) messenger->answer(channel_.calls);
}

void TroubleObserver::begin(double timeout_s) {
  record();
  timeout_s_ = timeout_s;
  began_s_ = 0;
  cut_off_s_ = 0;
  blocker_is_gone_ = false;
}

Trouble TroubleObserver::tell(const Finding& finding, Host& host) {
  const Trouble trouble = finding.trouble;
  if (trouble == Trouble::aborted) return trouble;  // all ranks know
  if (trouble == Trouble::peer_lost || trouble == Trouble::unreadable) {
    return fail(trouble, channel_.rank_of(finding.culprit));
  }
  return fail_against(trouble, finding.culprit, host, finding);
}

// A peer that is gone may have sent its last message just before: trust the observation only the
// second time.
Trouble TroubleObserver::look(std::uint32_t blocker, Host& host) {
  if (region_.poisoned()) return Trouble::aborted;
  if (began_s_ == 0) began_s_ = now_s();
  for (std::uint32_t member = 0; member < prepared_.program->ranks; ++member) {
    if (is_blocked_by_mismatch(member, blocker)) {
      return fail_against(Trouble::mismatch, member, host);
    }
  }
  const bool was_gone = std::exchange(blocker_is_gone_, true);
  if (const int lost = region_.first_lost(); lost >= 0) {
    return was_gone ? fail(Trouble::peer_lost, static_cast<std::uint32_t>(lost)) : Trouble::none;
  }
  if (has_left(blocker)) {
    return was_gone ? fail(Trouble::peer_left, blocker) : Trouble::none;
  }
  if (is_cut_off(blocker)) return fail(Trouble::peer_lost, blocker);
  blocker_is_gone_ = false;
  if (now_s() - began_s_ > timeout_s_) return fail(Trouble::timeout, blocker);
  return Trouble::none;
}

// A rank that left on another host may have messages in transit.
bool TroubleObserver::has_left(std::uint32_t rank) const {
  return region_.presence(rank) == Presence::left &&
         (!region_.is_far(rank) || wire_->state(rank) != ConnectionState::open);
}

// Whether the rank has no connection for messages although its host reports nothing.
bool TroubleObserver::is_cut_off(std::uint32_t rank) {
  if (!region_.is_far(rank) || wire_->state(rank) != ConnectionState::ended) {
    cut_off_s_ = 0;
  } else if (cut_off_s_ == 0) {
    cut_off_s_ = now_s();
  }
  return cut_off_s_ != 0 && now_s() - cut_off_s_ > kCutOffS;
}

bool TroubleObserver::is_blocked_by_mismatch(std::uint32_t member, std::uint32_t blocker) const {
  if (channel_.rank_of(member) != blocker) return false;
  if (region_.is_far(blocker) && now_s() - began_s_ > kAskS) {
    region_.messenger()->ask(blocker, channel_.calls);
  }
  const CallRecord& theirs = channel_.call(member, channel_.calls);
  const std::uint64_t number = channel_.calls + 1;
  if (theirs.number.load(std::memory_order_acquire) != number) return false;
  const std::uint64_t signature = theirs.signature.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return theirs.number.load(std::memory_order_relaxed) == number &&
         signature != prepared_.signature;
}

void TroubleObserver::interrupt(bool has_mutex) {
  const CallRecord* own = has_mutex ? &channel_.call(channel_.self(), channel_.calls) : nullptr;
  if (own != nullptr && own->number.load(std::memory_order_relaxed) != channel_.calls + 1) {
    own = nullptr;  // it has not begun yet
  }
  region_.spread(Trouble::interrupted, static_cast<std::int32_t>(region_.rank()), nullptr, own);
}

Trouble TroubleObserver::fail(Trouble trouble, std::uint32_t rank, std::uint64_t sent) {
  region_.spread(trouble, static_cast<std::int32_t>(rank), nullptr,
                 &channel_.call(channel_.self(), channel_.calls), sent, 0, timeout_s_);
  return trouble;
}

// The culprit's message may arrive before its record, which it writes when it waits or ends.
Trouble TroubleObserver::fail_against(Trouble trouble, std::uint32_t member, Host& host,
                                      const Finding& finding) {
  const CallRecord& theirs = channel_.call(member, channel_.calls);
  host.before_wait();
  const std::uint32_t rank = channel_.rank_of(member);
  if (region_.is_far(rank)) region_.messenger()->ask(rank, channel_.calls);
  for (int look = 0; look < kRecordLooks; ++look) {
    if (theirs.number.load(std::memory_order_acquire) == channel_.calls + 1) break;
    usleep(kRecordLookUs);
  }
  region_.spread(trouble, static_cast<std::int32_t>(channel_.rank_of(member)), &theirs,
                 &channel_.call(channel_.self(), channel_.calls), finding.sent, finding.expected);
  return trouble;
}

}  // namespace rallypoint
