#include "engine/communicator.h"

#include <bit>

namespace rallypoint {
namespace {

std::deque<Ring> make_rings(const Region& region) {
  std::deque<Ring> rings;
  auto* const base = region.at<std::byte>(region.layout().rings(region.rank()));
  for (unsigned i = 0; i <= kLanes; ++i) rings.emplace_back(base + i * kRingBytes);
  return rings;
}

}  // namespace

Communicator::Communicator(int fd, std::uint32_t rank, std::uint32_t ranks, WaitPolicy policy)
    : region_(fd, rank, ranks),
      policy_(policy),
      rings_(make_rings(region_)),
      collective_(region_, Channel::collective(region_, rings_), policy) {}

std::uint64_t Communicator::kind(std::uint32_t collective, std::uint32_t root,
                                 std::uint64_t bytes) {
  const auto size_class = bytes == 0 ? 0 : std::bit_width(bytes - 1) + 1;
  return std::uint64_t{root} << 32 | std::uint64_t{collective} << 8 |
         static_cast<std::uint64_t>(size_class);
}

const Program* Communicator::find(std::uint64_t kind) const {
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? nullptr : found->second;
}

std::string Communicator::teach(std::uint64_t kind, std::span<const std::int32_t> words,
                                std::uint32_t rank, std::uint32_t ranks) {
  auto program = std::make_unique<Program>();
  std::string error = decode(words, *program);
  if (!error.empty()) return error;
  if (program->rank != rank || program->ranks != ranks) {
    return "the program is for rank " + std::to_string(program->rank) + " of " +
           std::to_string(program->ranks) + ", not for rank " + std::to_string(rank) + " of " +
           std::to_string(ranks);
  }
  kinds_[kind] = program.get();
  programs_.push_back(std::move(program));
  return {};
}

Executor& Communicator::pair(std::uint32_t from, std::uint32_t to) {
  const std::lock_guard lock(pairs_mutex_);
  auto& executor = pairs_[std::uint64_t{from} << 32 | to];
  if (executor == nullptr) {
    executor = std::make_unique<Executor>(region_, Channel::pair(region_, from, to, rings_.back()),
                                          policy_);
  }
  return *executor;
}

}  // namespace rallypoint
