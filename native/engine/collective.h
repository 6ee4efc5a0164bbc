#pragma once

// The collectives that the engine itself asks for or tells of. All others are programs to it.

#include <cstdint>

namespace rallypoint::collective {

// Their numbers in base/collective.py.
inline constexpr std::uint16_t kAllReduce = 0;  // of the largest block, where blocks differ
inline constexpr std::uint16_t kSend = 4;

}  // namespace rallypoint::collective
