// What a trial decides from how long calls took.

#include <algorithm>
#include <array>

#include "engine/ways.h"
#include "tests/unit/cases.h"

namespace {

using rallypoint::Way;
using rallypoint::Ways;
using rallypoint::WayTrial;
using rallypoint::WayTrials;

constexpr std::array kWays{Way::copy, Way::touch, Way::copy_past_caches, Way::read};
constexpr Ways kAll(Way::copy_past_caches, Way::read);
constexpr unsigned kLap = 5;
constexpr std::uint64_t kBytes = 4096;

// Goes on with a trial of calls that take so long in each way.
template <typename Seconds>
Way decision(WayTrial& trial, Seconds seconds) {
  for (unsigned call = 0; trial.is_open(); ++call) {
    CHECK(call < 1000);
    const bool is_timed = trial.begin();
    const double took_s = seconds(call, trial.way());
    if (is_timed) trial.note(took_s);
  }
  return trial.way();
}

template <typename Seconds>
Way decision(Seconds seconds) {
  WayTrial trial(kAll, kLap, kBytes);
  return decision(trial, seconds);
}

CASE(the_quickest_way_is_taken) {
  for (const Way quick : kWays) {
    for (const Way slow : kWays) {
      const auto seconds = [=](unsigned, Way way) {
        return way == quick ? 1e-3 : way == slow ? 3e-3 : 2e-3;
      };
      CHECK(decision(seconds) == quick);
    }
  }
}

CASE(another_way_than_to_touch_must_be_worth_it) {
  CHECK(decision([](unsigned, Way) { return 1e-3; }) == Way::touch);
  for (const Way other : kWays) {
    CHECK(decision([=](unsigned, Way way) { return way == other ? 0.95e-3 : 1e-3; }) == Way::touch);
  }
}

CASE(a_single_call_decides_nothing) {
  // One call, whichever it is, is a hundred times quicker or slower than all others.
  for (unsigned odd = 0; odd < 60; ++odd) {
    for (const double factor : {0.01, 100.0}) {
      for (const Way quick : kWays) {
        CHECK(decision([=](unsigned call, Way way) {
                return (way == quick ? 1e-3 : 2e-3) * (call == odd ? factor : 1.0);
              }) == quick);
      }
    }
  }
}

CASE(all_ways_are_tried_equally_often) {
  std::array<unsigned, kWays.size()> calls{};
  decision([&](unsigned, Way way) {
    ++calls[static_cast<unsigned>(way)];
    return 1e-3;
  });
  for (const unsigned each : calls) CHECK(each == calls[0] && each > 10);
}

CASE(only_some_ways_are_tried) {
  WayTrial trial(Ways(Way::read), kLap, kBytes);
  CHECK(decision(trial, [](unsigned, Way way) {
          CHECK(way != Way::copy_past_caches);
          return way == Way::read ? 1e-3 : 2e-3;
        }) == Way::read);
}

// The first calls of a round meet memory as the way before has left it.
CASE(a_lap_is_not_timed) {
  Way last = Way::copy;
  unsigned since = 0;
  CHECK(decision([&](unsigned, Way way) {
          since = way == last ? since + 1 : 0;
          last = way;
          const bool is_quick = since < kLap ? way == Way::copy : way == Way::touch;
          return is_quick ? 1e-3 : 2e-3;
        }) == Way::touch);
}

CASE(it_is_tried_again) {
  WayTrial trial(kAll, kLap, kBytes);
  unsigned pause = WayTrial::kFirstPause;
  for (const Way quick : {Way::read, Way::copy, Way::touch, Way::touch}) {
    const auto seconds = [=](unsigned, Way way) { return way == quick ? 1e-3 : 2e-3; };
    CHECK(decision(trial, seconds) == quick);
    for (unsigned call = 1; call < pause; ++call) {
      CHECK(!trial.begin());
      CHECK(!trial.is_open());
    }
    CHECK(!trial.begin());
    CHECK(trial.is_open());
    pause = std::min(4 * pause, WayTrial::kLongestPause);
  }
}

CASE(of_calls_that_overlap_one_is_timed) {
  WayTrial trial(kAll, 0, kBytes);
  for (; trial.is_open(); trial.note(1e-3)) {
    CHECK(trial.begin());
    CHECK(!trial.begin());
  }
  CHECK(!trial.begin());
}

CASE(each_program_and_size_has_its_trial) {
  WayTrials trials;
  int one = 0;
  int other = 0;
  const auto trial_of = [&](const void* program, std::uint64_t bytes) {
    return &trials.of(program, bytes, kAll, kLap);
  };
  WayTrial* const first = trial_of(&one, 1 << 20);
  CHECK(trial_of(&one, (1 << 20) - 1) == first);
  CHECK(trial_of(&one, (1 << 20) + 1) != first);
  CHECK(trial_of(&other, 1 << 20) != first);
  CHECK(trial_of(&one, 1ULL << 30) == trial_of(&one, 1ULL << 40));  // larger than any cache
}

}  // namespace
