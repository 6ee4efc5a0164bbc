#include "template.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace guardian {
namespace {

// As long as the import itself takes is no loss: whoever does not wait imports as well.
constexpr int64_t kImportMs = 30000;
constexpr int64_t kForkMs = 1000;  // it takes 30 ms, and an import more than a second

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

}  // namespace

void release(Template::Waiting& waiting) {
  for (const int fd : waiting.fds) close(fd);
}

void Template::begin(uint32_t id, int socket, bool sessions) {
  *this = Template();
  id_ = id;
  socket_ = socket;
  sessions_ = sessions;
  since_ns_ = now_ns();
}

bool Template::add(SpawnRequest&& request, const int (&fds)[kWorkerFds]) {
  Waiting waiting{std::move(request), {}};
  for (int i = 0; i < kWorkerFds; ++i) {
    waiting.fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
    if (waiting.fds[i] >= 0) continue;
    while (i > 0) close(waiting.fds[--i]);
    request = std::move(waiting.request);
    return false;
  }
  if (waiting_.empty()) renew_deadline();
  waiting_.push_back(std::move(waiting));
  return true;
}

// Sends the first in the queue, if the template is free.
void Template::ask() {
  while (is_ready_ && !owes_answer_ && !waiting_.empty()) {
    Waiting& first = waiting_.front();
    int go[2];
    if (pipe2(go, O_CLOEXEC) == 0) {
      int fds[kWorkerFds + 1];
      std::copy(std::begin(first.fds), std::end(first.fds), fds);
      fds[kWorkerFds] = go[0];
      uint32_t sessions = sessions_ ? 1 : 0;
      iovec parts[] = {{&sessions, sizeof sessions},
                       {first.request.payload.data(), first.request.payload.size()}};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof fds)] = {};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof fds);
      memcpy(CMSG_DATA(rights), fds, sizeof fds);
      const bool is_sent = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
      close(go[0]);
      if (is_sent) {
        go_ = go[1];
        owes_answer_ = true;
        since_ns_ = now_ns();
        return;
      }
      close(go[1]);
    }
    // An environment larger than the socket's buffer, or too few descriptors.
    unsent_.push_back(std::move(first));
    waiting_.pop_front();
  }
}

bool Template::receive(Answer& answer, std::optional<Waiting>& forked) {
  forked.reset();
  const ssize_t got = recv(socket_, &answer, sizeof answer, MSG_DONTWAIT);
  if (got != static_cast<ssize_t>(sizeof answer)) {
    has_ended_ = got >= 0 || (errno != EAGAIN && errno != EINTR);
    return false;
  }
  is_late_ = false;
  if (!owes_answer_) {
    is_ready_ = true;
  } else {
    owes_answer_ = false;
    if (is_forking()) {
      forked = std::move(waiting_.front());
      waiting_.pop_front();
    }
  }
  return true;
}

void Template::let_go() {
  const char byte = 1;
  [[maybe_unused]] const ssize_t sent = write(go_, &byte, 1);
  forget_go();
}

void Template::forget_go() {
  if (go_ >= 0) close(go_);
  go_ = -1;
}

std::vector<Template::Waiting> Template::take_unsent() {
  if (!owes_answer_) forget_go();
  ask();
  return std::exchange(unsent_, {});
}

std::vector<Template::Waiting> Template::give_up() {
  is_late_ = true;
  forget_go();
  std::vector<Waiting> all = std::exchange(unsent_, {});
  for (Waiting& each : waiting_) all.push_back(std::move(each));
  waiting_.clear();
  return all;
}

std::vector<Template::Waiting> Template::end() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
  return give_up();
}

std::optional<Template::Waiting> Template::withdraw(uint32_t worker) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [worker](const Waiting& each) {
    return each.request.worker == worker;
  });
  if (found == waiting_.end()) return std::nullopt;
  if (found == waiting_.begin()) forget_go();
  Waiting taken = std::move(*found);
  waiting_.erase(found);
  return taken;
}

void Template::use_again() {
  if (!owes_answer_) is_late_ = false;
}

void Template::renew_deadline() {
  if (is_ready_) since_ns_ = now_ns();
}

int64_t Template::deadline_ns() const {
  if (!exists() || waiting_.empty()) return 0;
  return since_ns_ + (is_ready_ ? kForkMs : kImportMs) * 1'000'000;
}

}  // namespace guardian
