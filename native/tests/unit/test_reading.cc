// What a trial decides from how long calls took.

#include <algorithm>

#include "engine/reading.h"
#include "tests/unit/cases.h"

namespace {

using rallypoint::ReadingTrial;
using rallypoint::ReadingTrials;

// A trial of calls that take so long when they copy, and when they read.
template <typename Seconds>
bool decides_to_read(Seconds seconds) {
  ReadingTrial trial;
  for (unsigned call = 0; trial.is_open(); ++call) {
    CHECK(call < 1000);
    trial.note(seconds(call, trial.reads()));
  }
  return trial.reads();
}

CASE(the_quicker_way_is_taken) {
  CHECK(decides_to_read([](unsigned, bool reads) { return reads ? 1e-3 : 2e-3; }));
  CHECK(!decides_to_read([](unsigned, bool reads) { return reads ? 2e-3 : 1e-3; }));
}

CASE(reading_must_be_worth_it) {
  CHECK(!decides_to_read([](unsigned, bool) { return 1e-3; }));
  CHECK(!decides_to_read([](unsigned, bool reads) { return reads ? 0.95e-3 : 1e-3; }));
}

CASE(a_single_call_decides_nothing) {
  // One call, whichever it is, is a hundred times quicker or slower than all others.
  for (unsigned odd = 0; odd < 40; ++odd) {
    for (const double factor : {0.01, 100.0}) {
      const auto once = [&](unsigned call) { return call == odd ? factor : 1.0; };
      CHECK(decides_to_read(
          [&](unsigned call, bool reads) { return (reads ? 1e-3 : 2e-3) * once(call); }));
      CHECK(!decides_to_read(
          [&](unsigned call, bool reads) { return (reads ? 2e-3 : 1e-3) * once(call); }));
    }
  }
}

CASE(both_ways_are_tried_equally_often) {
  unsigned read = 0;
  unsigned copied = 0;
  decides_to_read([&](unsigned, bool reads) {
    ++(reads ? read : copied);
    return 1e-3;
  });
  CHECK(read >= 10);
  CHECK(copied >= read);  // the first calls of all warm up, and copy
  CHECK(copied <= read + 8);
}

CASE(of_calls_that_overlap_one_is_timed) {
  ReadingTrial trial;
  for (; trial.is_open(); trial.note(1e-3)) {
    CHECK(trial.begin());
    CHECK(!trial.begin());
  }
  CHECK(!trial.begin());
}

CASE(each_program_and_size_has_its_trial) {
  ReadingTrials trials;
  int one = 0;
  int other = 0;
  ReadingTrial& first = trials.of(&one, 1 << 20);
  CHECK(&trials.of(&one, (1 << 20) + 1) == &first);
  CHECK(&trials.of(&one, 1 << 21) != &first);
  CHECK(&trials.of(&other, 1 << 20) != &first);
  CHECK(&trials.of(&one, 1ULL << 30) == &trials.of(&one, 1ULL << 40));  // larger than any cache
}

}  // namespace
