#include "early_ends.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/flight_record.h"
#include "process_line.h"

namespace guardian {
namespace {

using rallypoint::is_over;
using rallypoint::kLifeWordAt;

constexpr size_t kRecordBytes = rallypoint::kRecordPages * rallypoint::kRecordPage;
constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned long kExiting = 4;  // PF_EXITING, of a process's flags

// Compute devices, as their drivers name them in /dev: NVIDIA, AMD, Ascend, Intel, Gaudi, Neuron.
bool has_accelerators() {
  DIR* const devices = opendir("/dev");
  if (devices == nullptr) return false;
  bool found = false;
  while (const dirent* const entry = readdir(devices)) {
    const char* const name = entry->d_name;
    if (strcmp(name, "kfd") == 0 || strcmp(name, "dri") == 0 || strcmp(name, "accel") == 0) {
      found = true;
    }
    for (const char* const prefix : {"nvidia", "davinci", "hl", "neuron"}) {
      const char* const number = name + strlen(prefix);
      if (strncmp(name, prefix, strlen(prefix)) == 0 && *number >= '0' && *number <= '9') {
        found = true;
      }
    }
  }
  closedir(devices);
  return found;
}

// A record that can shrink, because nothing forbids it, could kill whoever reads it.
char* map_header(int record, uint32_t slot) {
  struct stat status{};
  const int seals = fcntl(record, F_GET_SEALS);
  const auto offset = static_cast<off_t>(slot * kRecordBytes);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(record, &status) != 0 ||
      status.st_size < offset + static_cast<off_t>(kRecordBytes)) {
    return nullptr;
  }
  void* const at =
      mmap(nullptr, rallypoint::kRecordPage, PROT_READ | PROT_WRITE, MAP_SHARED, record, offset);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

}  // namespace

// Belongs to the thread and to us.
struct EarlyEnds::Ear {
  const uint32_t worker;
  char* const header;
  const int tells;                   // an eventfd
  std::atomic<int64_t> heard_ns{0};  // when; 0: nothing since it was taken
  std::atomic<bool> is_closed{false};

  ~Ear() { munmap(header, rallypoint::kRecordPage); }
  std::atomic<uint32_t>& word() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(header + kLifeWordAt);
  }
};

EarlyEnds::EarlyEnds() : fd_(has_accelerators() ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void EarlyEnds::listen(uint32_t worker, int record, uint32_t slot) {
  char* const header = fd_ < 0 ? nullptr : map_header(record, slot);
  if (header == nullptr) return;
  std::shared_ptr<Ear> ear(new Ear{worker, header, fd_});
  auto* const of_thread = new std::shared_ptr<Ear>(ear);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  if (pthread_create(&thread, &attributes, wait, of_thread) == 0) {
    ears_.push_back(std::move(ear));
  } else {
    delete of_thread;
  }
  pthread_attr_destroy(&attributes);
}

// The thread of one worker.
void* EarlyEnds::wait(void* given) {
  auto* const owned = static_cast<std::shared_ptr<Ear>*>(given);
  Ear& ear = **owned;
  uint32_t heard = 0;
  while (!ear.is_closed) {
    const uint32_t word = ear.word();
    if (is_over(word) && word != heard) {
      heard = word;
      timespec now{};
      clock_gettime(CLOCK_MONOTONIC, &now);
      ear.heard_ns = now.tv_sec * 1'000'000'000ll + now.tv_nsec;
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t sent = write(ear.tells, &one, sizeof one);
    }
    syscall(SYS_futex, &ear.word(), FUTEX_WAIT, word, nullptr, nullptr, 0);
  }
  delete owned;
  return nullptr;
}

// The process has been reaped. The word changes, so that the thread cannot fall asleep again. If
// another process holds it already, the thread ends when that one does.
void EarlyEnds::forget(uint32_t worker) {
  const auto found = std::find_if(ears_.begin(), ears_.end(),
                                  [worker](const auto& ear) { return ear->worker == worker; });
  if (found == ears_.end()) return;
  (*found)->is_closed = true;
  std::atomic<uint32_t>& word = (*found)->word();
  uint32_t seen = word;
  if (seen == 0 || is_over(seen)) word.compare_exchange_strong(seen, seen == 0 ? FUTEX_WAITERS : 0);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  ears_.erase(found);
}

std::vector<EarlyEnd> EarlyEnds::take() {
  uint64_t ignored;
  [[maybe_unused]] const ssize_t got = read(fd_, &ignored, sizeof ignored);
  std::vector<EarlyEnd> found;
  for (const auto& ear : ears_) {
    const int64_t heard_ns = ear->heard_ns.exchange(0);
    if (heard_ns != 0) found.push_back({ear->worker, heard_ns});
  }
  std::sort(found.begin(), found.end(),
            [](const EarlyEnd& a, const EarlyEnd& b) { return a.heard_ns < b.heard_ns; });
  return found;
}

int coming_status(pid_t pid) {
  char number[24];
  snprintf(number, sizeof number, "%d", pid);
  const ProcessLine line(number);
  const bool is_exiting = (line.number(ProcessLine::kFlags) & kExiting) != 0;
  return is_exiting ? static_cast<int>(line.number(ProcessLine::kExitCode)) : 0;
}

}  // namespace guardian
