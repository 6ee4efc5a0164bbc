// The layout of the region, and how a rank waits there.

#include <algorithm>
#include <utility>

#include "engine/layout.h"
#include "engine/waiting.h"
#include "tests/unit/cases.h"
#include "tests/unit/regions.h"

namespace {

using namespace rallypoint;

struct Part {
  std::size_t begin;
  std::size_t bytes;
  std::size_t alignment;
};

std::vector<Part> parts_of(const Layout& layout, std::size_t rank, std::size_t ranks) {
  return {
      {layout.state(rank), sizeof(RankState), alignof(RankState)},
      {layout.calls(rank), kCalls * sizeof(CallRecord), alignof(CallRecord)},
      {layout.progress(rank), kLanes * sizeof(Progress), alignof(Progress)},
      {layout.lines(rank), kLanes * kLines * sizeof(Line), alignof(Line)},
      {layout.outbox(rank), sizeof(Outbox), alignof(Outbox)},
      {layout.envelopes(rank), kEnvelopes * sizeof(Envelope), alignof(Envelope)},
      {layout.parts(rank), (kEnvelopes + 1) * sizeof(Parts), alignof(Parts)},
      {layout.taken(rank), ranks * sizeof(std::atomic<std::uint64_t>), 8},
      {layout.rings(rank), kLanes * kRingBytes, 4096},
      {layout.blocks(rank), kEnvelopes * kMailBytes, 4096},
      {layout.wide(rank), kWideBytes, 4096},
  };
}

CASE(nothing_in_the_region_overlaps) {
  for (const std::size_t ranks : {1, 2, 3, 7, 64, 257}) {
    const Layout layout(ranks);
    std::vector<Part> parts{{0, sizeof(Header), alignof(Header)}};
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::vector<Part> own = parts_of(layout, rank, ranks);
      parts.insert(parts.end(), own.begin(), own.end());
    }
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.begin < b.begin; });
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t end = i + 1 < parts.size() ? parts[i + 1].begin : layout.bytes();
      CHECK(parts[i].begin + parts[i].bytes <= end);
      CHECK_EQUAL(parts[i].begin % parts[i].alignment, 0U);
    }
  }
}

CASE(a_blame_fits_into_one_word) {
  for (int i = 0; i < 1000; ++i) {
    const Blame blame{static_cast<Trouble>(tests::chance()() % kTroubles),
                      static_cast<std::uint32_t>(tests::chance()() & 0xFFFFFF),
                      static_cast<std::uint32_t>(tests::chance()() & 0xFFFFFF)};
    const Blame found = Blame::unpacked(blame.packed());
    CHECK_EQUAL(found.trouble, blame.trouble);
    CHECK_EQUAL(found.culprit, blame.culprit);
    CHECK_EQUAL(found.reporter, blame.reporter);
  }
}

CASE(the_first_trouble_is_the_one_that_counts) {
  const tests::Memory memory(3);
  Region one(memory.fd(), 0, 3, {});
  Region other(memory.fd(), 1, 3, {});
  CHECK(!one.poisoned());
  one.spread(Trouble::peer_lost, 2, nullptr, nullptr);
  other.spread(Trouble::timeout, 0, nullptr, nullptr, 0, 0, 1.5);
  for (const Region* region : {&one, &other}) {
    CHECK(region->poisoned());
    CHECK(region->await_details());
    CHECK_EQUAL(region->blame().trouble, Trouble::peer_lost);
    CHECK_EQUAL(region->blame().culprit, 2U);
    CHECK_EQUAL(region->blame().reporter, 0U);
  }
}

class CountingHost final : public Host {
 public:
  void before_wait() override { ++waits; }
  bool is_interrupted() override { return false; }
  bool runs_handlers() override { return false; }
  bool is_alone() override { return false; }
  std::string site() override { return {}; }
  int waits = 0;
};

class CountingAlarm final : public Alarm {
 public:
  void arm() override { ++times; }
  int times = 0;
};

CASE(a_waiter_spins_then_yields_then_sleeps) {
  const tests::Memory memory(2);
  Region region(memory.fd(), 0, 2, {});
  const std::atomic<std::uint32_t>& sleeping = region.state(0).sleeping;
  CountingHost host;
  CountingAlarm alarm;
  {
    // The peer has not waited anywhere yet, so that nobody spins for longer because of it.
    Waiter waiter(region, {5, 3}, host, &alarm);
    for (int turn = 0; turn < 2; ++turn) {
      for (int i = 0; i < 5; ++i) CHECK(!waiter.pause(1));
      CHECK_EQUAL(host.waits, turn);  // told once for a call, when it does not only spin
      int yields = 0;
      while (!waiter.pause(1)) ++yields;
      CHECK(yields <= 3);  // fewer if others keep the core
      CHECK_EQUAL(host.waits, 1);
      // It has said that it sleeps, and looks once more before it does.
      CHECK_EQUAL(sleeping.load(), 1U);
      CHECK_EQUAL(alarm.times, 1 + 2 * turn);
      CHECK(waiter.pause(1));
      CHECK_EQUAL(sleeping.load(), 1U);
      CHECK_EQUAL(alarm.times, 2 + 2 * turn);
      waiter.reset();
      CHECK_EQUAL(sleeping.load(), 0U);
      host.waits = 1;
    }
    while (!waiter.pause(1)) {
    }
    CHECK_EQUAL(sleeping.load(), 1U);
  }
  CHECK_EQUAL(sleeping.load(), 0U);  // also if the call ends meanwhile
}

CASE(who_sleeps_and_has_been_rung_wakes_at_once) {
  const tests::Memory memory(2);
  Region region(memory.fd(), 0, 2, {});
  const Region peer(memory.fd(), 1, 2, {});
  NoHost host;
  Waiter waiter(region, {0, 0}, host, nullptr);
  CHECK(waiter.pause(1));  // says so
  // Each sleep would be longer than the one before, up to 50 ms: 100 of them take 5 s.
  const double began_s = now_s();
  for (int i = 0; i < 100; ++i) {
    peer.wake(0);
    CHECK(waiter.pause(1));
  }
  CHECK(now_s() - began_s < 4);
}

}  // namespace
