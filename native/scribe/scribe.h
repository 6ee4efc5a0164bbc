// The scribe: a thread that writes into the flight record what groups of PyTorch's other backends
// are in, as PyTorch's own Flight Recorder knows it. It never needs the GIL, and lives for as long
// as the process, so that the record is at most a tenth of a second old when that is killed.
//
//   each 100 ms    which call each group began last, and which is done     some microseconds
//   now and then   the last calls, with their sizes: when a group is new, is behind for two
//                  seconds, or a reader asks                               up to 20 ms
//
// The recorders' functions are looked up by name in the libraries that the process has loaded; in
// one that lacks them there is nothing to write. NCCL's have not been run: there was no GPU.
#pragma once

#include <string>

#include "engine/foreign_page.h"

namespace rallypoint {

// Have what this backend does in the groups of this name written to that page; false if nothing
// records it.
bool watch_group(const std::string& backend, const std::string& name, ForeignPage& page);

// Start it, the first time. `signal`: the only one that it takes, so that a look at the stacks
// disturbs no thread of the program (python/stacks.cc); 0: none.
void start_scribe(int signal);

}  // namespace rallypoint
