// Whose the memory of a flight record is, and the word that tells of a process's end.

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "engine/flight_record.h"
#include "engine/life_word.h"
#include "tests/unit/cases.h"

namespace {

using namespace rallypoint;

constexpr std::size_t kBytes = kRecordPages * kRecordPage;

class Memory {
 public:
  Memory()
      : fd_(memfd_create("unit", MFD_CLOEXEC)),
        at_(ftruncate(fd_, kBytes) == 0
                ? mmap(nullptr, kRecordPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0)
                : MAP_FAILED) {
    if (at_ == MAP_FAILED) std::abort();
  }
  ~Memory() {
    munmap(at_, kRecordPage);
    close(fd_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int fd() const { return fd_; }
  RecordHeader& header() const { return *static_cast<RecordHeader*>(at_); }

 private:
  int fd_;
  void* at_;
};

// A child that keeps its record in a memory, with one group, until it is killed.
class Child {
 public:
  explicit Child(const Memory& memory) : pid_(fork()) {
    if (pid_ != 0) return;
    const bool keeps = open_flight_record(memory.fd(), 0, "{}");
    const GroupRecord group("{}");
    while (keeps) pause();
    _exit(1);
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void end() const {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

// Whoever reads the record sees what a thread waits for, however many calls nobody waits for.
CASE(a_transfer_that_a_thread_waits_for_has_a_place) {
  const Memory memory;
  const pid_t pid = fork();  // a process keeps one record
  if (pid == 0) {
    bool is_right = open_flight_record(memory.fd(), 0, "{}");
    GroupRecord group("{}");
    for (unsigned i = 0; i < kRecordedTransfers; ++i) {
      const RecordedTransfer posted = group.post(i, 1, 8, 0);
      is_right &= posted.call != nullptr;
      if (i != 3) group.await(posted);
    }
    is_right &= group.post(99, 1, 8, 0).call == nullptr;
    const RecordedTransfer taken = group.take_place(99, 1, 0);
    is_right &= taken.call == &group.page()->transfers[3] && taken.call->what == 99;
    group.await(taken);
    is_right &= group.take_place(100, 1, 0).call == nullptr;
    GroupRecord::leave_place(taken);
    is_right &= group.post(101, 1, 8, 0).call == taken.call;
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  CHECK_EQUAL(status, 0);
}

// A writer that counted a call twice, or lost a wait, would make a healthy rank look slow.
CASE(counters_of_a_group_only_grow) {
  const Memory memory;
  const pid_t pid = fork();
  if (pid == 0) {
    bool is_right = open_flight_record(memory.fd(), 0, "{}");
    GroupRecord group("{}");
    const auto latest = [&group](unsigned number) {
      return &group.page()->calls[number % kRecordedCalls];
    };
    is_right &= group.page()->counts_version == kCountsVersion;
    for (unsigned number = 0; number < 100; ++number) {
      group.begin(0, 2, 8, 1);
      is_right &= latest(number)->counts[0] == 8 * (number + 1);
      is_right &= latest(number)->counts[1] == number / 2 * 1000000;  // of the calls before
      group.end(Trouble::none, true, number % 2 * 1000000);
      is_right &= latest(number)->counts[1] == (number + 1) / 2 * 1000000;
    }
    GroupPage& page = *const_cast<GroupPage*>(group.page());
    is_right &= page.waited_squared() == 50 * squared_wait(1000000);
    for (unsigned i = 0; i < 40; ++i) {  // also those for which there is no place
      group.post(0, 1, 4, 0);
      group.has_waited(3000000);
    }
    is_right &= page.transferred_bytes() == 160;
    is_right &= page.transfers_waited_ns() == 120000000;
    is_right &= page.waited_squared() == 50 * squared_wait(1000000) + 40 * squared_wait(3000000);
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  CHECK_EQUAL(status, 0);
}

// False under gVisor and qemu, where nothing marks the word: a case that waits for it is left out.
bool has_robust_futexes(const char* name) {
  robust_list_head* head = nullptr;
  std::size_t bytes = 0;
  if (syscall(SYS_get_robust_list, 0, &head, &bytes) == 0) return true;
  std::cerr << "left out, as this system has no robust futexes: " << name << "\n";
  return false;
}

// Another process would tell the end of this one: it holds the word from its first group on.
CASE(a_record_is_that_of_one_living_process_whose_end_its_word_tells) {
  if (!has_robust_futexes(__func__)) return;
  const Memory memory;
  std::atomic<std::uint32_t>& word = memory.header().life_word;
  const Child child(memory);
  while ((word & FUTEX_TID_MASK) == 0) usleep(1000);
  CHECK(!is_over(word));
  CHECK((word & FUTEX_TID_MASK) != static_cast<std::uint32_t>(child.pid()));
  CHECK_EQUAL(memory.header().pid.load(), child.pid());
  CHECK(!open_flight_record(memory.fd(), 0, "{}"));
  child.end();
  CHECK(is_over(word));
  CHECK(open_flight_record(memory.fd(), 0, "{}"));
  CHECK_EQUAL(memory.header().pid.load(), getpid());
}

CASE(who_waits_for_the_word_is_woken) {
  if (!has_robust_futexes(__func__)) return;
  const Memory memory;
  std::atomic<std::uint32_t>& word = memory.header().life_word;
  const Child child(memory);
  while ((word & FUTEX_TID_MASK) == 0) usleep(1000);
  const std::uint32_t held = word;
  kill(child.pid(), SIGKILL);
  while (word == held) syscall(SYS_futex, &word, FUTEX_WAIT, held, nullptr, nullptr, 0);
  CHECK_EQUAL(word.load(), (held & FUTEX_WAITERS) | FUTEX_OWNER_DIED);
}

}  // namespace
