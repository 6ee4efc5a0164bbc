// The guardian's end of the socket to its agent: whole requests in, reports out. It never blocks:
// reports wait in memory while the agent is busy, so that the two cannot wait for each other.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "protocol.h"

namespace guardian {

class Channel {
 public:
  explicit Channel(int fd);

  // Reads what has arrived. False: the agent is gone, or sent something invalid.
  bool receive();
  // Whether receive() would find something.
  bool has_more() const;
  // The next whole request, if there is one; valid until the next receive().
  // `broken` is set when the bytes cannot be a request.
  bool next(Header& header, char*& payload, bool& broken);
  // Moves the descriptors of one Spawn to `fds`; the caller closes them.
  bool take_fds(int (&fds)[kWorkerFds]);

  void report(const Report& report);
  void flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  int fd() const { return fd_; }

 private:
  int fd_;
  std::vector<char> incoming_;
  size_t consumed_ = 0;
  std::deque<int> fds_;
  std::string outgoing_;
};

}  // namespace guardian
