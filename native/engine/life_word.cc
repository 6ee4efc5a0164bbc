#include "engine/life_word.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <system_error>

#include "engine/process.h"

namespace rallypoint {
namespace {

// The list takes the place of the one that the C library keeps for each thread, for robust mutexes,
// of which this thread locks none.
void hold(std::atomic<std::uint32_t>& word) {
  robust_list_head head{};
  robust_list entry{&head.list};
  head.list.next = &entry;
  head.futex_offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&entry);
  if (syscall(SYS_set_robust_list, &head, sizeof head) != 0) return;
  // The kernel wakes somebody only if the word says that somebody waits.
  word.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  for (;;) pause();
}

}  // namespace

void hold_life_word(std::atomic<std::uint32_t>& word) {
  try {
    start_thread([&word] { hold(word); });
  } catch (const std::system_error&) {  // no more threads
    return;
  }
}

}  // namespace rallypoint
