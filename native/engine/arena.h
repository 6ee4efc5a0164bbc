// Memory that other processes of this host can map: arrays in it are communicated without a copy.
//
//   arena of a process     | segment: 64 MiB or more | segment | ...     each a memfd, without a
//   name block                  whole pages of one segment, given back to the system when freed
//
// Memory that other libraries have put into such files is adopted as a separate segment. Where the
// system refuses memfds, segments have no file: peers get what is in them as from any other memory.
//
// Peers open a segment through /proc/PID/fd and map it when they first see a message in it
// (peer_memory.h). A forked child shares these arrays with its parent: they are not copied on
// write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace rallypoint {

// A place in its owner's arena.
struct ArenaPlace {
  std::uint64_t segment;  // its inode; 0 if in no arena
  std::uint64_t device;   // the inode's device
  std::uint64_t offset;
  std::int32_t fd;  // the owner's descriptor
};

class Arena {
 public:
  static Arena& instance();

  // Zeroed, at a page boundary; null if there is no memory.
  std::byte* allocate(std::size_t bytes);
  // Does nothing for null, or for memory that this process did not allocate.
  void release(std::byte* at);
  // Adopts memory of another library: a complete unnamed file that will not be truncated, mapped at
  // `base`. It must stay like this until it is abandoned. Returns false for any other file.
  bool adopt(std::byte* base, std::size_t bytes, int fd);
  // Unless `is_used`, processes that have mapped the file need not keep its pages.
  void abandon(std::byte* base, bool is_used);
  // Whether the bytes lie in blocks of one segment, and where.
  bool locate(const std::byte* at, std::size_t bytes, ArenaPlace& place) const;

 private:
  struct Segment {
    int fd;  // -1: it has no file
    std::uint64_t inode;
    std::uint64_t device;
    std::size_t bytes;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes; no two touch
    std::map<std::size_t, std::size_t> used;
    bool is_adopted = false;  // then both are empty
  };
  using Segments = std::map<std::byte*, Segment>;  // by their base

  Segments::iterator add_segment(std::size_t bytes);
  static std::byte* take(std::byte* base, Segment& segment, std::size_t bytes);
  static void give_back(std::byte* base, Segment& segment, std::size_t offset, std::size_t bytes);

  mutable std::mutex mutex_;
  Segments segments_;
};

}  // namespace rallypoint
