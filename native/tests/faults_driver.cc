// What only rare faults show: a rank killed at every instant of an error report, each trouble
// across hosts, message numbers beyond 32 bits, a system that is short of memory.
//
//   faults_driver [WITHOUT]     "kills": no ptrace, where a sanitizer does not get along with it
//
// Compiled with RALLYPOINT_FIRST_ORDINAL beyond 32 bits. A failed expectation ends it.

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "engine/tcp/control.h"
#include "engine/tcp/stream.h"

namespace {

using namespace rallypoint;

#define EXPECT(condition)                                              \
  do {                                                                 \
    if (!(condition)) {                                                \
      std::fprintf(stderr, "line %d: not %s\n", __LINE__, #condition); \
      std::abort();                                                    \
    }                                                                  \
  } while (false)

int make_region(std::uint32_t ranks) {
  const int fd = memfd_create("faults_driver", MFD_CLOEXEC);
  EXPECT(fd >= 0 && ftruncate(fd, static_cast<off_t>(Layout(ranks).bytes())) == 0);
  return fd;
}

void fill(CallRecord& record, std::uint64_t number) {
  record.count = 1000 + number;
  record.collective = 3;
  record.dtype = 1;
  record.root = 2;
  record.number.store(number);
}

// --- A reporter that is killed.

constexpr std::uint32_t kRanks = 3;
const std::vector<CircleMember> kCircle = {{1, 2, 7, 0, 3}, {2, 1, 8, 1, 5}};

struct Report {
  const char* name;
  Blame blame;
  std::function<void(Region&)> write;
};

std::vector<Report> reports() {
  static CallRecord theirs;
  static CallRecord ours;
  static Poison far;
  fill(theirs, 5);
  fill(ours, 6);
  far.blame.store(Blame{Trouble::timeout, 2, 1}.packed());
  far.timeout_s = 1.5;
  return {
      {"spread",
       {Trouble::mismatch, 1, 0},
       [](Region& region) { region.spread(Trouble::mismatch, 1, &theirs, &ours, 17, 18, 2.5); }},
      {"spread_circle",
       {Trouble::circle, 2, 0},
       [](Region& region) { region.spread_circle(kCircle); }},
      {"adopt", {Trouble::timeout, 2, 1}, [](Region& region) { region.adopt(far); }},
  };
}

// A process that reports trouble as rank 0, one instruction at a time.
class Stepped {
 public:
  Stepped(int fd, const Report& report) : pid_(fork()) {
    EXPECT(pid_ >= 0);
    if (pid_ == 0) {
      Region region(fd, 0, kRanks, {});
      ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      raise(SIGSTOP);
      report.write(region);
      raise(SIGSTOP);
      _exit(0);
    }
    EXPECT(wait() == SIGSTOP);
  }
  ~Stepped() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  // False: the report is written.
  bool step() {
    EXPECT(ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) == 0);
    return wait() == SIGTRAP;
  }

 private:
  int wait() {
    int status = 0;
    EXPECT(waitpid(pid_, &status, 0) == pid_ && WIFSTOPPED(status));
    return WSTOPSIG(status);
  }

  pid_t pid_;
};

// All that an error report stores into: the header, and the state of each rank.
std::string stored(const Region& region) {
  const auto* const base =
      reinterpret_cast<const char*>(&region.poison()) - offsetof(Header, poison);
  std::string bytes(base, sizeof(Header));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    bytes.append(reinterpret_cast<const char*>(&region.state(rank)), sizeof(RankState));
  }
  return bytes;
}

// Lets ranks 1 and 2 sleep, so that they are rung.
void sleep(Region& region) { region.state(region.rank()).sleeping.store(1); }

std::vector<unsigned> steps_that_store(const Report& report) {
  const int fd = make_region(kRanks);
  std::vector<unsigned> steps;
  {
    Stepped reporter(fd, report);
    Region region(fd, 1, kRanks, {});
    sleep(region);
    std::string before = stored(region);
    for (unsigned step = 1; reporter.step(); ++step) {
      std::string after = stored(region);
      if (after != before) steps.push_back(step);
      before = std::move(after);
    }
    EXPECT(region.await_details());
  }
  close(fd);
  return steps;
}

void kill_at_every_store() {
  for (const Report& report : reports()) {
    const std::vector<unsigned> steps = steps_that_store(report);
    EXPECT(steps.size() > 3);
    unsigned silent = 0;
    unsigned partial = 0;
    for (const unsigned last : steps) {
      for (const unsigned count : {last - 1, last}) {
        const int fd = make_region(kRanks);
        auto reporter = std::make_unique<Stepped>(fd, report);
        Region region(fd, 1, kRanks, {});
        sleep(region);
        for (unsigned step = 0; step < count; ++step) EXPECT(reporter->step());
        reporter.reset();
        if (!region.poisoned()) {  // the death itself is what survivors will see and report
          ++silent;
          region.spread(Trouble::peer_lost, 0, nullptr, nullptr);
          EXPECT(region.blame().trouble == Trouble::peer_lost && region.await_details());
        } else {
          const Blame blame = region.blame();
          EXPECT(blame.packed() == report.blame.packed());
          partial += !region.await_details();
        }
        close(fd);
      }
    }
    EXPECT(silent > 0 && partial > 0);
    std::printf("%s: killed at each of %zu stores; %u times before a word, %u times in the midst\n",
                report.name, steps.size(), silent, partial);
  }
}

// --- Across hosts.

struct Pair {
  int fds[2];
  Pair() { EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0); }
};

// A rank that is alone on its host, and one far peer.
struct FarEnd {
  FarEnd(std::uint32_t rank, const Pair& pair)
      : region(make_region(2), rank, 2, {1 - rank}),
        control(region, {{1 - rank, getpid(), pair.fds[rank], -1, {}}}, false) {
    region.set_messenger(&control);
  }
  ~FarEnd() { region.set_messenger(nullptr); }
  Region region;
  tcp::Control control;
};

template <typename Condition>
void await(Condition condition) {
  for (int look = 0; look < 20000 && !condition(); ++look) usleep(500);
  EXPECT(condition());
}

void tell_each_trouble_to_another_host() {
  for (unsigned number = 1; number < kTroubles; ++number) {
    const auto trouble = static_cast<Trouble>(number);
    const Pair pair;
    FarEnd here(0, pair);
    FarEnd there(1, pair);
    CallRecord theirs{};
    CallRecord ours{};
    fill(theirs, 5);
    fill(ours, 6);
    here.region.spread(trouble, 1, &theirs, &ours, 17, 18, 2.5);
    await([&] { return there.region.poisoned() || there.region.first_lost() >= 0; });
    EXPECT(there.region.first_lost() < 0);
    const Blame blame = there.region.blame();
    EXPECT(blame.trouble == trouble && blame.culprit == 1 && blame.reporter == 0);
    EXPECT(there.region.await_details());
    const Poison& poison = there.region.poison();
    EXPECT(poison.sent == 17 && poison.expected == 18 && poison.timeout_s == 2.5);
    EXPECT(poison.theirs.count == 1005 && poison.ours.count == 1006);
  }
  std::printf("%u troubles told to another host\n", kTroubles - 1);
}

// --- Numbers of messages.

void send_beyond_32_bits() {
  const int fd = make_region(2);
  Communicator sender(fd, 0, 2, {0, 50}, {}, {});
  Communicator receiver(fd, 1, 2, {0, 50}, {}, {});
  NoHost host;
  std::int64_t value = 0;
  const auto transfer = [&](bool sends, std::int32_t tag) {
    Transfer transfer{.sends = sends,
                      .peer = sends ? 1u : 0u,
                      .tag = tag,
                      .dtype = DType::int64,
                      .data = reinterpret_cast<std::byte*>(&value),
                      .bytes = sizeof value,
                      .timeout_s = 1};
    return (sends ? sender : receiver).transfer(transfer, host);
  };
  const auto exchange = [&](std::int64_t sent) {
    value = sent;
    EXPECT(transfer(true, 1) == Trouble::none);
    value = 0;
    EXPECT(transfer(false, 1) == Trouble::none && value == sent);
  };
  for (int i = 0; i < 100; ++i) exchange(i);
  // A message that nobody takes blocks the envelopes after its own. Meanwhile 2^31 others are sent;
  // the contents of those envelopes are then that much older.
  value = -1;
  EXPECT(transfer(true, 2) == Trouble::none);
  Region& region = sender.region();
  auto* const envelopes = region.at<Envelope>(0, region.layout().envelopes(0));
  unsigned stale = 0;
  for (unsigned i = 0; i < kEnvelopes; ++i) {
    if (envelopes[i].tag.load() != 1) continue;
    envelopes[i].ordinal.fetch_sub((std::uint64_t{1} << 31) + 100);
    ++stale;
  }
  EXPECT(stale > 20);
  for (int i = 0; i < 100; ++i) exchange(1000 + i);
  value = 0;
  EXPECT(transfer(false, 2) == Trouble::none && value == -1);
  close(fd);
  std::printf("messages from number %llu on\n", static_cast<unsigned long long>(kFirstOrdinal));
}

// --- Waiting.

// A message without a bell is seen within a millisecond, whatever was waited for before.
void begin_each_wait_anew() {
  const int fd = make_region(1);
  Region region(fd, 0, 1, {});
  NoHost host;
  Waiter waiter(region, {0, 0}, host, nullptr);
  double best_s = 1;
  for (int attempt = 0; attempt < 5; ++attempt) {
    for (int i = 0; i < 9; ++i) waiter.pause(0);  // the last sleep takes 50 ms
    waiter.reset();
    waiter.pause(0);
    const double began_s = now_s();
    waiter.pause(0);
    best_s = std::min(best_s, now_s() - began_s);
  }
  EXPECT(best_s < 0.025);
  close(fd);
}

// --- Turns.

// A long call gets no more than about 1 MiB of progress at a time, even if it waits for nobody.
void take_turns() {
  constexpr std::size_t kItems = 16 << 20;
  const int fd = make_region(1);
  Region region(fd, 0, 1, {});
  PeerMemory memory(region);
  std::deque<Ring> rings;
  for (unsigned lane = 0; lane < kLanes; ++lane) rings.emplace_back(nullptr);
  Executor executor(region, memory, Channel::collective(region, rings, nullptr), {0, 0});
  Operation copy{};
  copy.is_last = true;
  copy.count = 1;
  copy.operands = {{false, {Buffer::input, 0}, 0, 0, 0}};
  copy.targets = {{Buffer::output, 0}};
  Program program{};
  program.ranks = program.chunks = program.max_span = program.max_operands = 1;
  program.input_blocks = program.output_blocks = 1;
  program.lanes = {{copy}};
  const std::vector<std::byte> input(kItems, std::byte{1});
  std::vector<std::byte> output(kItems);
  const Call call{
      &program, {0, DType::uint8, ReduceOp::sum, 0}, kItems, input.data(), output.data(), 60};
  NoHost host;
  executor.begin(call);
  std::size_t before = 0;
  for (Step step = Step::moved; step != Step::finished;) {
    step = executor.step(false, host);
    EXPECT(step == Step::moved || step == Step::finished);
    const auto end =
        std::find(output.begin() + static_cast<std::ptrdiff_t>(before), output.end(), std::byte{0});
    const auto copied = static_cast<std::size_t>(end - output.begin());
    EXPECT(copied - before <= 2 << 20);
    before = copied;
  }
  EXPECT(before == kItems);
  close(fd);
}

// --- Memory of peers.

int permissions = 0;

// With RALLYPOINT_DIRECT=0 nobody else is permitted to read.
void let_nobody_read_unasked() {
  const int fd = make_region(1);
  Region region(fd, 0, 1, {});
  const PeerMemory memory(region);
  EXPECT(permissions == 0);
  PeerMemory::let_peers_read();
  EXPECT(permissions == 1);
  close(fd);
}

// --- A system that is short of memory for a while.

int errors_left = 0;

void read_memory_later() {
  const int fd = make_region(1);
  Region region(fd, 0, 1, {});
  const PeerMemory memory(region);
  const std::uint64_t value = 42;
  std::uint64_t read = 0;
  const auto address = reinterpret_cast<std::uint64_t>(&value);
  errors_left = 3;
  EXPECT(memory.read(0, address, reinterpret_cast<std::byte*>(&read), sizeof read) ==
         Trouble::none);
  EXPECT(errors_left == 0 && read == value);
  close(fd);
}

void outlive_a_lack_of_memory() {
  const Pair pair;
  tcp::Stream one(pair.fds[0]);
  tcp::Stream other(pair.fds[1]);
  char text[] = "text";
  const iovec span{text, sizeof text};
  errors_left = 3;
  std::size_t sent = 0;
  for (int attempt = 0; attempt < 5 && sent == 0; ++attempt) sent = one.write(&span, 1);
  EXPECT(sent == sizeof text && one.is_open_for_writing());
  char received[sizeof text];
  const iovec target{received, sizeof received};
  errors_left = 3;
  std::size_t came = 0;
  for (int attempt = 0; attempt < 5 && came == 0; ++attempt) came = other.read(&target, 1);
  EXPECT(came == sizeof text && !other.has_ended());
}

}  // namespace

// Replaces the C library's function; it usually does what the system says.
extern "C" ssize_t send(int fd, const void* data, size_t size, int flags) {
  if (errors_left > 0) {
    errno = errors_left-- % 2 == 0 ? ENOBUFS : ENOMEM;
    return -1;
  }
  return sendto(fd, data, size, flags, nullptr, 0);
}
extern "C" ssize_t recv(int fd, void* data, size_t size, int flags) {
  if (errors_left > 0) {
    errno = errors_left-- % 2 == 0 ? ENOBUFS : ENOMEM;
    return -1;
  }
  return recvfrom(fd, data, size, flags, nullptr, nullptr);
}

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals,
                                    const iovec* remote, unsigned long remotes,
                                    unsigned long flags) {
  if (errors_left > 0) {
    --errors_left;
    errno = ENOMEM;
    return -1;
  }
  return syscall(SYS_process_vm_readv, pid, local, locals, remote, remotes, flags);
}
extern "C" int prctl(int option, ...) {
  permissions += option == PR_SET_PTRACER;
  return 0;
}

int main(int argc, char** argv) {
  const std::string without = argc > 1 ? argv[1] : "";
  if (without != "kills") kill_at_every_store();  // first, because there is only one thread yet
  tell_each_trouble_to_another_host();
  send_beyond_32_bits();
  begin_each_wait_anew();
  take_turns();
  let_nobody_read_unasked();
  outlive_a_lack_of_memory();
  read_memory_later();
}
