// The messages between agent and guardian over their socket, as bytes and nothing else.
//
// Requests (agent -> guardian): a Header, then `size` payload bytes; Spawn and Template carry
// kWorkerFds descriptors by SCM_RIGHTS on their first byte. Strings are NUL-terminated. Reports
// (guardian -> agent): fixed-size Report records. Both ends are the same build on the same machine:
// native byte order, no version. The agent's end is src/rallypoint/launch/agent/guardian.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace guardian {

inline constexpr uint32_t kMaxPayload = 8u << 20;  // above Linux's own limit on argv + environment
// stdin, stdout, stderr, control socket, memory for the flight record
inline constexpr int kWorkerFds = 5;
inline constexpr int kRecordFd = 4;

enum class RequestKind : uint32_t {
  kSpawn = 1,
  kSignal = 2,
  kEnd = 3,
  kFence = 4,
  kPause = 5,   // stop everything (SIGSTOP), and keep it stopped; no payload
  kResume = 6,  // let it run again; no payload
  // Start the process that forks workers from then on (template.h). As Spawn, but with no record.
  kTemplate = 7,
};

struct Header {
  uint32_t size;
  uint32_t kind;
};

// Moves, but is not copied: the strings are in `payload`.
struct SpawnRequest {
  SpawnRequest() = default;
  SpawnRequest(SpawnRequest&&) = default;
  SpawnRequest& operator=(SpawnRequest&&) = default;

  std::vector<char> payload;
  uint32_t worker = 0;
  uint32_t record_slot = 0;  // where its record is in that memory
  char* directory = nullptr;
  char* cpus = nullptr;            // "0,1,8": the CPUs on which it may run; "": any
  std::vector<char*> argv;         // ends with nullptr
  std::vector<char*> environment;  // ends with nullptr
};

struct SignalRequest {
  uint32_t worker;
  uint32_t signal;
};

// Workers may run until then (CLOCK_BOOTTIME, in ns), unless a later request allows more; 0:
// without limit. What still runs then is paused (1), as by kPause, or killed (0).
struct FenceRequest {
  int64_t until_ns;
  uint64_t pauses;
};

enum class ReportKind : int64_t {
  kStarted = 1,  // worker, pid
  kExited = 2,   // worker, pid, code (CLD_EXITED, CLD_KILLED, CLD_DUMPED), status, time
  kSpawnFailed =
      3,            // worker, pid (0: no process was made), code = SpawnStage, status = errno, time
  kUnkillable = 4,  // pid
  kEnded = 5,       // status = number of processes that could not be killed
  // The time is over: everything is being paused, or killed, and its ends are reported after this.
  kFenced = 6,
  kStopped = 7,    // worker, pid; a signal has stopped it, and it was not ours
  kContinued = 8,  // worker, pid
  kLate = 9,       // worker: the template; those that waited for it are started without it
};

enum class SpawnStage : int64_t { kNone = 0, kFork = 1, kDirectory = 2, kExec = 3, kAffinity = 4 };

struct Report {
  ReportKind kind;
  int64_t worker = 0;
  int64_t pid = 0;
  int64_t code = 0;
  int64_t status = 0;
  int64_t time_ns = 0;  // CLOCK_REALTIME
};
static_assert(sizeof(Report) == 48);

// False if the payload is not exactly one well-formed request.
bool parse_spawn(const char* payload, size_t size, SpawnRequest& request);
bool parse_signal(const char* payload, size_t size, SignalRequest& request);
bool parse_fence(const char* payload, size_t size, FenceRequest& request);

}  // namespace guardian
