// Connections to far ranks that are made when they are first needed, in groups of so many hosts
// that each with each at the start would be too many (docs/decisions/092-far-peers.md).
//
// Whoever needs a rank says so by `want`, and goes on with something else; a rank calls the other,
// or is called, on the watcher's thread, whatever the program is doing. Both may call at once: who
// has not yet proved itself gives way, and of two that have, the higher rank's call stands. All
// connections with a rank are handed on together.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/region.h"
#include "engine/tcp/handshake.h"
#include "engine/tcp/watcher.h"
#include "engine/transport.h"

namespace rallypoint::tcp {

class Control;

// Where a rank listens.
struct Endpoint {
  std::uint32_t rank;
  std::string address;
  std::uint16_t port;
};

struct LateMesh {
  int listener;  // taken over
  Admission admission;
  std::uint32_t streams;        // for data, to each rank
  std::string congestion;       // the congestion control that connections begin with; empty: usual
  std::string long_congestion;  // and what those of long round trips go back to, unless empty
  std::vector<Endpoint> endpoints;  // of all far ranks; others do no harm
};

class LateConnections final : public Watched {
 public:
  // With each of `controlled` there is a control connection already.
  LateConnections(Region& region, Control& control, LateMesh mesh,
                  const std::vector<std::uint32_t>& controlled);
  ~LateConnections() override;
  LateConnections(const LateConnections&) = delete;
  LateConnections& operator=(const LateConnections&) = delete;

  // From any thread: the rank is needed. Cheap if that was said before.
  void want(std::uint32_t rank);

  struct Made {
    std::uint32_t rank;
    std::vector<int> fds;
  };
  // Connections that were made since the last time, for data or for mail.
  std::vector<Made> take_data() { return take(data_); }
  std::vector<Made> take_mail() { return take(mail_); }

  // A rank that cannot be connected with, although nobody says that it has gone.
  std::optional<Failure> failure() const;
  // Takes no more calls, and makes none.
  void close();

 private:
  struct Ready {
    std::atomic<bool> is_any{false};
    std::vector<Made> made;
  };
  struct Talk;
  struct Link {
    const Endpoint* endpoint = nullptr;  // null: not a far rank
    bool is_wanted = false;
    bool is_complete = false;
    std::vector<int> fds;     // by purpose; -1: not yet, kElsewhere: others have it
    double doubted_s = 0;     // when the first call failed,
    double call_again_s = 0;  // and when to try again
  };

  void on_ready(int fd, std::uint64_t key) override;
  std::vector<Made> take(Ready& ready);
  void call(std::uint32_t rank, std::uint32_t purpose);
  void accept_all();
  void pause(bool is_paused);
  void begin(std::unique_ptr<Talk> talk, std::uint32_t events);
  void go_on(std::uint64_t number);
  bool exchange(Talk& talk, int& error);
  bool admit(Talk& talk);
  void drop(std::uint64_t number);
  void fail(const Talk& talk, int error);
  void finish(std::uint64_t number);
  void complete(std::uint32_t rank);
  void prepare(int fd) const;
  void settle(int fd, std::uint32_t purpose) const;
  Talk* call_under_way(std::uint32_t rank, std::uint32_t purpose);
  void look();
  void give_up(std::uint32_t rank, int error);
  void set_clock();

  Region& region_;
  Control& control_;
  const LateMesh mesh_;
  int epoll_;
  int clock_;  // a timer that ticks while anything is under way
  std::uint64_t key_ = 0;
  std::unique_ptr<std::atomic<bool>[]> wanted_;  // by rank
  Ready data_;
  Ready mail_;
  std::atomic<std::uint64_t> failure_{0};  // rank + 1, and the error below it
  mutable std::mutex mutex_;               // of all above that is not atomic, and below
  std::vector<Link> links_;                // by rank
  std::map<std::uint64_t, std::unique_ptr<Talk>> talks_;
  std::uint64_t talk_count_ = 0;
  bool is_closed_ = false;
  bool is_ticking_ = false;
  bool is_paused_ = false;  // no descriptor is left for callers
};

}  // namespace rallypoint::tcp
