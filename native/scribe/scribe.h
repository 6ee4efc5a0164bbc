// The scribe: a thread that writes into the flight record the calls of groups of PyTorch's other
// backends, as PyTorch's own Flight Recorder knows them. It never needs the GIL, and lives as long
// as the process, so that the record is at most a tenth of a second old when the process is killed.
//
//   each 100 ms    which call each group began last, and which is done     some microseconds
//   (20 while somebody watches)
//   now and then   the last calls, with their sizes: when a group is new, is behind for two
//                  seconds, or a reader asks                               up to 20 ms
//
// The recorders' functions are looked up by name in the libraries that the process has loaded; if a
// library lacks them, there is nothing to write. NCCL's have not been run: there was no GPU.
#pragma once

#include <string>

#include "engine/foreign_page.h"

namespace rallypoint {

// Makes the calls of this backend in the group of this name be written to that page; false if
// nothing records them.
bool watch_group(const std::string& backend, const std::string& name, ForeignPage& page);

// Starts it, the first time. `signal`: the only signal that it receives, so that inspecting the
// stacks disturbs no thread of the program (python/stacks.cc); 0: none.
void start_scribe(int signal);

}  // namespace rallypoint
