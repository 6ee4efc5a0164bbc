// What a process holds of one group: the region, the programs it has been taught, and the channels.
//
// Which program serves a call is decided elsewhere; it is asked for once per kind of call, by
// `find`, and remembered by `teach`.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/executor.h"

namespace rallypoint {

class Communicator {
 public:
  Communicator(int fd, std::uint32_t rank, std::uint32_t ranks, WaitPolicy policy);

  Region& region() { return region_; }

  // The kind of a call: calls of one kind share a program.
  static std::uint64_t kind(std::uint32_t collective, std::uint32_t root, std::uint64_t bytes);
  const Program* find(std::uint64_t kind) const;
  // Returns an empty string, or what is wrong with a program for `rank` of `ranks`.
  std::string teach(std::uint64_t kind, std::span<const std::int32_t> words, std::uint32_t rank,
                    std::uint32_t ranks);

  // Runs the collectives of all ranks.
  Executor& collective() { return collective_; }
  // Runs sends and receives from one rank to another; this rank is one of the two.
  Executor& pair(std::uint32_t from, std::uint32_t to);

 private:
  Region region_;
  WaitPolicy policy_;
  std::deque<Ring> rings_;  // by lane, and one for all pairs; a deque, because rings stay in place
  Executor collective_;
  std::mutex pairs_mutex_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Executor>> pairs_;
  std::unordered_map<std::uint64_t, const Program*> kinds_;
  std::vector<std::unique_ptr<Program>> programs_;  // never dropped: messages refer to them
};

}  // namespace rallypoint
