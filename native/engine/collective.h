#pragma once

// The collectives that the engine itself uses or reports. All others are just programs to it.

#include <cstdint>

namespace rallypoint::collective {

// Their numbers in base/collective.py.
// also used to agree on the largest block, where blocks differ
inline constexpr std::uint16_t kAllReduce = 0;
inline constexpr std::uint16_t kSend = 4;

}  // namespace rallypoint::collective
