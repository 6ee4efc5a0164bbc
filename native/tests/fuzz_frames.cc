// For libFuzzer: the data that another host sends, over each kind of connection (scripts/fuzz).
//
// The first byte chooses: control, mail, data. A receive of a large message waits meanwhile.

#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "engine/region.h"
#include "engine/tcp/control.h"
#include "engine/tcp/courier.h"
#include "engine/tcp/wire.h"

namespace {

using namespace rallypoint;

constexpr std::uint32_t kRanks = 3;
constexpr std::size_t kAwaited = 40000;

int make_region() {
  const int fd = memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(Layout(kRanks).bytes())) != 0) std::abort();
  return fd;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0 || size > 100'000) return 0;
  const int file = make_region();
  Region region(file, 0, kRanks, {1, 2});
  close(file);
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) std::abort();
  if (write(fds[1], data + 1, size - 1) < 0 && size > 1) std::abort();
  std::vector<std::byte> target(kAwaited);
  const tcp::PeerAddress peer{1, getpid(), fds[0], fds[0], {fds[0]}};
  switch (data[0] % 3) {
    case 0: {
      tcp::Control control(region, {peer}, data[0] / 3 % 2 == 1);  // another thread reads
      shutdown(fds[1], SHUT_WR);
      while (region.first_lost() < 0 && region.presence(1) == Presence::here) sched_yield();
      control.take_probes();
      if (region.poisoned()) region.await_details();
      break;
    }
    case 1: {
      tcp::Courier courier(region, {peer});
      courier.request(1, 0, target.data(), target.size());
      while (!courier.failure() && courier.poll()) {
      }
      break;
    }
    default: {
      tcp::Wire wire(region, {peer});
      wire.expect(1, 0, {1, 2, target.data(), target.size()});
      while (!wire.failure() && wire.poll()) {
        for (std::uint64_t sequence = 1; sequence < 4; ++sequence) {
          for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
            if (wire.peek(1, lane, sequence) != nullptr) wire.release(1, lane, sequence);
          }
        }
      }
    }
  }
  close(fds[1]);
  return 0;
}
