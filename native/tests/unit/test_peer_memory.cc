// How a receiver maps its peers' arenas.

#include <sys/resource.h>
#include <unistd.h>

#include "engine/peer_memory.h"
#include "tests/unit/cases.h"
#include "tests/unit/regions.h"

namespace {

using namespace rallypoint;

// Without descriptors for this process, while it exists.
class NoDescriptorsLeft {
 public:
  NoDescriptorsLeft() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int lowest = dup(0);
    close(lowest);
    rlimit none = before_;
    none.rlim_cur = static_cast<rlim_t>(lowest);
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptorsLeft() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptorsLeft(const NoDescriptorsLeft&) = delete;
  NoDescriptorsLeft& operator=(const NoDescriptorsLeft&) = delete;

 private:
  rlimit before_{};
};

CASE(an_arena_that_could_not_be_mapped_is_mapped_later) {
  const tests::Memory file(2);
  Region region(file.fd(), 0, 2, {});
  region.state(1).pid.store(getpid());
  PeerMemory memory(region);
  memory.knows_itself = false;
  std::byte* const at = Arena::instance().allocate(1 << 16);
  CHECK(at != nullptr);
  if (at == nullptr) return;
  at[5] = std::byte{7};
  const Place place = memory.place_of(at, 1 << 16);
  CHECK(place.arena.segment != 0);
  PeerViews views(memory);
  {
    const NoDescriptorsLeft none;
    CHECK(views.find(1, place, 1 << 16) == nullptr);
  }
  const std::byte* const found = views.find(1, place, 1 << 16);
  CHECK(found != nullptr && found != at && found[5] == std::byte{7});
  Arena::instance().release(at);
}

}  // namespace
