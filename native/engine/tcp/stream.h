// Writes and reads a connection's bytes without ever waiting.
//
// Whether the other side is alive is not decided here: a stream only knows that it has ended.
#pragma once

#include <sys/uio.h>

#include <cstddef>

namespace rallypoint::tcp {

class Stream {
 public:
  // Takes the descriptor over.
  explicit Stream(int fd);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&&) = delete;
  Stream(const Stream&) = delete;

  int fd() const { return fd_; }
  // Each returns how many bytes were written or read, which may be none.
  std::size_t write(const iovec* spans, std::size_t count);
  std::size_t read(const iovec* spans, std::size_t count);
  bool is_open_for_writing() const { return writes_; }
  // Nothing more will arrive: everything that was sent has been read.
  bool has_ended() const { return !reads_; }
  // Bytes that the other side's system has not yet confirmed.
  std::size_t unconfirmed() const;
  void finish_writing();

 private:
  int fd_;
  bool writes_ = true;
  bool reads_ = true;
};

}  // namespace rallypoint::tcp
