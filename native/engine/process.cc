#include "engine/process.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "descriptors.h"

namespace rallypoint {

std::atomic<unsigned> forks{0};

namespace {

// Never destroyed, as threads may still use it.
Descriptors& descriptors() {
  static auto* const all = new Descriptors;
  return *all;
}

void begin_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  descriptors().close_all();
}

// At load time there is one thread, and there are no descriptors yet.
[[maybe_unused]] const bool is_prepared = [] {
  descriptors();
  return pthread_atfork(nullptr, nullptr, begin_child) == 0;
}();

}  // namespace

int own(int fd) { return descriptors().add(fd); }

void close_owned(int fd) { descriptors().close(fd); }

void start_thread(std::function<void()> body) {
  sigset_t most;
  sigset_t before;
  sigfillset(&most);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
    sigdelset(&most, fault);
  }
  pthread_sigmask(SIG_SETMASK, &most, &before);
  int error = 0;
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error& refused) {
    error = refused.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_create");
}

}  // namespace rallypoint
