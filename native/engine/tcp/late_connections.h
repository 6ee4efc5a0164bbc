// Connections to far ranks that are made on first need, in groups of so many hosts that connecting
// all with all at the start would be too many (docs/decisions/092-far-peers.md).
//
// A thread that needs a rank says so by `want`, and does something else; a rank calls the other, or
// is called, on the watcher's thread, whatever the program is doing. Both may call at once: a call
// that has not yet been proved gives way, and of two that have, the higher rank's stands. All
// connections with a rank are handed over together.
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

// The address at which a rank listens.
struct Endpoint {
  std::uint32_t rank;
  std::string address;
  std::uint16_t port;
};

struct LateMesh {
  int listener;  // taken over
  Admission admission;
  std::uint32_t streams;  // for data, to each rank
  // The congestion control with which connections begin; empty: the default.
  std::string congestion;
  std::string long_congestion;      // and the one for those with long round trips, unless empty
  int silence_s;                    // after which a host that does not answer counts as lost
  std::vector<Endpoint> endpoints;  // of all far ranks; others are harmless
};

class LateConnections final : public Watched {
 public:
  // Ranks in `controlled` already have a control connection.
  LateConnections(Region& region, Control& control, LateMesh mesh,
                  const std::vector<std::uint32_t>& controlled);
  ~LateConnections() override;
  LateConnections(const LateConnections&) = delete;
  LateConnections& operator=(const LateConnections&) = delete;

  // From any thread: the rank is needed. Cheap if that is already known.
  void want(std::uint32_t rank);

  struct Made {
    std::uint32_t rank;
    std::vector<int> fds;
  };
  // Connections made since the last call, for data or for mail.
  std::vector<Made> take_data() { return take(data_); }
  std::vector<Made> take_mail() { return take(mail_); }

  // A rank that cannot be reached, although nobody reports that it has gone; or this rank itself,
  // if it has reached a limit of its system.
  std::optional<Failure> failure() const;
  // Accepts no more calls, and makes none.
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
    std::vector<int> fds;     // by purpose; -1: none yet, kElsewhere: handed over
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
  void lack(std::uint32_t rank, int error);
  void set_failure(std::uint32_t rank, int error);
  void set_clock();

  Region& region_;
  Control& control_;
  const LateMesh mesh_;
  int epoll_;
  int clock_;  // a timer that ticks while anything is in progress
  std::uint64_t key_ = 0;
  std::unique_ptr<std::atomic<bool>[]> wanted_;  // by rank
  Ready data_;
  Ready mail_;
  std::atomic<std::uint64_t> failure_{0};  // rank + 1, and the error code below it
  mutable std::mutex mutex_;               // of all above that is not atomic, and below
  std::vector<Link> links_;                // by rank
  std::map<std::uint64_t, std::unique_ptr<Talk>> talks_;
  std::uint64_t talk_count_ = 0;
  bool is_closed_ = false;
  bool is_ticking_ = false;
  bool is_paused_ = false;  // no descriptors are left for callers
  double lacked_s_ = 0;     // since when none are left for calls; 0: there are some
};

}  // namespace rallypoint::tcp
