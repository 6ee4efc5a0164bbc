// One rank's end of a communicator, as Python sees it: turns arrays into plain pointers and sizes,
// and decides nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/communicator.h"
#include "python/arguments.h"
#include "python/buffer.h"

namespace rallypoint::python {

// rank, pid, and descriptors: for control, for mail, for data
using FarPeer = std::tuple<std::uint32_t, std::int32_t, int, int, std::vector<int>>;
// what is made later: the listener's descriptor; the group's secret and name; streams to each rank;
// congestion control, and that of long round trips; where each far rank listens; and descriptors of
// control connections to neighbours, far and near
using Mesh = std::tuple<int, nanobind::bytes, std::string, std::uint32_t, std::string, std::string,
                        int, std::vector<std::tuple<std::uint32_t, std::string, std::uint16_t>>,
                        std::vector<std::tuple<std::uint32_t, int>>>;

// Where arrays lie in this process: 8 bytes for each.
nanobind::bytes addresses_of(nanobind::list arrays);

class PythonCommunicator {
 public:
  // What calls return instead of 0 or a Trouble.
  static constexpr int kBadBuffer = -1;
  static constexpr int kBadOperator = -2;
  static constexpr int kTooMany = -3;
  static constexpr int kFailed = -10;  // and beyond: minus the Trouble of a receive

  PythonCommunicator(int fd, std::uint32_t rank, std::uint32_t ranks, unsigned spins,
                     unsigned yields, nanobind::callable plan, double timeout_s,
                     nanobind::callable is_alone, bool synchronous_send,
                     const std::vector<FarPeer>& peers, const std::string& description,
                     nanobind::callable site, const std::optional<Mesh>& mesh);

  std::uint32_t rank() const { return communicator_->region().rank(); }
  std::uint32_t ranks() const { return communicator_->region().ranks(); }
  int watch_peers() { return communicator_->region().watch_peers(); }
  PeerMemoryAccess probe_memory() { return communicator_->memory().probe(); }
  void set_reach(PeerMemoryAccess reach, bool knows_itself);
  // Copies what lies at these addresses of a rank of this host (addresses_of) into these arrays;
  // whether it could. Whether the memory was still the rank's is for the caller to find out.
  bool read_memory(std::uint32_t rank, nanobind::bytes addresses, nanobind::list arrays);
  void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }
  // Meanwhile `run`, `run_apart`, `send` and `receive` refuse everything with kBadBuffer.
  void hold(bool is_held) { is_held_ = is_held; }
  std::uint64_t begun() const { return begun_; }

  // `timeout_s` is the group's if negative, here and below.
  int run(std::uint32_t collective, std::uint32_t op, std::uint32_t root, nanobind::handle input,
          nanobind::handle output, double timeout_s = -1);
  // The same for arrays that have not been checked yet, which must not overlap. One side may be a
  // list with an array for each rank, all of the same form as the one on the other side. If both
  // are lists, arrays may have any lengths.
  int run_apart(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                nanobind::handle input, nanobind::handle output, double timeout_s = -1);
  // The same for an input and an output of so many rows, of which each rank has a part.
  struct Cut {
    nanobind::handle array;
    std::vector<std::uint64_t> sizes;
    std::uint64_t rows;
  };
  int run_cut(std::uint32_t collective, const Cut& input, const Cut& output, double timeout_s);
  // The general form, in the background: arrays or lists of arrays, one for each block, of any
  // lengths. `plain`: arrays that have not been checked yet, as for `run_apart`, or, if `in_place`,
  // one that is both input and output; the memory that tensors have now is kept. `waits`: waits
  // until it is done.
  nanobind::object submit(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                          nanobind::handle input, nanobind::handle output, int as, double factor,
                          bool uneven, double timeout_s, bool plain, bool in_place, bool waits);

  int send(std::uint32_t to, std::int32_t tag, nanobind::handle buffer, double timeout_s = -1);
  // -1: from any rank. Returns the sender, or a negative code.
  int receive(int from, std::int32_t tag, nanobind::handle buffer, double timeout_s = -1);
  nanobind::object post(bool sends, int peer, std::int32_t tag, nanobind::handle buffer, int as,
                        double timeout_s, bool plain);

  nanobind::object trouble();
  void leave();
  void abort();
  void revoke();
  std::vector<std::uint32_t> gone() { return communicator_->region().gone(); }
  bool end_calls(double most_s);
  std::int32_t pid(std::uint32_t rank) { return communicator_->region().state(rank).pid.load(); }

 private:
  int run(std::uint32_t collective, std::uint32_t op, std::uint32_t root, const View& source,
          const View& target, double timeout_s);
  int run_list(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
               nanobind::handle arrays, nanobind::handle single, bool is_input, double timeout_s);
  int run_lists(std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                nanobind::handle input, nanobind::handle output, double timeout_s);
  int run_uneven(Arguments& given, std::uint32_t collective, std::uint32_t op, std::uint32_t root,
                 double timeout_s);
  double limit(double timeout_s) const { return timeout_s < 0 ? timeout_s_ : timeout_s; }
  // Whether arrays can be used without a copy, and need no checks but their own.
  bool is_plain(const Arguments& given, bool uneven) const;
  // Choose the program, and make the call with it. Returns 0 or an error code. `bytes` is the size
  // by which the program was chosen.
  int prepare(Arguments& given, std::uint32_t collective, std::uint32_t op, std::uint32_t root,
              double factor, bool uneven, std::uint64_t& bytes);
  int carry_out(const Call& call, std::uint64_t bytes);
  Trouble carry_out(Transfer& transfer);
  bool fill(Transfer& transfer, bool sends, int peer, std::int32_t tag, const View& view,
            double timeout_s) const;
  const Program& planned(std::uint32_t collective, std::uint32_t root, std::uint64_t bytes,
                         bool uneven);

  std::shared_ptr<Communicator> communicator_;
  nanobind::callable plan_;
  nanobind::callable is_alone_;
  nanobind::callable site_;
  double timeout_s_;
  std::uint64_t begun_ = 0;  // collectives; only touched with the GIL held
  bool synchronous_send_;
  bool is_held_ = false;
};

}  // namespace rallypoint::python
