// Memory that other processes of this host can map: arrays in it are communicated without a copy.
//
//   arena of a process     | segment: 64 MiB or more | segment | ...     each a memfd, without a
//   name block                  whole pages of one segment, given back to the system when freed
//
// What other libraries have put into files of the same kind is adopted as a segment of its own.
//
// Peers open a segment by /proc/PID/fd and map it when they first see a message in it
// (peer_memory.h). A child after fork shares these arrays with its parent: they are not copied on
// write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace rallypoint {

// Where something lies in its owner's arena.
struct ArenaPlace {
  std::uint64_t segment;  // its inode; 0: in no arena
  std::uint64_t device;   // that the inode is of
  std::uint64_t offset;
  std::int32_t fd;  // of the owner
};

class Arena {
 public:
  static Arena& instance();

  // Zeroed, at a page boundary; null if there is no memory.
  std::byte* allocate(std::size_t bytes);
  // Does nothing for null, nor for what this process did not allocate.
  void release(std::byte* at);
  // Memory of another library: the whole of a file that has no name, and is not to be cut short,
  // mapped at `base`. It must stay so until it is abandoned; false if it is another file.
  bool adopt(std::byte* base, std::size_t bytes, int fd);
  // Unless anybody else still uses the memory, whoever has mapped the file need not keep its pages.
  void abandon(std::byte* base, bool is_used);
  // Whether the bytes lie in a block, or several, of one segment, and where.
  bool locate(const std::byte* at, std::size_t bytes, ArenaPlace& place) const;

 private:
  struct Segment {
    int fd;
    std::uint64_t inode;
    std::uint64_t device;
    std::size_t bytes;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes; no two touch
    std::map<std::size_t, std::size_t> used;
    bool is_adopted = false;  // then neither has anything in it
  };
  using Segments = std::map<std::byte*, Segment>;  // by their base

  Segments::iterator add_segment(std::size_t bytes);
  static std::byte* take(std::byte* base, Segment& segment, std::size_t bytes);
  static void give_back(Segment& segment, std::size_t offset, std::size_t bytes);

  mutable std::mutex mutex_;
  Segments segments_;
};

}  // namespace rallypoint
