// The descriptors that a server or the engine has open, in memory that a forked child can read at
// any moment: it inherits them all, and must close them without reading anything that was being
// modified.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace rallypoint {

class Descriptors {
 public:
  Descriptors() {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    words_ = static_cast<size_t>(std::min<rlim_t>(limit.rlim_max, 1 << 20)) / 64 + 1;
    // Anonymous pages cost nothing before a bit in them is set.
    void* memory = mmap(nullptr, words_ * sizeof(*bits_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    bits_ = static_cast<std::atomic<uint64_t>*>(memory);
  }
  ~Descriptors() { munmap(bits_, words_ * sizeof(*bits_)); }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  int add(int fd) {
    if (fd >= 0 && word(fd) < words_) bits_[word(fd)].fetch_or(bit(fd), std::memory_order_relaxed);
    return fd;
  }
  void close(int fd) {
    if (word(fd) < words_) bits_[word(fd)].fetch_and(~bit(fd), std::memory_order_relaxed);
    ::close(fd);
  }
  void close_all() {
    for (size_t i = 0; i < words_; ++i) {
      if (bits_[i].load(std::memory_order_relaxed) == 0) continue;  // a page nobody has used yet
      for (uint64_t open = bits_[i].exchange(0, std::memory_order_relaxed); open;
           open &= open - 1) {
        ::close(static_cast<int>(64 * i) + __builtin_ctzll(open));
      }
    }
  }

 private:
  static size_t word(int fd) { return static_cast<size_t>(fd) / 64; }
  static uint64_t bit(int fd) { return uint64_t{1} << (fd % 64); }

  std::atomic<uint64_t>* bits_ = nullptr;
  size_t words_ = 0;
};

}  // namespace rallypoint
