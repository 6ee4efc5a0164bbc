#include "store/server.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace rallypoint::store {

namespace {

constexpr size_t kStack = 256 << 10;

}  // namespace

Server::Server(int listener, int log, std::string token, int silence_s)
    : owner_(getpid()),
      loop_(std::make_unique<EventLoop>(listener, log, std::move(token), silence_s)) {
  // Signals belong to the threads that Python knows.
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread_, &attributes, &Server::run, loop_.get());
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "pthread_create");
  }
  running_ = true;
}

void Server::close() {
  if (owner_ != getpid()) return abandon();
  if (!running_) return;
  running_ = false;
  loop_->stop();
  pthread_join(thread_, nullptr);
  loop_->close_all();
}

void Server::abandon() {
  if (owner_ == getpid() || !loop_) return;
  loop_->close_all();
  // Not destroyed: the thread may have been in the middle of anything when the process forked.
  loop_.release();
}

void* Server::run(void* loop) {
  pthread_setname_np(pthread_self(), "store");
  static_cast<EventLoop*>(loop)->run();
  return nullptr;
}

}  // namespace rallypoint::store
