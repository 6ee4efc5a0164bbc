// What a trial decides from how long calls took.

#include <algorithm>
#include <array>

#include "engine/ways.h"
#include "tests/unit/cases.h"

namespace {

using rallypoint::Way;
using rallypoint::WayTrial;
using rallypoint::WayTrials;

constexpr std::array kWays{Way::copy, Way::copy_past_caches, Way::read};

// A trial of calls that take so long in each way.
template <typename Seconds>
Way decision(Seconds seconds) {
  WayTrial trial;
  for (unsigned call = 0; trial.is_open(); ++call) {
    CHECK(call < 1000);
    trial.note(seconds(call, trial.way()));
  }
  return trial.way();
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

CASE(another_way_than_a_copy_must_be_worth_it) {
  CHECK(decision([](unsigned, Way) { return 1e-3; }) == Way::copy);
  for (const Way other : kWays) {
    CHECK(decision([=](unsigned, Way way) { return way == other ? 0.95e-3 : 1e-3; }) == Way::copy);
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
  std::array<unsigned, 3> calls{};
  decision([&](unsigned, Way way) {
    ++calls[static_cast<unsigned>(way)];
    return 1e-3;
  });
  const auto [copied, past_caches, read] = calls;
  CHECK(read >= 10);
  CHECK(read == past_caches);
  CHECK(copied >= read);  // the first calls of all warm up, and copy
  CHECK(copied <= read + 8);
}

CASE(of_calls_that_overlap_one_is_timed) {
  WayTrial trial;
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
  WayTrial& first = trials.of(&one, 1 << 20);
  CHECK(&trials.of(&one, (1 << 20) + 1) == &first);
  CHECK(&trials.of(&one, 1 << 21) != &first);
  CHECK(&trials.of(&other, 1 << 20) != &first);
  CHECK(&trials.of(&one, 1ULL << 30) == &trials.of(&one, 1ULL << 40));  // larger than any cache
}

}  // namespace
