// A robust futex: the kernel marks it when this process ends, before it has unmapped the memory.
//
// Unmapping takes 0.1 s for a GiB in pages of 4 KiB, and a pidfd, SIGCHLD and the end of sockets
// come after it. A thread of this process holds the word as a robust futex for as long as the
// process lives: when the thread is killed, which nothing else does than the end of the process or
// an exec, the kernel marks the word first, and wakes who waits for it (linux: kernel/futex/core.c,
// exit_robust_list). It works between PID namespaces: who waits needs only the memory.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rallypoint {

// Where it is in a worker's flight record, whose reader may be of another program.
inline constexpr std::size_t kLifeWordAt = 4056;

// Whether the process that held it has ended. The word changes again if another one holds it.
inline bool is_over(std::uint32_t life_word) { return (life_word & FUTEX_OWNER_DIED) != 0; }

// Holds the word from now on. Where the system refuses the thread or the list of robust futexes,
// the word remains as it is, and others hear of the end in other ways.
void hold_life_word(std::atomic<std::uint32_t>& word);

}  // namespace rallypoint
